"""Replacements in torch's modules on the simulated machine, as (owner, name, value); device.py applies them.

Streams and events complete at once, as every kernel has ended when its call returns: missing waits are not found. Memory
functions return constants.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.device.torch_private import OpOverload, eager_transforms, functions, tree_map, vmap
from runner.tools.plan.simulator.layers import MODES, attention, ctc_loss, recurrent
from runner.tools.plan.simulator.shapes import NotSimulated
from runner.tools.plan.simulator.tensor import SimulatedTensor, pretence
from runner.tools.plan.simulator.values import value_reads

Replacement = tuple[Any, str, Any]


@dataclass(frozen=True)
class SimulatedMachine:
    """Properties of the simulated devices."""

    name: str = "Simulated GPU"
    total_bytes: int = 24 * 2**30
    used_bytes: int = 2**30
    capability: tuple[int, int] = (9, 0)
    num_devices: int = 2

    def cuda(self) -> dict[str, Any]:
        """Return the results of torch.cuda's functions."""
        major, minor = self.capability
        about = SimpleNamespace(
            name=self.name,
            total_memory=self.total_bytes,
            major=major,
            minor=minor,
            multi_processor_count=100,
            uuid="simulated",
        )
        return {
            **(self.memory() | RANDOM),
            **dict.fromkeys(["init", "_lazy_init", "manual_seed_all", "set_stream"]),
            **dict.fromkeys(["is_available", "is_initialized"], True),
            "is_bf16_supported": self.capability >= (8, 0),
            "is_current_stream_capturing": False,
            "device_count": self.num_devices,
            "get_arch_list": [f"sm_{major}{minor}"],
            "get_device_capability": self.capability,
            "get_device_name": self.name,
            "get_device_properties": about,
            "mem_get_info": (self.total_bytes - self.used_bytes, self.total_bytes),
        }

    def mps(self) -> dict[str, Any]:
        return {
            **RANDOM,
            **dict.fromkeys(["empty_cache", "synchronize"]),
            **dict.fromkeys(["current_allocated_memory", "driver_allocated_memory"], self.used_bytes),
            "recommended_max_memory": self.total_bytes,
            "is_available": True,
            "device_count": 1,
        }

    def memory(self) -> dict[str, Any]:
        names = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"]
        nothings = ["empty_cache", "reset_peak_memory_stats", "synchronize"]
        return dict.fromkeys(names, self.used_bytes) | dict.fromkeys(nothings)


#: what torch.func enters for each transform; its stack is not available while results are made
TRANSFORMS: list[tuple[Any, str]] = [
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
    (vmap, "vmap_increment_nesting"),
]
DEVICE_OF = Tensor.device.__get__
RANDOM = dict.fromkeys(["manual_seed", "seed", "get_rng_state", "set_rng_state", "set_per_process_memory_fraction"])
MPS_BACKEND: dict[str, Any] = dict.fromkeys(
    ["is_available", "is_built", "is_macos_or_newer", "is_macos13_or_newer"], True
)
MPS_BACKEND |= {"get_name": "Simulated M", "get_core_count": 8}
#: parts of a Mac's torch, if this one may have a GPU
NO_CUDA: dict[str, Any] = {"is_available": False, "is_initialized": False, "device_count": 0}


def replacements(machine: SimulatedMachine, modes: Sequence[Callable[[], Any]]) -> Iterator[Replacement]:
    """Yield all replacements for a simulated device."""
    kind = pretence.device.type
    yield torch.nn.Module, "_apply", _by_swapping(torch.nn.Module._apply)
    yield torch.nn.functional, "scaled_dot_product_attention", attention
    for owner, name in TRANSFORMS:
        yield owner, name, _counted(getattr(owner, name))
    yield torch, "ctc_loss", ctc_loss
    for name in MODES:
        yield functions, name, recurrent(name, getattr(functions, name))
    yield threading.Thread, "run", _with_modes(threading.Thread.run, modes)
    yield torch, "load", _onto_device(torch.load)
    for name in ("script", "trace"):  # C++ would run it with tensors that it does not know: keep the Python function
        yield torch.jit, name, lambda found, *args, **kwargs: found
    for owner in (torch.autograd, torch.autograd.graph):
        yield owner, "_engine_run_backward", _telling_meta(owner._engine_run_backward)
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        module: Any = sys.modules[name]  # not by attribute, which torch.optim hides
        yield module, "_foreach_supported_types", [*module._foreach_supported_types, SimulatedTensor]
    if kind == "cpu":
        return
    yield torch, "Generator", Generator
    # on the class, so that a DataLoader's pinning thread finds them, too
    yield Tensor, "pin_memory", lambda self, device=None: self
    yield Tensor, "is_pinned", lambda self, device=None: False
    yield Tensor, "record_stream", nothing
    yield from _answers(machine, is_cuda=kind == "cuda")


