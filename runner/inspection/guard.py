"""Watches the first call of a run's step and evaluation: misplaced tensors by name, host reads, slow or wrong operations.

training/fit.py makes the guard, and its findings are in the run's result. placement.guard says which calls are watched.
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

#: operations that take tensors of two devices
CROSSING = {"_to_copy", "copy_", "copy", "_foreach_copy_", "to", "cpu", "cuda", "type_as"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "__getitem__", "__setitem__"}
COPIES = {"_to_copy", "copy_"}
#: operations that compute nothing, so that a slow type does not matter
FREE = {
    *("detach", "view", "_to_copy", "empty", "empty_like", "zeros", "zeros_like", "lift_fresh", "alias", "t", "expand")
}
#: products of a layer, and which argument is the layer's input
PRODUCTS = {"linear": 0, "addmm": 1, "mm": 0}
#: maximum rows of a layer's input, of all positions together: with more, gradients are wrong after another size
MAX_ROWS = 2**15
#: rows of a batch from which the gradients of a convolution's weights are wrong
TOO_MANY_IMAGES = 2**16
#: operations that add in no fixed order on MPS, without the error that torch promises
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_", "embedding_dense_backward"}
#: torch's attention on MPS without a backward pass, as in an evaluation
ATTENTION = "_scaled_dot_product_attention_math_for_mps"
SMALLER = "a smaller train.batch_size, and train.accumulate_steps to make up for it"

Result = TypeVar("Result")


def known_fault(name: str, args: Sequence[Any], *, trains: bool, is_deterministic: bool) -> tuple[str, str, str] | None:
    """Return the kind, the text and the fix of what MPS computes wrongly; None for a correct operation.

    Args:
        name: The aten operation, e.g., addmm.
        trains: The operation will have a backward pass.
    """
    kind, problem, fix = "wrong values", "", SMALLER
    if trains and name in PRODUCTS and (rows := math.prod(args[PRODUCTS[name]].shape[:-1])) > MAX_ROWS:
        problem = f"{name} of {rows:,} rows: over {MAX_ROWS:,} MPS may give wrong gradients (pytorch#177116)"
    elif trains and name == "convolution" and len(args[0]) >= TOO_MANY_IMAGES:
        problem = f"a convolution of {len(args[0]):,} rows: MPS gives wrong gradients from {TOO_MANY_IMAGES:,} on (pytorch#96225)"
    elif name == "_lstm_mps" and args[4] > 1 and args[5] > 0 and args[6]:
        problem = "an LSTM with dropout between its layers: MPS ignores it in backward, and all gradients are wrong (pytorch#190056)"
        fix = "its layers one by one with nn.Dropout between them, dropout=0, or device=cpu"
    elif name == ATTENTION and args[5] and args[0].dtype in HALVES.values():
        problem = (
            "attention with is_causal in 16 bits: MPS lets three of four rows see later positions (pytorch#195910)"
        )
        fix = "attn_mask, a lower triangle, instead of is_causal; or train.precision=fp32"
    elif is_deterministic and name in UNORDERED:
        kind, fix = "no fixed order", "train.deterministic=false, or device=cpu"
        problem = f"{name} adds in no fixed order on MPS, where train.deterministic=true has no effect on it"
    return (kind, problem, fix) if problem else None


class Watching(Protocol):
    """Wraps the calls of a training: the guard, or the replay of a run to a step (tools/explain/)."""

    findings: list[Finding]

    def on(self, call: Callable[..., Result], *, of_groups: bool = False) -> Callable[..., Result]:
        """Return the call to use instead; see Guard.on()."""


class Guard:
    """Watches the first call of each function that it wraps, or every call; `findings` are in order.

    A watched call raises a PlacementError instead of torch's "expected all tensors to be on the same device".
    """

    def __init__(
        self, device: torch.device, *, when: str, model: nn.Module, task: Any, optimizer: Optimizer | None = None
    ) -> None:
        """when: `placement.guard`, which is first_step, always or off."""
        self.findings: list[Finding] = []
        self._device, self._when = device, when
        self._model, self._task, self._optimizer = model, task, optimizer

    def on(self, call: Callable[..., Result], *, of_groups: bool = False) -> Callable[..., Result]:
        """Wrap `call(..., batch)`; "off" returns the same object. of_groups: the last argument is several batches.

        A watched call takes about ten times as long; with "first_step" later ones cost one more function call.
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
        watch = HostReads(self._device, observers=observers)
        try:
            with watch:
                return call(*args)
        finally:
            self.findings += [of_read(read) for read in watch.reads] + slow.findings


