"""Watches a step operation by operation: which one first gave a value that is not finite, of what inputs, on which line.

For `explain` (runs/explain/), which replays the step: nothing of this is in a run. It keeps what made each tensor, and of
those that are not finite through which operations. An infinity that was written on purpose, as in a mask, is fine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from runner.device.layers import OneDNNProduct
from runner.device.placement import leaves, tensor_leaves
from runner.device.torch_private import TorchDispatchMode, WithoutDynamo, current_autograd_node
from runner.inspection import call_site
from runner.inspection.tensor_names import Names, storage_of


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
def bad_rows(tensor: Tensor) -> Tensor:
    """(n,) bool on the host, along the first dimension: where a value is not finite; (0,) of a single number."""
    if not tensor.dim():
        return torch.zeros(0, dtype=torch.bool)
    return (~_wide(tensor).isfinite()).flatten(1).any(1).cpu() if tensor.dim() > 1 else (~tensor.isfinite()).cpu()


def is_finite(tensor: Tensor) -> bool:
    """Of all its values; True for what holds no floating numbers."""
    found = range_of(tensor)
    return found is None or not found.num_not_finite


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dtype.itemsize >= 4 else tensor.detach().float()


#: give memory that holds anything, or hand on what they are given
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
PASSING = {"detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"}


@dataclass(frozen=True)
class Seen:
    """A tensor that an operation took or gave."""

    argument: str  # as the operation calls it: self, other, weight
    name: str  # batch[0], model.head.weight; "" for one that has none
    made: tuple[str, str]  # the operation that made it in this step, and its line; ("", "") for one from outside
    shape: tuple[int, ...]
    dtype: torch.dtype
    range: Range


@dataclass(frozen=True)
class Record:
    """An operation that gave something that is not finite."""

    number: int  # in the order of the step
    name: str  # log
    phase: str  # forward, loss, backward, optimizer
    line: str
    module: str
    node: str  # in backward, torch's name of the node: LogBackward0
    inputs: tuple[Seen, ...]
    output: Seen
    bad_rows: Tensor  # (n,) bool, along the output's first dimension: where it holds such a value
    first: Record | None = None  # of the operations that led to it (None: itself)
    is_meant: bool = False  # an infinity that was written, or came of one

    @property
    def is_own_function(self) -> bool:
        """Whether it is the backward pass of a custom torch.autograd.Function: torch's names end in a number."""
        return self.node.endswith("Backward") and self.node != f"{OneDNNProduct.__name__}Backward"

    def origin(self) -> Record:
        """Return the first operation on the way here that was given only finite values."""
        return self.first or self


class Size(NamedTuple):
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


