"""Watches a step operation by operation: which one first gave a value that is not finite, of what inputs, on which line.

`explain` replays the step: nothing of this is in a run. It keeps what made each tensor, and of
those that are not finite through which operations. An infinity that was written on purpose, as in a mask, is fine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.device.layers import OneDNNProduct
from runner.device.placement import leaves
from runner.device.torch_private import current_autograd_node
from runner.inspection import call_site
from runner.inspection.operations import Operation, OperationObserver
from runner.inspection.tensor_names import TensorNames, storage_of


@dataclass(frozen=True)
class Range:
    """The least and the greatest value that is finite (None: none is), and how many are not."""

    least: float | None
    greatest: float | None
    count: int
    num_nan: int = 0
    num_inf: int = 0

    @property
    def num_not_finite(self) -> int:
        return self.num_nan + self.num_inf

    @property
    def size(self) -> float:
        """The greatest absolute value among the finite ones."""
        return max(abs(self.least or 0.0), abs(self.greatest or 0.0))


@torch.no_grad()
def range_of(tensor: Tensor) -> Range | None:
    """None for what holds no floating numbers, or none at all."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
        return None
    values = _wide(tensor)
    least, greatest = torch.stack(torch.aminmax(values)).tolist()
    if abs(least) < torch.inf and abs(greatest) < torch.inf:
        return Range(least, greatest, values.numel())
    num_nan, num_inf = torch.stack([values.isnan().sum(), values.isinf().sum()]).tolist()
    if num_nan + num_inf == values.numel():
        return Range(None, None, values.numel(), num_nan, num_inf)
    finite = values[values.isfinite()]
    return Range(float(finite.min()), float(finite.max()), values.numel(), num_nan, num_inf)


@torch.no_grad()
def rows_not_finite(tensor: Tensor) -> Tensor:
    """(n,) bool on the host, along the first dimension: where a value is not finite; (0,) of a single number."""
    if not tensor.dim():
        return torch.zeros(0, dtype=torch.bool)
    return (~_wide(tensor).isfinite()).flatten(1).any(1).cpu() if tensor.dim() > 1 else (~tensor.isfinite()).cpu()


def is_finite(tensor: Tensor) -> bool:
    """Of all its values; True for what holds no floating numbers."""
    measured = range_of(tensor)
    return measured is None or not measured.num_not_finite


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dtype.itemsize >= 4 else tensor.detach().float()


#: give memory that holds anything, or hand on what they are given
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
PASSING = {"detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"}


@dataclass(frozen=True)
class SeenTensor:
    """A tensor that an operation took or gave."""

    argument: str  # as the operation calls it: self, other, weight
    name: str  # batch[0], model.head.weight; "" for one that has none
    made: tuple[str, str]  # the operation that made it in this step, and its line; ("", "") for one from outside
    shape: tuple[int, ...]
    dtype: torch.dtype
    range: Range


@dataclass(frozen=True)
class NotFiniteOperation:
    """An operation that gave something that is not finite."""

    number: int  # in the order of the step
    name: str  # log
    phase: str  # forward, loss, backward, optimizer
    line: str
    module: str
    node: str  # in backward, torch's name of the node: LogBackward0
    inputs: tuple[SeenTensor, ...]
    output: SeenTensor
    rows_not_finite: Tensor  # (n,) bool, along the output's first dimension: where it holds such a value
    first: NotFiniteOperation | None = None  # of the operations that led to it (None: itself)
    is_meant: bool = False  # an infinity that was written, or came of one

    @property
    def is_own_function(self) -> bool:
        """Whether it is the backward pass of a custom torch.autograd.Function: torch's names end in a number."""
        return self.node.endswith("Backward") and self.node != f"{OneDNNProduct.__name__}Backward"

    def origin(self) -> NotFiniteOperation:
        """Return the first operation on the way here that was given only finite values."""
        return self.first or self


class LargestValue(NamedTuple):
    """The largest absolute value that an operation of the forward pass gave."""

    value: float
    name: str
    line: str
    module: str


class _Argument(NamedTuple):
    name: str
    position: int | None  # in a list of them
    tensor: Tensor
    is_written: bool


