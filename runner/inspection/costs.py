"""Counts what a step takes of the device, operation by operation: memory by part, arithmetic, bytes, kernels.

For `plan`; training/cpu_threads.py counts products by flops_of(). Memory is that of storages, from the operation that makes
each to its end. It agrees with the allocator's count to a few percent (tests/tools/plan), without the memory inside of
kernels, a CUDA context and fragmentation.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from runner.device import torch_private
from runner.device.hardware import Speeds
from runner.inspection.operations import Operation, OperationObserver
from runner.inspection.tensor_names import storage_of

#: bytes to a multiple of which CUDA's allocator rounds a size up
ROUNDED_TO = {"cuda": 512}
#: operations, except views, that move no memory
FREE = {"detach", "_unsafe_view", "lift_fresh", "alias", "empty", "empty_like", "empty_strided", "new_empty"}


@dataclass
class MemoryMoment:
    """The memory right after an operation."""

    phase: str
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())


class Costs(OperationObserver):
    """Counts while it observes operations. `part` is what new memory is for, `phase` the part of the step."""

    def __init__(
        self, device: torch.device, *, speeds: Speeds | None = None, tf32: bool = False, cudnn_tf32: bool = False
    ) -> None:
        """tf32: Whether all float32 products are computed in TF32; cudnn_tf32: those of convolutions and recurrent layers."""
        self.phase, self.part = "setup", "other"
        self.flops: Counter[str] = Counter()  # by phase
        self.touched_bytes = 0
        self.num_kernels = 0
        self.compute_seconds = self.memory_seconds = self.roofline_seconds = 0.0
        self.peak: MemoryMoment = MemoryMoment("setup", {})
        self.device, self._speeds = device, speeds or Speeds()
        self._tf32, self._cudnn_tf32 = tf32, cudnn_tf32
        self._live: dict[int, tuple[str, int]] = {}  # by storage: its part and its bytes
        self._parts: Counter[str] = Counter()
        self._total = 0

    def after(self, done: Operation) -> None:
        with torch_private.DisableTorchFunction():  # a mode would be called for every attribute of a tensor here
            on_device = [tensor for tensor in done.outputs if self._is_here(tensor)]
            part = "temporaries" if _is_backward() else self.part
            for tensor in on_device:
                self._track(tensor, part)
            if on_device and not done.op.is_view and done.name not in FREE:
                self._count(done, on_device[0])

    def hold(self, part: str, num_bytes: int) -> None:
        """Add memory that is never freed; a negative number takes some back."""
        self._parts[part] += num_bytes
        self._total += num_bytes
        if num_bytes:
            self._record()

    def belongs(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Set the part of these tensors, whether they were observed before or not."""
        for tensor in tensors:
            if tensor is not None and self._is_here(tensor):
                self._track(tensor, part)
                before, size = self._live[storage_of(tensor)]
                self._live[storage_of(tensor)] = (part, size)
                self._parts.subtract({before: size})
                self._parts[part] += size

    def forget_work(self) -> None:
        """Start counting a step: live memory stays, the peak is reset."""
        self.flops.clear()
        self.touched_bytes = self.num_kernels = 0
        self.compute_seconds = self.memory_seconds = self.roofline_seconds = 0.0
        self.peak = MemoryMoment(self.phase, {})
        self._record()

    @property
    def now(self) -> dict[str, int]:
        """Return the bytes that are in use, by part."""
        return {part: count for part, count in self._parts.items() if count}

    @property
    def _phase_now(self) -> str:
        return "backward" if _is_backward() else self.phase

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self.device and tensor.layout is torch.strided

    def _track(self, tensor: Tensor, part: str) -> None:
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        if key not in self._live:
            unit = ROUNDED_TO.get(self.device.type, 1)
            self._live[key] = (part, -(-storage.nbytes() // unit) * unit)
            weakref.finalize(storage, self._free, key).atexit = False
            self.hold(*self._live[key])

    def _free(self, key: int) -> None:
        part, size = self._live.pop(key, ("other", 0))  # no error in a finalizer
        self.hold(part, -size)

    def _record(self) -> None:
        if self._total > self.peak.num_bytes:
            self.peak = MemoryMoment(self._phase_now, self.now)

    def _count(self, done: Operation, output: Tensor) -> None:
        flops = flops_of(done.op, done.args, done.kwargs, done.result)
        touched = sum(_num_bytes(tensor) for tensor in (*done.inputs, *done.outputs))
        self.num_kernels += 1
        self.flops[self._phase_now] += flops
        self.touched_bytes += touched
        dtype = next((tensor.dtype for tensor in done.inputs if tensor.is_floating_point()), output.dtype)
        is_tf32 = self._tf32 or (self._cudnn_tf32 and done.name.startswith(("conv", "_cudnn_rnn")))
        fastest, bandwidth = self._speeds.flops_of(dtype, tf32=is_tf32), self._speeds.memory_bytes_per_second
        computing = flops / fastest if fastest else 0.0
        moving = touched / bandwidth if bandwidth else 0.0
        self.compute_seconds += computing
        self.memory_seconds += moving
        self.roofline_seconds += max(computing, moving)  # Williams, Waterman and Patterson 2009


def flops_of(op: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of a kernel call; 0 except for products."""
    if formula := flop_registry.get(op._overloadpacket):
        return int(formula(*args, **kwargs, out_val=result))
    formula = FLOPS.get(op._overloadpacket.__name__)
    return formula(args) if formula else 0


def _recurrent(rows: int, weights: Iterable[Tensor]) -> int:
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() == 2)


#: formulas of kernels that torch's table lacks, of their arguments
FLOPS: dict[str, Callable[[Any], int]] = {
    "_linear_pointwise": lambda args: 2 * args[0].numel() * args[1].shape[0],  # of device/layers.py
    "_grouped_mm": lambda args: 2 * args[0].numel() * args[1].shape[-1],  # each row meets the weights of its group
    "_cudnn_rnn": lambda args: _recurrent(args[0].shape[:-1].numel(), args[1]),
    "_cudnn_rnn_backward": lambda args: 2 * _recurrent(args[0].shape[:-1].numel(), args[1]),
    "_lstm_mps": lambda args: _recurrent(args[0].shape[:-1].numel(), args[2]),
    "lstm_mps_backward": lambda args: 2 * _recurrent(args[5].shape[:-1].numel(), args[8]),
    "mkldnn_rnn_layer": lambda args: _recurrent(args[0].shape[:-1].numel(), args[1:3]),
    "mkldnn_rnn_layer_backward": lambda args: 2 * _recurrent(args[0].shape[:-1].numel(), args[1:3]),
}


def _is_backward() -> bool:
    return bool(torch_private.current_graph_task() != -1)


def _num_bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()