class Watch(WithoutDynamo, TorchDispatchMode):
    """Sees the operations of its `with` block, with the backward passes in it; `in_task` is set by the caller."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        """names: of the step's tensors; those of the batch are called batch..."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_task = False
        self.sizes: list[Size] = []
        self._model, self._names = model, names
        self._records: dict[int, Record] = {}  # by storage: what made it, where it is not finite
        self._made: dict[int, tuple[str, str]] = {}  # by storage: the operation and its line
        self._unwritten: set[int] = set()
        self._number, self._went_back = 0, False
        self._caller: FrameType | None = None
        self._lines = call_site.Lines()

    def __enter__(self) -> Self:
        self._caller = sys._getframe(1)
        self._lines = call_site.Lines(self._caller)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._caller = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def record_of(self, tensor: Tensor) -> Record | None:
        """Return the operation that made a tensor, if that is not finite."""
        return self._records.get(storage_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op, kwargs = func, kwargs or {}
        if op.namespace == "prim":  # C++ reads a tensor's device
            return op(*args, **kwargs)
        name = op._overloadpacket.__name__
        given = list(_arguments(op, args, kwargs))
        before = {id(one.tensor): self._range(one.tensor) for one in given if one.is_written}
        bad = {id(one.tensor) for one in given if self._is_bad(one.tensor)}
        result = op(*args, **kwargs)
        line, module = self._lines.now()  # of a view, too: its backward pass reads it
        outputs: list[tuple[int | None, Tensor]] = [*enumerate(tensor_leaves(result))]
        outputs += [(one.position, one.tensor) for one in given if one.is_written]
        for _, tensor in outputs:
            (self._unwritten.add if name in UNWRITTEN else self._unwritten.discard)(storage_of(tensor))
        if op.is_view or name in PASSING or name in UNWRITTEN:
            return result
        self._number += 1
        name, phase = name.strip("_"), self._phase()
        is_written = any(isinstance(value, float) and math.isinf(value) for value in leaves((args, kwargs)))
        in_lists = any(one.position is not None for one in given)
        records: dict[int, Record] = {}
        for position, tensor in outputs:
            measured = range_of(tensor)
            if measured is None or not measured.num_not_finite:
                if measured is not None and self.in_task:
                    self.sizes.append(Size(measured.size, name, line, module))
                continue
            own = [one for one in given if not in_lists or one.position in (None, position)]
            inputs = [self._seen(one.name, one.tensor, before.get(id(one.tensor))) for one in own]
            causes = [one.tensor for one in own if id(one.tensor) in bad]
            first, is_meant = self._cause(causes, measured, is_written=is_written)
            node = current_autograd_node()
            records[storage_of(tensor)] = Record(
                self._number,
                name,
                phase,
                line,
                module,
                "" if node is None else str(node.name()),
                tuple(seen for seen in inputs if seen is not None),
                Seen("", self._name(tensor), ("", ""), tuple(tensor.shape), tensor.dtype, measured),
                bad_rows(tensor),
                first,
                is_meant,
            )
        for key in {storage_of(tensor) for _, tensor in outputs}:
            self._made[key] = (name, line)
            self._records.pop(key, None)
        self._records |= records
        return result

    def _cause(self, tensors: Sequence[Tensor], measured: Range, *, is_written: bool) -> tuple[Record | None, bool]:
        """Return the first operation that led to inputs that are not finite, and whether an infinity was meant throughout."""
        records = [(tensor, self.record_of(tensor)) for tensor in tensors]
        meant = [record.is_meant if record else not self._name(one).startswith("batch") for one, record in records]
        is_meant = not measured.num_nan and (all(meant) if meant else is_written)
        origins = [record.origin() for _, record in records if record is not None and not record.is_meant]
        return min(origins, key=lambda record: record.number, default=None), is_meant

    def _is_bad(self, tensor: Tensor) -> bool:
        key = storage_of(tensor)
        return key in self._records if key in self._made else self._range(tensor, only_bad=True) is not None

    def _range(self, tensor: Tensor, *, only_bad: bool = False) -> Range | None:
        measured = range_of(tensor) if storage_of(tensor) not in self._unwritten else None
        return None if measured is not None and only_bad and not measured.num_not_finite else measured

    def _name(self, tensor: Tensor) -> str:
        known = self._names.get(tensor)
        return known.path if known is not None else ""

    def _seen(self, argument: str, tensor: Tensor, before: Range | None) -> Seen | None:
        measured = before or self._range(tensor)
        if measured is None:
            return None
        made = self._made.get(storage_of(tensor), ("", ""))
        return Seen(argument, self._name(tensor), made, tuple(tensor.shape), tensor.dtype, measured)

    def _phase(self) -> str:
        if current_autograd_node() is not None:
            self._went_back = True
            return "backward"
        if self.in_task:
            self._went_back = False
            running = call_site.modules(list(call_site.frames(self._caller)))
            return "forward" if any(module is self._model for module in running) else "loss"
        return "optimizer" if self._went_back else "loss"


def _arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[_Argument]:
    for place, argument in enumerate(op._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(value, Tensor):
            yield _Argument(argument.name, None, value, is_written)
        elif isinstance(value, list | tuple):
            tensors = ((index, item) for index, item in enumerate(value) if isinstance(item, Tensor))
            yield from (_Argument(argument.name, index, item, is_written) for index, item in tensors)
