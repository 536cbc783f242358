"""Watches the first call of a run's step and evaluation: misplaced tensors by name, host reads, what is slow or wrong.

training/fit.py makes it; its findings end in the run's result. placement.guard says which calls are watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from runner.device.capabilities import ONLY_BLOCKING, SLOW_TYPES, has_mps_kernel
from runner.device.precision import HALVES
from runner.inspection import call_site
from runner.inspection.device_mismatch import Meetings
from runner.inspection.findings import LIKELY, Finding
from runner.inspection.host_reads import HostRead, HostReads, Operation, OperationObserver
from runner.inspection.tensor_names import Names

#: products of a layer, and which argument is its input
PRODUCTS = {"linear": 0, "addmm": 1, "mm": 0}
#: rows of a layer's input, of all positions together: over it gradients are wrong once another size ran before
MOST_ROWS = 2**15
#: rows of a batch from which a convolution's weights get wrong gradients
TOO_MANY_IMAGES = 2**16
#: where several are added in one place: there in no fixed order, without the error that torch promises
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_", "embedding_dense_backward"}
#: what torch's attention is there, where nothing goes back through it, as in an evaluation
ATTENTION = "_scaled_dot_product_attention_math_for_mps"
SMALLER = "a smaller train.batch_size, and train.accumulate_steps to make up for it"


def known_fault(name: str, args: Sequence[Any], *, trains: bool, is_deterministic: bool) -> tuple[str, str, str] | None:
    """The kind of finding, what is so, and what to write; None for what is well.

    name: of an aten operation, addmm. trains: whether there is a way back through it.
    """
    if trains and name in PRODUCTS:
        rows = math.prod(args[PRODUCTS[name]].shape[:-1])
        if rows > MOST_ROWS:
            what = f"{name} of {rows:,} rows: over {MOST_ROWS:,} MPS may give wrong gradients (pytorch#177116)"
            return "wrong values", what, SMALLER
    if trains and name == "convolution" and len(args[0]) >= TOO_MANY_IMAGES:
        what = f"a convolution of {len(args[0]):,} rows: MPS gives wrong gradients from {TOO_MANY_IMAGES:,} on (pytorch#96225)"
        return "wrong values", what, SMALLER
    if name == "_lstm_mps" and args[4] > 1 and args[5] > 0 and args[6]:
        what = "an LSTM with dropout between its layers: MPS forgets it on the way back, and all gradients are wrong (pytorch#190056)"
        return "wrong values", what, "its layers one by one with nn.Dropout between them, dropout=0, or device=cpu"
    if name == ATTENTION and args[5] and args[0].dtype in HALVES.values():
        what = "attention with is_causal in 16 bits: MPS lets three of four rows see later positions (pytorch#195910)"
        return "wrong values", what, "attn_mask, a lower triangle, instead of is_causal; or train.precision=fp32"
    if is_deterministic and name in UNORDERED:
        what = f"{name} adds in no fixed order on MPS, where train.deterministic=true has no hold on it"
        return "no fixed order", what, "train.deterministic=false, or device=cpu"
    return None


Result = TypeVar("Result")
COPIES = {"_to_copy", "copy_"}
#: operations that compute nothing: a type that is slow costs nothing in them
FREE = {
    *("detach", "view", "_to_copy", "empty", "empty_like", "zeros", "zeros_like", "lift_fresh", "alias", "t", "expand"),
}


class Watching(Protocol):
    """What is put on the calls of a training: the guard, or what replays it to a step (runs/explain/)."""

    findings: list[Finding]

    def on(self, call: Callable[..., Result], *, of_groups: bool = False) -> Callable[..., Result]:
        """The call in whose place it is made; see Guard.on()."""
        ...


class Guard:
    """Looks at the first call of whatever it is put on, or at each. What it found is in `findings`, in order.

    Raises, out of a watched call: PlacementError where torch would say that it expected all tensors on the same device.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        when: str,
        model: nn.Module,
        task: Any,
        optimizer: Optimizer | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self._device, self._when = device, when
        self._model, self._task, self._optimizer = model, task, optimizer

    def on(self, call: Callable[..., Result], *, of_groups: bool = False) -> Callable[..., Result]:
        """`call(..., batch)` with the guard on it: "off" gives the very same back. of_groups: it takes several batches.

        A watched call takes some ten times longer; with "first_step" all later ones cost one more function call (under
        0.1 us).
        """
        if self._when == "off":
            return call
        current = call

        def watch(*args: Any) -> Result:
            nonlocal current
            if self._when == "first_step":
                current = call
            return self._look(call, *args, batches=args[-1] if of_groups else args[-1:])

        current = watch
        return lambda *args: current(*args)

    def _look(self, call: Callable[..., Result], *args: Any, batches: Sequence[Any]) -> Result:
        names, lines = Names(), call_site.Lines()
        names.model(next((arg for arg in args if isinstance(arg, nn.Module)), self._model))
        names.object(self._task, "task")
        for batch in batches:
            names.batch(batch)
        if self._optimizer is not None:
            names.optimizer(self._optimizer)
        slow = Slow(self._device, lines, chosen={weight.dtype for weight in self._model.parameters()})
        observers = (Meetings(self._device, names, lines), slow)
        reads = HostReads(self._device, observers=observers)
        try:
            with reads:
                return call(*args)
        finally:
            self.findings += [of_read(read) for read in reads.found] + slow.findings


