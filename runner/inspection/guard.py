"""Watches the first call of a run's step and evaluation: misplaced tensors by name, host reads, slow or wrong operations.

training/fit.py makes it; its findings end in the run's result. placement.guard says which calls are watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.device.capabilities import NARROWER, ONLY_BLOCKING, SLOW_TYPES, has_mps_kernel, supports_float64
from runner.device.precision import HALVES
from runner.inspection import call_site
from runner.inspection.findings import CERTAIN, LIKELY, Finding
from runner.inspection.host_reads import HostRead, HostReads
from runner.inspection.operations import Operation, OperationObserver
from runner.inspection.tensor_names import Name, TensorNames, in_frame, storage_of

#: take tensors of two devices, each in its own way
CROSSING = {"_to_copy", "copy_", "copy", "_foreach_copy_", "to", "cpu", "cuda", "type_as"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "__getitem__", "__setitem__"}
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
    """What is put on the calls of a training: the guard, or what replays it to a step (tools/explain/)."""

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
        names, lines = TensorNames(), call_site.Lines()
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
        self._reported: set[tuple[str, str]] = set()

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
        is_asynchronous = done.kwargs.get("non_blocking") or (done.name == "copy_" and any(done.args[2:]))
        if not is_asynchronous or source.device.type == target.device.type or not call_site.is_user_code():
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
        if (kind, finding.where) not in self._reported:  # its other operations, and the backward pass, add nothing new
            self._reported.add((kind, finding.where))
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


class PlacementError(RuntimeError):
    """Tensors on two devices met; `finding` says which, where and what to write."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Meetings(OperationObserver):
    """Remembers where each tensor of a step was made, to name the tensors if two devices meet."""

    def __init__(self, device: torch.device, names: TensorNames, lines: call_site.Lines) -> None:
        self._device, self._names, self._lines = device, names, lines
        self._origins: dict[int, tuple[str, str]] = {}  # by storage: what made it, and the line

    def after(self, done: Operation) -> None:
        known = {storage_of(tensor) for tensor in done.inputs}
        fresh = [tensor for tensor in done.outputs if storage_of(tensor) not in known]
        if not fresh:
            self._lines.now()
            return
        line, _ = self._lines.now()
        for tensor in fresh:
            self._origins[storage_of(tensor)] = (done.name.strip("_"), line)

    def failed(self, what: str, inputs: Sequence[Tensor], error: Exception) -> None:
        """Raises: PlacementError instead of the error, if two devices met, or a device lacks the requested type."""
        if isinstance(error, PlacementError):
            return
        finding = self.explain(what, inputs)
        if finding is None and not supports_float64(self._device) and "float64" in str(error):
            finding = self.lacks_float64(what, inputs)
        if finding is not None:
            raise PlacementError(finding) from error

    def lacks_float64(self, what: str, inputs: Sequence[Tensor]) -> Finding:
        """Return the error for a device without float64."""
        self._names.look_again()
        wide = next((tensor for tensor in inputs if tensor.dtype in NARROWER), None)
        name = self._name(wide) if wide is not None else None
        text = f"{what} gives float64, which {self._device.type} does not have"
        if wide is not None:
            text = f"{self._describe(wide, name)} is {str(wide.dtype)[6:]}, which {self._device.type} does not have"
        return Finding(CERTAIN, "dtype", text, *self._lines.now(), "dtype=torch.float32", name.path if name else "")

    def explain(self, what: str, inputs: Sequence[Tensor]) -> Finding | None:
        """Return the error for an operation on these tensors, or None if they are on one device."""
        involved = inputs
        if what in INDEXING:
            involved = [
                tensor for tensor in (inputs[0], *inputs[-1:]) if tensor.is_floating_point() or tensor is inputs[0]
            ]
        placed = [tensor for tensor in involved if tensor.dim() or tensor.device.type != "cpu"]
        if what in CROSSING or len({tensor.device for tensor in placed}) < 2:
            return None
        strays = [tensor for tensor in placed if tensor.device != self._device]
        homes = [tensor for tensor in placed if tensor.device == self._device]
        self._names.look_again()
        named = [tensor for tensor in strays if self._names.get(tensor)]
        stray = max(named or strays[:1], key=Tensor.numel)
        other = homes[0] if homes else next(tensor for tensor in placed if tensor.device != stray.device)
        line, module = self._lines.now()
        name = self._name(stray)
        text = f"{self._describe(stray, name)} meets {self._describe(other, self._name(other))} in {what}"
        path = name.path if name else ""
        write = fix_for(name, device=self._device, needs_grad=stray.requires_grad)
        return Finding(CERTAIN, "mixed devices", text, line, module, write, path)

    def _name(self, tensor: Tensor) -> Name | None:
        return self._names.get(tensor) or in_frame(call_site.user_frame(list(call_site.frames())), tensor)

    def _describe(self, tensor: Tensor, name: Name | None) -> str:
        made = self._origins.get(storage_of(tensor))
        words = str(name) if name else f"a tensor {tuple(tensor.shape)}"
        if made is not None and (name is None or name.kind in ("local", "buffer", "parameter")):
            words += f", made by {made[0]} at {made[1]},"
        return f"{words} on {tensor.device}"


def fix_for(name: Name | None, *, device: torch.device, needs_grad: bool) -> str:
    """What to write, so that the tensor is where it should be."""
    kind = name.kind if name else ""
    last = name.path.rpartition(".")[2] if name else ""
    if kind == "attribute":
        what = f"self.{last} = nn.Parameter(...)" if needs_grad else f'self.register_buffer("{last}", ...)'
        return f"{what} in {name.owner if name else ''}.__init__, so that it moves with the model"
    if kind == "list":
        held = name.path.partition("[")[0].rpartition(".")[2] if name else ""
        is_dict = bool(name and ("['" in name.path or '["' in name.path))
        return f"self.{held} = nn.{'ModuleDict' if is_dict else 'ModuleList'}(...), so that it moves with the model"
    if kind == "batch":
        return "batches of tensors in dicts, lists, tuples or dataclasses: these are moved"
    if kind in ("buffer", "parameter"):
        return f"self.{last}.copy_(...), or the new one with device=self.{last}.device"
    if kind in ("closure", "global"):
        return f"{last}.to(x.device) where it is used, or a buffer of the model"
    return "device=x.device where it is made, x being a tensor of the batch"
