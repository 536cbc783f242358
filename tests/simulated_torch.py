"""The kind of the pretended device goes in; what torch's own modules answer on it comes out, as (owner, name, value).

Streams and events are done at once, since every kernel is over when its call returns: code that forgets to wait for one
passes here. Memory answers with constants.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace

import torch
from simulated_tensor import SimulatedTensor, pretence
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

TOTAL_BYTES, USED_BYTES = 24 * 2**30, 2**30
#: what the functions of a module answer, whatever they are asked
MEMORY = dict.fromkeys(["memory_allocated", "max_memory_allocated"], USED_BYTES)
MEMORY |= dict.fromkeys(["memory_reserved", "max_memory_reserved"], USED_BYTES)
MEMORY |= dict.fromkeys(["empty_cache", "reset_peak_memory_stats", "synchronize"])
RANDOM = dict.fromkeys(["manual_seed", "seed", "get_rng_state", "set_rng_state", "set_per_process_memory_fraction"])
CUDA = {
    **(MEMORY | RANDOM),
    **dict.fromkeys(["init", "_lazy_init", "manual_seed_all", "set_stream"]),
    **dict.fromkeys(["is_available", "is_initialized", "is_bf16_supported"], True),
    "is_current_stream_capturing": False,
    "device_count": 2,
    "get_arch_list": ["sm_90"],
    "get_device_capability": (9, 0),
    "get_device_name": "Simulated GPU",
    "get_device_properties": SimpleNamespace(
        name="Simulated GPU", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=100, uuid="simulated"
    ),
    "mem_get_info": (TOTAL_BYTES - USED_BYTES, TOTAL_BYTES),
}
MPS = {
    **RANDOM,
    **dict.fromkeys(["empty_cache", "synchronize"]),
    **dict.fromkeys(["current_allocated_memory", "driver_allocated_memory"], USED_BYTES),
    "recommended_max_memory": TOTAL_BYTES,
    "is_available": True,
    "device_count": 1,
}
MPS_BACKEND = dict.fromkeys(["is_available", "is_built", "is_macos_or_newer", "is_macos13_or_newer"], True)
MPS_BACKEND |= {"get_name": "Simulated M", "get_core_count": 8}


def replacements(modes):
    """(owner, name, value) of everything in torch that must be another while a device is pretended."""
    is_cuda = pretence.device.type == "cuda"
    yield torch.nn.Module, "_apply", _by_swapping(torch.nn.Module._apply)
    yield torch.nn.functional, "scaled_dot_product_attention", _attention
    yield threading.Thread, "run", _with_modes(threading.Thread.run, modes)
    yield torch, "Generator", Generator
    yield torch, "load", _onto_device(torch.load)
    for owner in (torch.autograd, torch.autograd.graph):
        yield owner, "_engine_run_backward", _telling_meta(owner._engine_run_backward)
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        owner = sys.modules[name]  # not by attribute: torch.optim hides its own
        yield owner, "_foreach_supported_types", [*owner._foreach_supported_types, SimulatedTensor]
    # on the class, so that the thread in which a DataLoader pins finds them too
    yield Tensor, "pin_memory", lambda self, device=None: self
    yield Tensor, "is_pinned", lambda self, device=None: False
    yield Tensor, "record_stream", nothing
    yield Tensor, "cuda", _to_cuda

    yield from _answers(is_cuda)


def _answers(is_cuda):
    constants = {torch.accelerator: {**MEMORY, "is_available": True, "device_count": 2 if is_cuda else 1}}
    if is_cuda:
        constants |= {torch.cuda: CUDA, torch.cuda.amp.common: {"amp_definitely_not_available": False}}
    else:
        constants |= {torch.mps: MPS, torch.backends.mps: MPS_BACKEND}
    for owner, values in constants.items():
        for name, value in values.items():
            yield owner, name, lambda *args, _value=value, **kwargs: _value
    for owner in (torch, torch.cuda) if is_cuda else (torch,):
        yield from ((owner, "Stream", Stream), (owner, "Event", Event))
    for owner in (torch.cuda, torch.accelerator) if is_cuda else (torch.accelerator,):
        yield owner, "current_stream", Stream
    yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(pretence.device.type)
    yield torch.accelerator, "current_device_index", lambda: pretence.current_index
    yield torch.accelerator, "set_device_index", _set_device
    yield torch.cuda, "current_device", lambda: pretence.current_index
    yield torch.cuda, "set_device", _set_device
    yield torch.cuda, "_exchange_device", _exchange_device
    yield torch.cuda, "_maybe_exchange_device", _exchange_device
    yield torch.cuda, "default_stream", Stream
    yield torch.cuda, "stream", contextlib.nullcontext


def nothing(*args, **kwargs): ...


class Stream:
    def __init__(self, device=None, priority=0): ...

    wait_stream = wait_event = synchronize = nothing
    is_capturing = lambda self: False  # noqa: E731
    query = lambda self: True  # noqa: E731
    record_event = lambda self, event=None: event or Event()  # noqa: E731


class Event:
    def __init__(self, device=None, **kwargs): ...

    record = wait = synchronize = nothing
    query = lambda self: True  # noqa: E731
    elapsed_time = lambda self, end: 0.0  # noqa: E731


class Generator(torch.Generator):
    """A device's generator by name; what it draws, the CPU's draws."""

    def __new__(cls, device="cpu"):
        self = super().__new__(cls, "cpu")
        self.pretended = numbered(device)
        return self

    device = property(lambda self: self.pretended)


class Naming(TorchFunctionMode):
    """What C++ would refuse or ask the guard for: pinned memory, the number of "cuda". And whose generator draws."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
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
        return func(*args, **kwargs)


def numbered(device):
    """A device as a person may write it (1, "cuda", "cuda:1"), as a torch.device with its number; all else stays."""
    kind, index = pretence.device.type, pretence.current_index
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device(kind, device)
    if not isinstance(device, str | torch.device):
        return device
    device = torch.device(device)
    return torch.device(kind, index) if device.type == kind and device.index is None else device


def _to_cuda(tensor, device=None, non_blocking=False):
    return tensor.to("cuda" if device is None else numbered(device), non_blocking=non_blocking)


def _set_device(device):
    pretence.current_index = numbered(device).index


def _exchange_device(index):
    before, pretence.current_index = pretence.current_index, max(index, 0)
    return before


def _telling_meta(run):
    """See `compute` on what the engine is told. One thread: its own threads would be per device."""

    def run_backward(*args, **kwargs):
        pretence.running_backward += 1
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return run(*args, **kwargs)
        finally:
            pretence.running_backward -= 1

    return run_backward


def _by_swapping(apply):
    """A parameter that moves changes its class here. torch's own swap keeps the object, as `.data =` does elsewhere."""

    def apply_by_swapping(module, function, recurse=True):
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, function, recurse)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    return apply_by_swapping


def _with_modes(run, modes):
    """Modes belong to a thread, so each new one enters them too."""

    def run_thread(thread):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            run(thread)

    return run_thread


def _onto_device(load):
    """A checkpoint's tensors are the CPU's here (SimulatedTensor.__reduce_ex__); map_location brings them over."""

    def load_onto(file, map_location=None, **kwargs):
        if not isinstance(map_location, str | torch.device) or torch.device(map_location).type == "cpu":
            return load(file, map_location=map_location, **kwargs)
        state = load(file, map_location="cpu", **kwargs)
        return tree_map(lambda leaf: leaf.to(map_location) if isinstance(leaf, Tensor) else leaf, state)

    return load_onto


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A GPU's own kernels for it do not exist here: the formula."""
    return torch._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