class Slow(OperationObserver):
    """Observes operations that a device computes slowly, wrongly, or on the CPU, and copies that are not awaited."""

    def __init__(self, device: torch.device, lines: call_site.Lines, *, chosen: Collection[torch.dtype] = ()) -> None:
        """chosen: The types of the weights, which the user wants though they may be slow."""
        self.findings: list[Finding] = []
        self._device, self._lines = device, lines
        slow = SLOW_TYPES.get(device.type, {})
        self._types = {dtype: instead for dtype, instead in slow.items() if dtype not in chosen}
        self._told: set[tuple[str, str]] = set()

    def after(self, done: Operation) -> None:
        if done.name in COPIES:
            self._copy(done)
        on_device = next((tensor for tensor in done.outputs if tensor.device.type == self._device.type), None)
        if on_device is None:
            return
        op, name = done.op, done.name
        instead = self._types.get(on_device.dtype)
        is_more = any(tensor.numel() > 1 for tensor in (*done.inputs, on_device))  # one number is as fast in any type
        if instead is not None and name not in FREE and not op.is_view and done.inputs and is_more:
            dtype = str(on_device.dtype).removeprefix("torch.")
            self._find("slow type", f"{name} in {dtype}, which is slow on {self._device.type}", instead)
        if self._device.type == "mps" and op.namespace == "aten":
            self._on_mps(done)

    def _on_mps(self, done: Operation) -> None:
        if not has_mps_kernel(done.op.name().removeprefix("aten::")):
            what = f"{done.name} has no kernel for MPS: it is computed on the CPU, with copies both ways"
            self._find("no kernel", what, "another operation, or device=cpu")
        trains, is_deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
        if problem := known_fault(done.name, done.args, trains=trains, is_deterministic=is_deterministic):
            self._find(*problem)

    def _copy(self, done: Operation) -> None:
        source, target = (done.args[1], done.args[0]) if done.name == "copy_" else (done.args[0], done.outputs[0])
        is_beside = done.kwargs.get("non_blocking") or (done.name == "copy_" and any(done.args[2:]))
        if not is_beside or source.device.type == target.device.type or not call_site.is_persons():
            return
        if target.device.type == "cpu":
            what = "a copy to the host with non_blocking=True: the host may read it before it is there"
        elif target.device.type in ONLY_BLOCKING:
            what = f"a copy to {target.device.type} with non_blocking=True: what arrives may be wrong (pytorch#189690)"
        else:
            return
        self._find("non_blocking", what, "the same without non_blocking=True")

    def _find(self, kind: str, what: str, write: str) -> None:
        finding = Finding(LIKELY, kind, what, *self._lines.now(), write)
        if (kind, finding.where) not in self._told:  # its other operations, and the backward pass, add nothing new
            self._told.add((kind, finding.where))
            self.findings.append(finding)


def of_read(read: HostRead) -> Finding:
    """A read or a copy that waits, as a finding."""
    is_copy = "a copy" in read.what
    what = f"{read.what}: the {'host and the device wait for each other' if is_copy else 'host waits for the device'}"
    if is_copy:
        write = "device=x.device where it is made, or a buffer of the model"
    else:
        write = "the value as a tensor; reported values are copied automatically"
    return Finding(LIKELY, "copy" if is_copy else "host read", what, read.line, read.module, write)
