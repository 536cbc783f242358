"""Compute an operation on tensors without numbers: by torch's rules for meta, on the CPU with made-up numbers, or by a rule here.

The memory that cuDNN's and MPS's recurrent layers keep for the backward pass is an estimate: the gates, the cells and the
outputs of each layer. oneDNN reports its size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device.placement import tensor_leaves
from runner.device.torch_private import tree_map
from runner.inspection.host_reads import INDEXING_KERNELS
from runner.tools.plan.simulator.values import goes_by, goes_by_size, mark_usual, value

aten = torch.ops.aten
META = torch.device("meta")
#: multiply tensors of one type
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.convolution}
#: results whose size depends on values
SIZED = {aten.nonzero, aten.masked_select, aten.bincount, aten._unique, aten._unique2, aten.unique_consecutive}
SIZED |= {aten.unique_dim}
#: an operation without a rule for meta is computed on the CPU, as long as its tensors take at most this
MAX_COMPUTED_BYTES = 2**30
#: hidden states that cuDNN keeps for each step and layer, by its number for the mode
KEPT = {0: 1, 1: 1, 2: 6, 3: 5}


class NotSimulated(RuntimeError):
    """The result of an operation can't be computed without numbers."""


def of(tensor: Tensor) -> Tensor:
    """Return the shape, strides and type of a tensor, without its numbers. Raises: NotSimulated for a sparse one."""
    if tensor.layout is not torch.strided:
        raise NotSimulated("sparse tensors are not simulated")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the results of an operation on tensors of meta.

    Raises:
        NotSimulated: Neither a rule, nor meta, nor the CPU gives them.
        RuntimeError: A product of tensors of different types, which meta does not refuse.
    """
    packet = func._overloadpacket
    if packet in PRODUCTS and len(types := {tensor.dtype for tensor in tensor_leaves(args)}) > 1:
        names = " and ".join(sorted(str(each).removeprefix("torch.") for each in types))
        raise RuntimeError(f"{packet.__name__} needs tensors of one type, and they are {names}")
    if (rule := RULES.get(packet)) is not None:
        return rule(*args, **kwargs)
    if packet is aten._pack_padded_sequence and args[1].is_meta:  # assume no padding
        goes_by_size("pack_padded_sequence")
        rows, steps = args[0].shape[:2] if args[2] else args[0].shape[1::-1]
        args = (args[0], torch.full((rows,), steps), args[2])
    if _size_depends_on_values(func, args, kwargs):
        goes_by_size(packet.__name__)
        return _computed(func, args, kwargs)
    try:
        result = func(*args, **kwargs)
    except NotImplementedError:
        result = _computed(func, args, kwargs)
    mark_usual(packet, result)
    return result


def _size_depends_on_values(func: Any, args: Any, kwargs: Any) -> bool:
    packet = func._overloadpacket
    if packet in INDEXING_KERNELS:
        indices = (index for index in args[1] if index is not None)
        return len(args) == 2 and any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return packet in SIZED


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation on the CPU: with ones, so that a mask chooses all, or zeros, which are valid indices."""
    num_bytes = 0

    def made_up(leaf: Any) -> Any:
        nonlocal num_bytes
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return torch.device("cpu")
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        num_bytes += leaf.nbytes
        if num_bytes > MAX_COMPUTED_BYTES:
            raise NotSimulated(f"{func} can't be simulated: torch has no rule for its shapes, and it is too big to try")
        is_index = not leaf.dtype.is_floating_point and leaf.dtype is not torch.bool
        return (torch.zeros if is_index else torch.ones)(leaf.shape, dtype=leaf.dtype)

    given = tree_map(made_up, (args, kwargs))
    try:
        result = func(*given[0], **given[1])
    except Exception as error:
        raise NotSimulated(f"{func} can't be simulated: torch has no rule for its shapes ({error})") from None
    if func._schema.is_mutable:  # in place: the given tensors are the results
        return args[0] if func._schema.returns else None
    is_lengths = func._overloadpacket is aten._pack_padded_sequence  # C++ reads them
    results = tree_map(lambda leaf: of(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return (results[0], result[1]) if is_lengths else results


def _alike(what: str) -> bool:
    goes_by(what)
    return True


def _like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _rnn_layer(tensor: Tensor, *args: Any) -> tuple[Tensor, ...]:
    weights, (state, cell), rest = args[:4], args[4:6], args[6:]
    steps, rows, width = tensor.shape
    fixed, each = _workspace(steps, width, weights[1].shape, state.shape[-1], tensor.dtype, (rest[0], *rest[2:]))
    output = tensor.new_empty((steps, rows, state.shape[-1]))
    return output, *_like([state, cell]), tensor.new_empty((fixed + each * rows,), dtype=torch.uint8)


@functools.cache
def _workspace(
    steps: int, width: int, size: torch.Size, hidden: int, dtype: torch.dtype, rest: tuple[Any, ...]
) -> tuple[int, int]:
    found = []
    for rows in (1, 2):
        given = [torch.zeros(steps, rows, width, dtype=dtype), torch.zeros(size[0], width, dtype=dtype)]
        given += [torch.zeros(size, dtype=dtype), torch.zeros(size[0], dtype=dtype), torch.zeros(size[0], dtype=dtype)]
        given += [torch.zeros(rows, hidden, dtype=dtype) for _ in range(2)]
        workspace = aten.mkldnn_rnn_layer(*given, rest[0], [], *rest[1:])[3]
        found.append(0 if workspace is None else workspace.numel())  # None: not in training
    return 2 * found[0] - found[1], found[1] - found[0]


def _cudnn_rnn(
    tensor: Tensor, weights: Any, stride: int, buffer: Any, state: Tensor, cell: Tensor | None, *args: Any
) -> Any:
    mode, hidden, projected, num_layers, batch_first, _, training, both_ways, sizes, _ = args
    ways, given = 2 if both_ways else 1, tensor.shape[:-1]
    output = tensor.new_empty((*given, (projected or hidden) * ways))
    if batch_first and not sizes:
        output = tensor.new_empty((given[1], given[0], output.shape[-1])).transpose(0, 1)
    kept = KEPT[mode] * hidden * ways * num_layers * given.numel() if training else 0
    reserve = tensor.new_empty((kept * tensor.element_size(),), dtype=torch.uint8)
    new_cell = tensor.new_empty((0,)) if cell is None else torch.empty_like(cell)
    return output, torch.empty_like(state), new_cell, reserve, tensor.new_empty((0,))


def _cudnn_rnn_backward(tensor: Tensor, weights: Any, _: int, __: Any, state: Tensor, cell: Any, *args: Any) -> Any:
    grad_cell = None if cell is None else torch.empty_like(cell)
    return torch.empty_like(tensor), torch.empty_like(state), grad_cell, _like(weights)


def _lstm_mps(tensor: Tensor, states: Sequence[Tensor], weights: Any, has_bias: bool, num: int, *args: Any) -> Any:
    hidden, ways = states[0].shape[-1], 2 if args[2] else 1
    kept = [tensor.new_empty((num, *tensor.shape[:-1], size * hidden * ways)) for size in (4, 1, 1)]
    return tensor.new_empty((*tensor.shape[:-1], hidden * ways)), *_like(states), *kept


def _gru_cell(inputs: Tensor, hidden: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(state), state.new_empty((state.shape[0], 5 * state.shape[1]))


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    gates = [grad.new_empty((grad.shape[0], 3 * grad.shape[1])) for _ in range(2)]
    biases = [grad.new_empty((3 * grad.shape[1],)) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


RULES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense: value,
    aten.is_nonzero: lambda tensor: bool(value(tensor)),
    aten.equal: lambda *_: _alike("torch.equal()"),
    aten.allclose: lambda *_, **__: _alike("torch.allclose()"),
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    aten._lstm_mps: _lstm_mps,
    aten.lstm_mps_backward: lambda *args: (torch.empty_like(args[5]), _like(args[7]), _like(args[8])),
    aten._thnn_fused_gru_cell: _gru_cell,
    aten._thnn_fused_gru_cell_backward: _gru_cell_backward,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.mkldnn_rnn_layer_backward: lambda *args: tuple(_like(args[:7])),
}
