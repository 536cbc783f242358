"""Simulates a device that this machine lacks: tensors say that they lie there, and obey its rules, in this whole process.

Mixing devices raises, .numpy() raises, .cpu() and .to() copy, a generator must be the device's, MPS refuses float64 and
what it has no kernel for (PYTORCH_ENABLE_MPS_FALLBACK=1 lets that pass). With numbers, what is drawn at random is drawn
by the CPU's generator, so the same seed gives the CPU's run, bit for bit, where both take the same kernels.

Not modelled: time, streams (all work is done at once), memory (constants), torch.compile, torch.load() without
map_location, a GPU's recurrent layers with numbers, several processes on one device; sys.platform
stays what it is, and torch.device(1), which is taken for what it means, calls itself privateuseone:1. It lies to private
parts of torch; tests/plan/simulator/test_simulator.py names them one by one, so that an upgrade of torch says what broke.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from runner.device import torch_private
from runner.plan.simulator.tensor import Making, pretence
from runner.plan.simulator.torch_parts import Machine, Naming, replacements

#: c10::DeviceType
DEVICE_TYPES = {"cpu": 0, "cuda": 1, "mps": 13, "meta": 14}
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
    if device.type in ("cuda", "mps"):
        _put_guards(device.type)
        # C++ waits for the streams of a build's own accelerator: autograd of CUDA's, wherever torch is built for it. An
        # accelerator that a package brings comes before it. There is none here, so there are no streams
        rename_privateuse1_backend(torch_private.brought_accelerator())
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


def _put_guards(kind: str) -> None:
    """Gives the device type meta's guard, which does nothing, for good. C++ asks for one wherever a tensor of that type is
    made or differentiated; without one it raises, or ends the process (parts of autograd are noexcept). A real one gives
    way, whatever is simulated: that of a torch built for CUDA asks the driver for GPUs when autograd begins, which need
    not be there, and answers a forked process with an error."""
    folder = Path(torch.__file__).parent / "lib"
    file = next((folder / name for name in ("libc10.so", "libc10.dylib") if (folder / name).exists()), None)
    if file is None:
        raise OSError(f"no libc10 in {folder}: a device can't be simulated on this system")
    library = ctypes.CDLL(str(file))
    guards = (ctypes.c_void_p * 21).in_dll(library, GUARDS)
    add = getattr(library, ADD_GUARD)
    add.argtypes, add.restype = [ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p], None
    real = {number for number, guard in enumerate(guards) if guard} - {DEVICE_TYPES["cpu"], DEVICE_TYPES["meta"]}
    for number in real | {DEVICE_TYPES[kind]}:
        add(None, number, guards[DEVICE_TYPES["meta"]])