class NotFiniteObserver(OperationObserver):
    """Sees the operations of a step, with its backward pass; `in_task` is set by the caller."""

    def __init__(self, model: nn.Module, names: TensorNames, outermost: FrameType | None = None) -> None:
        """Make an observer of one step.

        Args:
            names: Of the step's tensors; those of the batch are called batch...
            outermost: The frame that takes the step; lines of its callers are not the step's.
        """
        self.in_task = False
        self.largest: list[LargestValue] = []
        self._model, self._names, self._outermost = model, names, outermost
        self._lines = call_site.Lines(outermost)
        self._causes: dict[int, NotFiniteOperation] = {}  # by storage: what made it, where it is not finite
        self._made: dict[int, tuple[str, str]] = {}  # by storage: the operation and its line
        self._unwritten: set[int] = set()
        self._number, self._went_back = 0, False
        self._arguments: list[_Argument] = []  # of the operation under way
        self._ranges: dict[int, Range | None] = {}  # by tensor, before it is written
        self._not_finite: set[int] = set()

    def cause_of(self, tensor: Tensor) -> NotFiniteOperation | None:
        """Return the operation that made a tensor, if that is not finite."""
        return self._causes.get(storage_of(tensor))

    def before(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._arguments = list(_arguments(op, args, kwargs))
        self._ranges = {id(one.tensor): self._range(one.tensor) for one in self._arguments if one.is_written}
        self._not_finite = {id(one.tensor) for one in self._arguments if self._is_not_finite(one.tensor)}

    def after(self, done: Operation) -> None:
        line, module = self._lines.now()  # of a view, too: its backward pass reads it
        outputs: list[tuple[int | None, Tensor]] = [*enumerate(done.outputs)]
        outputs += [(one.position, one.tensor) for one in self._arguments if one.is_written]
        keys = {storage_of(tensor) for _, tensor in outputs}
        if done.name in UNWRITTEN:
            self._unwritten |= keys
            return
        self._unwritten -= keys
        if done.op.is_view or done.name in PASSING:
            return
        self._number += 1
        name, phase, node = done.name.strip("_"), self._phase(), current_autograd_node()
        is_written = any(isinstance(value, float) and math.isinf(value) for value in leaves((done.args, done.kwargs)))
        in_lists = any(one.position is not None for one in self._arguments)
        causes: dict[int, NotFiniteOperation] = {}
        for position, tensor in outputs:
            measured = range_of(tensor)
            if measured is None or not measured.num_not_finite:
                if measured is not None and self.in_task:
                    self.largest.append(LargestValue(measured.size, name, line, module))
                continue
            own = [one for one in self._arguments if not in_lists or one.position in (None, position)]
            first, is_meant = self._cause([one.tensor for one in own], measured, is_written=is_written)
            causes[storage_of(tensor)] = NotFiniteOperation(
                self._number,
                name,
                phase,
                line,
                module,
                "" if node is None else str(node.name()),
                tuple(seen for one in own if (seen := self._seen(one)) is not None),
                SeenTensor("", self._name(tensor), ("", ""), tuple(tensor.shape), tensor.dtype, measured),
                rows_not_finite(tensor),
                first,
                is_meant,
            )
        for key in keys:
            self._made[key] = (name, line)
            self._causes.pop(key, None)
        self._causes |= causes

    def _cause(
        self, inputs: Sequence[Tensor], measured: Range, *, is_written: bool
    ) -> tuple[NotFiniteOperation | None, bool]:
        """Return the first operation that led to inputs that are not finite, and whether an infinity was meant throughout."""
        causes = [(tensor, self.cause_of(tensor)) for tensor in inputs if id(tensor) in self._not_finite]
        meant = [cause.is_meant if cause else not self._name(tensor).startswith("batch") for tensor, cause in causes]
        is_meant = not measured.num_nan and (all(meant) if meant else is_written)
        origins = [cause.origin() for _, cause in causes if cause is not None and not cause.is_meant]
        return min(origins, key=lambda cause: cause.number, default=None), is_meant

    def _is_not_finite(self, tensor: Tensor) -> bool:
        key = storage_of(tensor)
        if key in self._made:
            return key in self._causes
        measured = self._range(tensor)
        return measured is not None and measured.num_not_finite > 0

    def _range(self, tensor: Tensor) -> Range | None:
        return range_of(tensor) if storage_of(tensor) not in self._unwritten else None

    def _name(self, tensor: Tensor) -> str:
        known = self._names.get(tensor)
        return known.path if known is not None else ""

    def _seen(self, argument: _Argument) -> SeenTensor | None:
        tensor = argument.tensor
        measured = self._ranges.get(id(tensor)) or self._range(tensor)
        if measured is None:
            return None
        made = self._made.get(storage_of(tensor), ("", ""))
        return SeenTensor(argument.name, self._name(tensor), made, tuple(tensor.shape), tensor.dtype, measured)

    def _phase(self) -> str:
        if current_autograd_node() is not None:
            self._went_back = True
            return "backward"
        if self.in_task:
            self._went_back = False
            running = call_site.modules(list(call_site.frames(self._outermost)))
            return "forward" if any(module is self._model for module in running) else "loss"
        return "optimizer" if self._went_back else "loss"


def _arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Argument]:
    for index, argument in enumerate(op._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(value, Tensor):
            yield _Argument(argument.name, None, value, is_written)
        elif isinstance(value, list | tuple):
            tensors = ((position, item) for position, item in enumerate(value) if isinstance(item, Tensor))
            yield from (_Argument(argument.name, position, item, is_written) for position, item in tensors)