class Slow(OperationObserver):
    """Reports operations that a device computes slowly, wrongly, or on the CPU, and copies that are not awaited."""

    def __init__(self, device: torch.device, lines: call_site.Lines, *, chosen: Collection[torch.dtype] = ()) -> None:
        """chosen: The types of the weights, which the user chose though they may be slow."""
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
        instead = self._types.get(on_device.dtype)
        is_more = any(tensor.numel() > 1 for tensor in (*done.inputs, on_device))  # one number is as fast in any type
        if instead is not None and done.name not in FREE and not done.op.is_view and done.inputs and is_more:
            dtype = str(on_device.dtype).removeprefix("torch.")
            self._report("slow type", f"{done.name} in {dtype}, which is slow on {self._device.type}", instead)
        if self._device.type == "mps" and done.op.namespace == "aten":
            self._on_mps(done)

    def _on_mps(self, done: Operation) -> None:
        if not has_mps_kernel(done.op.name().removeprefix("aten::")):
            what = f"{done.name} has no kernel for MPS: it is computed on the CPU, with copies both ways"
            self._report("no kernel", what, "another operation, or device=cpu")
        trains, is_deterministic = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
        if fault := known_fault(done.name, done.args, trains=trains, is_deterministic=is_deterministic):
            self._report(*fault)

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
        self._report("non_blocking", what, "the same without non_blocking=True")

    def _report(self, kind: str, what: str, fix: str) -> None:
        finding = Finding(LIKELY, kind, what, *self._lines.now(), fix)
        if (kind, finding.where) not in self._reported:  # once for all operations of a line, and its backward pass
            self._reported.add((kind, finding.where))
            self.findings.append(finding)


def of_read(read: HostRead) -> Finding:
    """Return the finding for a read or a copy that waits."""
    kind, waits = "host read", "the host waits for the device"
    fix = "the value as a tensor; reported values are copied automatically"
    if "a copy" in read.what:
        kind, waits = "copy", "the host and the device wait for each other"
        fix = "device=x.device where it is made, or a buffer of the model"
    return Finding(LIKELY, kind, f"{read.what}: {waits}", read.line, read.module, fix)


class PlacementError(RuntimeError):
    """Tensors on two devices met; `finding` has their names, the line and the fix."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Meetings(OperationObserver):
    """Records where each tensor of a step was made, to name the tensors if two devices meet."""

    def __init__(self, device: torch.device, names: TensorNames, lines: call_site.Lines) -> None:
        self._device, self._names, self._lines = device, names, lines
        self._origins: dict[int, tuple[str, str]] = {}  # by storage: the operation that made it, and the line

    def after(self, done: Operation) -> None:
        (line, _), known = self._lines.now(), {storage_of(tensor) for tensor in done.inputs}
        for tensor in done.outputs:
            if storage_of(tensor) not in known:
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
        self._names.update()
        wide = next((tensor for tensor in inputs if tensor.dtype in NARROWER), None)
        name = None if wide is None else self._name(wide)
        subject = f"{what} gives float64" if wide is None else f"{self._describe(wide, name)} is {str(wide.dtype)[6:]}"
        text, path = f"{subject}, which {self._device.type} does not have", name.path if name else ""
        return Finding(CERTAIN, "dtype", text, *self._lines.now(), "dtype=torch.float32", path)

    def explain(self, what: str, inputs: Sequence[Tensor]) -> Finding | None:
        """Return the error for an operation on these tensors, or None if they are on one device."""
        if what in INDEXING:  # indices may be on the host
            inputs = [inputs[0], *(tensor for tensor in inputs[-1:] if tensor.is_floating_point())]
        placed = [tensor for tensor in inputs if tensor.dim() or tensor.device.type != "cpu"]
        if what in CROSSING or len({tensor.device for tensor in placed}) < 2:
            return None
        strays = [tensor for tensor in placed if tensor.device != self._device]
        homes = [tensor for tensor in placed if tensor.device == self._device]
        self._names.update()
        named = [tensor for tensor in strays if self._names.get(tensor)]
        stray = max(named or strays[:1], key=Tensor.numel)
        other = homes[0] if homes else next(tensor for tensor in placed if tensor.device != stray.device)
        name = self._name(stray)
        text = f"{self._describe(stray, name)} meets {self._describe(other, self._name(other))} in {what}"
        fix = fix_for(name, needs_grad=stray.requires_grad)
        return Finding(CERTAIN, "mixed devices", text, *self._lines.now(), fix, name.path if name else "")

    def _name(self, tensor: Tensor) -> Name | None:
        return self._names.get(tensor) or in_frame(call_site.user_frame(list(call_site.frames())), tensor)

    def _describe(self, tensor: Tensor, name: Name | None) -> str:
        origin = self._origins.get(storage_of(tensor))
        text = str(name) if name else f"a tensor {tuple(tensor.shape)}"
        if origin is not None and (name is None or name.kind in ("local", "buffer", "parameter")):
            text += f", made by {origin[0]} at {origin[1]},"
        return f"{text} on {tensor.device}"


def fix_for(name: Name | None, *, needs_grad: bool) -> str:
    """Return the code that puts a tensor on the model's device."""
    kind, path, owner = (name.kind, name.path, name.owner) if name else ("", "", "")
    last = path.rpartition(".")[2]
    if kind == "attribute":
        code = f"self.{last} = nn.Parameter(...)" if needs_grad else f'self.register_buffer("{last}", ...)'
        return f"{code} in {owner}.__init__, so that it moves with the model"
    if kind == "list":
        attribute, is_dict = path.partition("[")[0].rpartition(".")[2], "['" in path or '["' in path
        return f"self.{attribute} = nn.Module{'Dict' if is_dict else 'List'}(...), so that it moves with the model"
    if kind == "batch":
        return "batches of tensors in dicts, lists, tuples or dataclasses: these are moved"
    if kind in ("buffer", "parameter"):
        return f"self.{last}.copy_(...), or the new one with device=self.{last}.device"
    if kind in ("closure", "global"):
        return f"{last}.to(x.device) where it is used, or a buffer of the model"
    return "device=x.device where it is made, x being a tensor of the batch"
