"""Names the tensor that is on the wrong device: its name, where it was made, the line, what to write instead.

An observer of host_reads.py, for the guard and `plan`. It keeps where each tensor of a step was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner.device.capabilities import NARROWER, supports_float64
from runner.inspection import call_site
from runner.inspection.findings import CERTAIN, Finding
from runner.inspection.host_reads import Operation, OperationObserver
from runner.inspection.tensor_names import Name, Names, in_frame, storage_of

#: take tensors of two devices, each in its own way
CROSSING = {"_to_copy", "copy_", "copy", "_foreach_copy_", "to", "cpu", "cuda", "type_as"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "__getitem__", "__setitem__"}


class PlacementError(RuntimeError):
    """Tensors on two devices met; `finding` says which, where and what to write."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Meetings(OperationObserver):
    """Remembers where each tensor of a step was made, to name the tensors if two devices meet."""

    def __init__(self, device: torch.device, names: Names, lines: call_site.Lines) -> None:
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
        write = mend(name, device=self._device, needs_grad=stray.requires_grad)
        return Finding(CERTAIN, "mixed devices", text, line, module, write, path)

    def _name(self, tensor: Tensor) -> Name | None:
        return self._names.get(tensor) or in_frame(call_site.person(list(call_site.frames())), tensor)

    def _describe(self, tensor: Tensor, name: Name | None) -> str:
        made = self._origins.get(storage_of(tensor))
        words = str(name) if name else f"a tensor {tuple(tensor.shape)}"
        if made is not None and (name is None or name.kind in ("local", "buffer", "parameter")):
            words += f", made by {made[0]} at {made[1]},"
        return f"{words} on {tensor.device}"


def mend(name: Name | None, *, device: torch.device, needs_grad: bool) -> str:
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
