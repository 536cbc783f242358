"""Simulate a missing device in this process: tensors report it as their device, and follow its rules.

Mixed devices and .numpy() raise, .cpu() and .to() copy, a generator must be of the device, and MPS refuses float64 and
operations without a kernel (unless PYTORCH_ENABLE_MPS_FALLBACK=1). With numbers, random numbers come from the CPU's
generator, so a run is bitwise identical to the CPU's if both use the same kernels.

Not modeled: time, streams (all work is synchronous), memory (constants), torch.compile, torch.load() without map_location,
a GPU's recurrent layers with numbers, several processes on one device. sys.platform is unchanged, and torch.device(1)
prints as privateuseone:1. It replaces private parts of torch; tests/tools/plan/simulator/test_simulator.py names each, so that
an upgrade of torch shows what broke.
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
from runner.tools.plan.simulator.tensor import SimulatedFactories, pretence
from runner.tools.plan.simulator.torch_parts import Naming, SimulatedMachine, replacements

#: c10::DeviceType
DEVICE_TYPES = {"cpu": 0, "cuda": 1, "mps": 13, "meta": 14}
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
ADD_GUARD = "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"


@contextlib.contextmanager
def simulated_device(
    name: str, *, has_numbers: bool = True, machine: SimulatedMachine | None = None
) -> Iterator[torch.device]:
    """Simulate a device. The device guard stays when the block ends.

    Args:
        has_numbers: Whether its tensors have values; without, nothing is computed, and reads return 1 or True.

    Raises:
        OSError: If torch's libraries have another layout (Windows).
    """
    import torch._dynamo  # takes seconds; a later import would find torch.cuda's functions twice and fail

    device = torch.device(name)
    if device.type in ("cuda", "mps"):
        _put_guards(device.type)
        # autograd waits for the streams of the accelerator that torch is built for, e.g., CUDA; a registered backend
        # replaces it, and has no streams
        rename_privateuse1_backend(torch_private.brought_accelerator())
    with contextlib.ExitStack() as stack:
        pretence.device = device if device.type == "cpu" else torch.device(device.type, device.index or 0)
        pretence.current_index, pretence.has_numbers = 0, has_numbers
        for owner, attribute, value in list(replacements(machine or SimulatedMachine(), [SimulatedFactories, Naming])):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        # cuDNN's batch norm of a torch built for CUDA does not compute on other devices
        stack.callback(setattr, torch.backends.cudnn, "enabled", torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False
        before = torch_private.only_lift_cpu_tensors()
        torch_private.set_only_lift_cpu_tensors(True)  # torch.tensor([1.0], device=...) is made on the CPU, then copied
        stack.callback(torch_private.set_only_lift_cpu_tensors, before)
        stack.enter_context(SimulatedFactories())  # type: ignore[no-untyped-call]
        stack.enter_context(Naming())
        yield pretence.device


def _put_guards(kind: str) -> None:
    """Give the device type meta's guard, which does nothing, for the rest of the process.

    C++ uses a guard when a tensor of the type is created or differentiated; without one it raises, or aborts in noexcept
    parts of autograd. CUDA's real guard queries the driver, and fails without a GPU or in a forked process.
    """
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
