"""Does an operation on tensors without numbers: the results' shapes, or what stands for a value (values.py)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.device.placement import tensor_leaves
from runner.device.torch_private import tree_map
from runner.inspection.host_reads import INDEXING_KERNELS
from runner.plan.simulator.cells import CELLS
from runner.plan.simulator.recurrent import LAYERS
from runner.plan.simulator.values import goes_by, goes_by_size, mark_usual, value

aten = torch.ops.aten
META = torch.device("meta")
#: multiply tensors of one type
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.convolution, *CELLS}
#: an operation without a kernel for meta is computed on the CPU, on zeros, as long as they take no more than this
MOST_BYTES_OF_ZEROS = 2**30


class NotSimulated(RuntimeError):
    """Nothing says what this operation gives without numbers."""


def of(tensor: Tensor) -> Tensor:
    """Return the shape, strides and type of a tensor, without its numbers.

    Raises:
        NotSimulated: The tensor is sparse.
    """
    if tensor.layout is not torch.strided:
        raise NotSimulated("sparse tensors are not simulated")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the results of an operation on tensors of meta.

    Raises:
        NotSimulated: Neither a rule, nor meta, nor zeros on the CPU give them.
        RuntimeError: A product of tensors of different types, which meta does not refuse.
    """
    packet = func._overloadpacket
    if packet in PRODUCTS and len(types := {tensor.dtype for tensor in tensor_leaves(args)}) > 1:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in types))
        raise RuntimeError(f"{packet.__name__} needs tensors of one type, and they are {names}")
    rule = RULES.get(packet) or RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if packet in INDEXING_KERNELS:
        args = (args[0], _without_masks(args[1], is_sized=len(args) == 2), *args[2:])
    asked = _asked(func, args, kwargs)
    if asked is not None and asked in _told:
        result = _told[asked].made()
    else:
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            result = _by_zeros(func, args, kwargs)
        if asked is not None and (result_of := _Result.of(result, args, kwargs)) is not None:
            _told[asked] = result_of
    mark_usual(packet, result)
    return result


@dataclass(frozen=True)
class _Result:
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, result: Any, args: Any, kwargs: Any) -> _Result | None:
        """None for what is no single tensor, or lies in the memory of another."""
        if not isinstance(result, Tensor) or not result.is_meta:
            return None
        memory = result.untyped_storage()
        given = (tensor.untyped_storage() for tensor in tensor_leaves((args, kwargs)))
        if any(memory._cdata == other._cdata for other in given):
            return None
        found = cls(result.shape, result.stride(), result.dtype)
        return found if found.made().untyped_storage().nbytes() == memory.nbytes() else None

    def made(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


#: what operations told of tensors with the same shapes: torch's rules are Python, 0.2 ms each, and a recurrent layer's
#: step asks a thousand times
_told: dict[Any, _Result] = {}


def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    if not _is_pure(func):
        return None
    try:
        return func, _named(args), tuple((name, _named(value)) for name, value in kwargs.items())
    except TypeError:
        return None


@functools.cache
def _is_pure(func: Any) -> bool:
    schema = func._schema
    return not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is None


def _named(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_named, value))
    hash(value)
    return type(value), value


def _by_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    num_bytes = 0

    def zeros(leaf: Any) -> Any:
        nonlocal num_bytes
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return torch.device("cpu")
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        num_bytes += leaf.numel() * leaf.element_size()
        if num_bytes > MOST_BYTES_OF_ZEROS:
            raise NotSimulated(f"{func} can't be simulated: torch has no rule for its shapes, and it is too big to try")
        return torch.zeros(leaf.shape, dtype=leaf.dtype)

    try:
        result = func(*tree_map(zeros, args), **tree_map(zeros, kwargs))
    except NotSimulated:
        raise
    except Exception as error:
        raise NotSimulated(f"{func} can't be simulated: torch has no rule for its shapes ({error})") from None
    if not func._schema.returns:
        return None
    if func._schema.is_mutable:  # in place: the given tensors are the results
        return args[0]
    return tree_map(lambda leaf: of(leaf) if isinstance(leaf, Tensor) else leaf, result)


def _without_masks(indices: Sequence[Tensor | None], *, is_sized: bool) -> list[Tensor | None]:
    """A mask chooses as many as there are, at the most: an index of that many for each of its dimensions.

    is_sized: the result has that size, so that whatever follows goes by values.
    """
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            if is_sized:
                goes_by_size("tensor[mask]")
            found += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return found


def _alike(what: str) -> bool:
    goes_by(what)
    return True


def _nonzero(tensor: Tensor) -> Tensor:
    goes_by_size("nonzero")
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _masked_select(tensor: Tensor, mask: Tensor) -> Tensor:
    goes_by_size("masked_select")
    return tensor.new_empty((torch.broadcast_shapes(tensor.shape, mask.shape).numel(),))


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    goes_by_size("bincount")
    return tensor.new_empty((max(minlength, 1),), dtype=torch.int64 if weights is None else weights.dtype)


def _unique(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    goes_by_size("unique")
    whole = tensor.new_empty((tensor.numel(),))
    return whole, tensor.new_empty(tensor.shape, dtype=torch.int64), whole.new_empty(whole.shape, dtype=torch.int64)


def _pack_padded(tensor: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The sizes are real, since C++ reads them; where the lengths are not known, as if nothing were padded."""
    rows, steps = tensor.shape[:2] if batch_first else (tensor.shape[1], tensor.shape[0])
    if lengths.is_meta:
        goes_by_size("pack_padded_sequence")
        sizes = torch.full((steps,), rows, dtype=torch.int64)
    else:
        sizes = (lengths > torch.arange(int(lengths.max()))[:, None]).sum(1)
    return tensor.new_empty((int(sizes.sum()), *tensor.shape[2:])), sizes


def _grouped_mm(
    one: Tensor, other: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, dtype: Any = None
) -> Tensor:
    shape: tuple[int, ...] = (one.shape[-2], other.shape[-1])
    if one.dim() == other.dim():
        shape = (one.shape[0] if offsets is None else len(offsets), *shape)
    return one.new_empty(shape, dtype=dtype or one.dtype)


def _repeat(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    if output_size is None:
        goes_by_size("repeat_interleave")
    return repeats.new_empty((repeats.numel() if output_size is None else output_size,))


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any) -> Any:
    steps, rows = log_probs.shape[:2]
    longest = targets.shape[-1] if targets.dim() == 2 else max(target_lengths, default=1)
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, steps, 2 * int(longest) + 1))


RULES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense: value,
    aten.is_nonzero: lambda tensor: bool(value(tensor)),
    aten.equal: lambda *_: _alike("torch.equal()"),
    aten.allclose: lambda *_, **__: _alike("torch.allclose()"),
    aten.nonzero: _nonzero,
    aten.masked_select: _masked_select,
    aten.bincount: _bincount,
    aten._unique: _unique,
    aten._unique2: _unique,
    aten.unique_consecutive: _unique,
    aten.unique_dim: _unique,
    aten._pack_padded_sequence: _pack_padded,
    aten.repeat_interleave.Tensor: _repeat,
    aten._grouped_mm: _grouped_mm,
    aten._ctc_loss: _ctc_loss,
    aten._ctc_loss_backward: lambda grad, log_probs, *_: log_probs.new_empty(log_probs.shape),
    **LAYERS,
    **CELLS,
}