def _answers(machine: SimulatedMachine, *, is_cuda: bool) -> Iterator[Replacement]:
    count = machine.num_devices if is_cuda else 1
    constants: dict[Any, dict[str, Any]] = {
        torch.accelerator: {**machine.memory(), "is_available": True, "device_count": count}
    }
    if is_cuda:
        yield Tensor, "cuda", _to_cuda
        constants |= {torch.cuda: machine.cuda(), torch.cuda.amp.common: {"amp_definitely_not_available": False}}
        constants |= {torch.backends.cudnn: {"is_acceptable": False}}  # its recurrent layers are not modeled
    else:
        constants |= {torch.mps: machine.mps(), torch.backends.mps: MPS_BACKEND, torch.cuda: NO_CUDA}
        constants |= {torch.backends.cuda: {"is_built": False}}
        yield torch.cuda, "_lazy_init", _no_cuda
    for owner, values in constants.items():
        for name, value in values.items():
            yield owner, name, lambda *args, _value=value, **kwargs: _value
    for owner in (torch, torch.cuda) if is_cuda else (torch,):
        yield from ((owner, "Stream", Done), (owner, "Event", Done))
    for owner in (torch.cuda, torch.accelerator) if is_cuda else (torch.accelerator,):
        yield owner, "current_stream", Done
    yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(pretence.device.type)
    yield torch._C, "_get_accelerator", lambda: torch.device(pretence.device.type)  # torch.get_device_module() asks it
    yield torch.accelerator, "current_device_index", lambda: pretence.current_index
    yield torch.accelerator, "set_device_index", _set_device
    yield torch.cuda, "current_device", lambda: pretence.current_index
    yield torch.cuda, "set_device", _set_device
    yield torch.cuda, "_exchange_device", _exchange_device
    yield torch.cuda, "_maybe_exchange_device", _exchange_device
    yield torch.cuda, "default_stream", Done
    yield torch.cuda, "stream", contextlib.nullcontext


def _no_cuda() -> None:
    raise AssertionError("Torch not compiled with CUDA enabled")


def nothing(*args: Any, **kwargs: Any) -> None: ...


class Done:
    """A stream or an event of the simulated device: its work is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = record = wait = synchronize = nothing

    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def record_event(self, event: Done | None = None) -> Done:
        return event or Done()

    def elapsed_time(self, end: Done) -> float:
        return 0.0


class Generator(torch.Generator):
    """A generator of the simulated device, which draws the CPU's numbers."""

    pretended: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        self = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        self.pretended = torch.device(numbered(device))
        return self

    device = property(lambda self: self.pretended)


class Naming(TorchFunctionMode):
    """Handles what C++ would refuse or get from the guard: pinned memory, the index of "cuda", and the generator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, OpOverload):  # calls from C++ on the way to `compute`
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = numbered(kwargs["device"])
        if func is Tensor.to:
            args = tuple(map(numbered, args))
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if kwargs.get("generator") is not None:
            where = kwargs.get("device") or (args[0].device if isinstance(args[0], Tensor) else torch.device("cpu"))
            want, got = torch.device(where).type, kwargs["generator"].device.type
            if want != got:
                raise RuntimeError(f"Expected a '{want}' device type for generator but found '{got}'")
        # Python code inside of backward (a recomputed checkpoint) is not the engine
        before = value_reads.call, pretence.running_backward
        value_reads.call, pretence.running_backward = getattr(func, "__name__", ""), 0
        try:
            result = func(*args, **kwargs)
            if func is DEVICE_OF and result.type == "meta" and pretence.num_transforms:
                return pretence.device  # for tensors of functorch; see `compute`
            return result
        finally:
            value_reads.call, pretence.running_backward = before


def numbered(device: Any) -> Any:
    """Return a device (1, "cuda", "cuda:1") as a torch.device with its index; other values unchanged."""
    kind, index = pretence.device.type, pretence.current_index
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device(kind, device)
    if not isinstance(device, str | torch.device):
        return device
    device = torch.device(device)
    if device.type == "privateuseone":  # how C++ reads a number: model.to(1), torch.device(1)
        return torch.device(kind, device.index)
    is_unnumbered = device.type == kind != "cpu" and device.index is None
    return torch.device(kind, index) if is_unnumbered else device


def _to_cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    return tensor.to("cuda" if device is None else numbered(device), non_blocking=non_blocking)


def _set_device(device: Any) -> None:
    pretence.current_index = numbered(device).index or 0


def _exchange_device(index: int) -> int:
    before, pretence.current_index = pretence.current_index, max(index, 0)
    return before


def _telling_meta(run: Callable[..., Any]) -> Callable[..., Any]:
    """Run backward in one thread, as the engine has one per device; `compute` explains the device that it sees.

    Tensor.backward() is a function that the mode `Naming` handles, and a mode is off inside of one: it is entered again.
    """

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        before, pretence.running_backward = pretence.running_backward, 1
        try:
            with torch.autograd.set_multithreading_enabled(False), Naming():
                return run(*args, **kwargs)
        finally:
            pretence.running_backward = before

    return run_backward


def _counted(nesting: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def count(*args: Any) -> Iterator[Any]:
        pretence.num_transforms += 1
        try:
            with nesting(*args) as level:
                yield level
        finally:
            pretence.num_transforms -= 1

    return count


def _by_swapping(apply: Callable[..., Any]) -> Callable[..., Any]:

    def apply_by_swapping(module: torch.nn.Module, function: Any, recurse: bool = True) -> Any:
        _let_go_of_graphs(module)
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, function, recurse)
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
            raise NotSimulated(f"{type(module).__name__} can't be moved: {error}") from error
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply_by_swapping


def _let_go_of_graphs(module: torch.nn.Module) -> None:
    """Drop tensors that a module keeps from a computation (the old weight_norm's weight), which hold its parameters."""
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            setattr(module, name, value.detach())


def _with_modes(run: Callable[[Any], None], modes: Iterable[Callable[[], Any]]) -> Callable[[Any], None]:

    def run_thread(thread: threading.Thread) -> None:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            run(thread)

    return run_thread


def _onto_device(load: Callable[..., Any]) -> Callable[..., Any]:

    def load_onto(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if not isinstance(map_location, str | torch.device) or torch.device(map_location).type == "cpu":
            return load(file, map_location=map_location, **kwargs)
        state = load(file, map_location="cpu", **kwargs)
        return tree_map(lambda leaf: leaf.to(map_location) if isinstance(leaf, Tensor) else leaf, state)

    return load_onto
