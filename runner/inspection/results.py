"""Keeps what each operation of a step gave, as a fingerprint, so that two replays can be held beside each other. For `diff --ops`.

An observer of host_reads.HostReads. Of one operation it can hold the tensors themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.device import torch_private
from runner.device.placement import leaves
from runner.inspection.call_site import Lines
from runner.inspection.host_reads import Operation
from runner.inspection.tensor_names import Names

#: what they give is whatever lay in that memory before
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_"}

Fingerprint = tuple[Any, ...]
Step = list[Fingerprint]


@dataclass(frozen=True)
class Held:
    """One operation with what it was given and what it gave."""

    name: str
    phase: str  # forward, backward, update
    line: str
    module: str
    inputs: tuple[tuple[str, Tensor], ...]  # what it has not written over, by name
    outputs: tuple[Tensor, ...]
    settings: Mapping[str, str]  # its arguments that are no tensors
    draws: bool  # random numbers


class Results:
    """Of the operations of one step: their fingerprints, and the first one that is not as it was beside, or the one at a place."""

    def __init__(self, names: Names, *, beside: Step | None = None, place: int | None = None) -> None:
        """beside: what another replay of the step gave. place: of the operation that is to be held."""
        self.step: Step = []
        self.held: Held | None = None
        self.held_place: int | None = None
        self._names, self._beside, self._place = names, beside, place
        self._lines = Lines()

    def after(self, done: Operation) -> None:
        line, module = self._lines.now()  # of each: the way back is told by the lines of the way there
        if done.name in UNWRITTEN or done.op.is_view or self.held is not None:
            return
        written = [tensor for tensor, is_written in _arguments(done) if is_written]
        outputs = [*done.outputs, *(each for each in written if not any(each is other for other in done.outputs))]
        if not outputs:
            return
        number, mark = len(self.step), (done.name, *map(fingerprint, outputs))
        self.step.append(mark)
        is_other = self._beside is not None and (number >= len(self._beside) or self._beside[number] != mark)
        if is_other or number == self._place:
            given = [tensor for tensor, is_written in _arguments(done) if not is_written]
            self.held_place = number
            self.held = Held(
                done.name,
                _phase(module),
                line,
                module,
                tuple((self._name(tensor), tensor.detach().clone()) for tensor in given),
                tuple(tensor.detach().clone() for tensor in outputs),
                _settings(done),
                torch.Tag.nondeterministic_seeded in done.op.tags,
            )

    def failed(self, what: str, inputs: Sequence[Tensor], error: Exception) -> None:
        pass

    def _name(self, tensor: Tensor) -> str:
        known = self._names.get(tensor)
        return str(known) if known is not None else "a result of before"


def fingerprint(tensor: Tensor) -> Fingerprint:
    """What two tensors of the same bits have in common. Waits for the device; a GB takes about a second."""
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    rows = plain.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), zlib.crc32(rows.numpy().data)


def fingerprint_of_all(tensors: Iterable[Tensor]) -> Fingerprint:
    """Of several, in their order."""
    return tuple(map(fingerprint, tensors))


def _phase(module: str) -> str:
    """module: that is at work, within whose own functions gradients are off as in the update."""
    if torch_private.current_graph_task() >= 0:
        return "backward"
    return "forward" if module or torch.is_grad_enabled() else "update"


def _arguments(done: Operation) -> list[tuple[Tensor, bool]]:
    """Each tensor that it was given, and whether it has written there."""
    found = []
    for argument, value in _named(done):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        found += [(leaf, is_written) for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return found


def _settings(done: Operation) -> dict[str, str]:
    """Those whose text says what they are: no generator."""
    plain = (int, float, bool, str, torch.dtype, torch.device, torch.layout)
    return {
        argument.name: str(value)
        for argument, value in _named(done)
        if all(isinstance(leaf, plain) for leaf in leaves(value))
    }


def _named(done: Operation) -> list[tuple[Any, Any]]:
    """What an operation was given, with its schema's word for it."""
    arguments = done.op._schema.arguments
    by_name = {argument.name: argument for argument in arguments}
    placed = list(zip(arguments, done.args, strict=False))
    return placed + [(by_name[name], value) for name, value in done.kwargs.items() if name in by_name]
