"""Simulates a device that this machine lacks: tensors say that they lie there, and obey its rules, in this whole process.

Mixing devices raises, .numpy() raises, .cpu() and .to() copy, a generator must be the device's, MPS refuses float64 and
what it has no kernel for (PYTORCH_ENABLE_MPS_FALLBACK=1 lets that pass). With numbers, what is drawn at random is drawn
by the CPU's generator, so the same seed gives the CPU's run, bit for bit, where both take the same kernels.

Not modelled: time, streams (all work is done at once), memory (constants), torch.compile, torch.load() without
map_location, cuDNN's recurrent layers (cells by their formulas instead), several processes on one device; sys.platform
stays what it is. It lies to private parts of torch; tests/plan/simulator/test_simulator.py names them one by one, so that
an upgrade of torch says what broke.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from runner.device import torch_private
from runner.plan.simulator.tensor import Making, pretence
from runner.plan.simulator.torch_parts import Machine, Naming, replacements

#: c10::DeviceType
DEVICE_TYPES = {"cuda": 1, "mps": 13, "meta": 14}
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
ADD_GUARD = "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"


@contextlib.contextmanager
def simulated_device(name: str, *, has_numbers: bool = True, machine: Machine | None = None) -> Iterator[torch.device]:
    """The device that `name` says, for the rest of this process: the guard stays when the block ends.

    has_numbers: whether its tensors hold any; without, nothing is computed, and what is read is 1 or True.
    Raises: OSError where torch's libraries are not laid out as this knows them (Windows).
    """
    import torch._dynamo  # takes seconds; later it would meet torch.cuda's functions twice and refuse

    device = torch.device(name)
    _add_guard(device.type)
    with contextlib.ExitStack() as stack:
        pretence.device = device if device.type == "cpu" else torch.device(device.type, device.index or 0)
        pretence.current_index, pretence.has_numbers = 0, has_numbers
        for owner, attribute, value in list(replacements(machine or Machine(), [Making, Naming])):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        # a torch built for CUDA has a batch norm of cuDNN's, which computes on no other device
        stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False
        before = torch_private.only_lift_cpu_tensors()
        torch_private.set_only_lift_cpu_tensors(True)  # torch.tensor([1.0], device=...) is made on the CPU, then copied
        stack.callback(torch_private.set_only_lift_cpu_tensors, before)
        stack.enter_context(Making())  # type: ignore[no-untyped-call]
        stack.enter_context(Naming())
        yield pretence.device


def _add_guard(kind: str) -> None:
    """Gives the device type meta's guard, which does nothing, for good, in the place of a real one too: that of a torch
    built for CUDA would ask for a GPU that need not be here. C++ asks for one wherever a tensor of that type
    is made or differentiated; without one it raises, or ends the process (parts of autograd are noexcept)."""
    if kind not in DEVICE_TYPES:
        return
    folder = Path(torch.__file__).parent / "lib"
    file = next((folder / name for name in ("libc10.so", "libc10.dylib") if (folder / name).exists()), None)
    if file is None:
        raise OSError(f"no libc10 in {folder}: a device can't be simulated on this system")
    library = ctypes.CDLL(str(file))
    guards = (ctypes.c_void_p * 21).in_dll(library, GUARDS)
    add = getattr(library, ADD_GUARD)
    add.argtypes, add.restype = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p], None
    add(None, DEVICE_TYPES[kind], guards[DEVICE_TYPES["meta"]])
