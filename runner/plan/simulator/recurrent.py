"""Gives the shapes that a kernel for whole recurrent layers would return, and what it would keep, for shapes.py.

What cuDNN's and MPS's keep for the way back is known to them alone: here the gates, the cells and the outputs of each
layer, an estimate. oneDNN's can be asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
#: of each step and layer, in hidden states, by cuDNN's number for the mode
KEPT = {0: 1, 1: 1, 2: 6, 3: 5}


def _rnn_layer(tensor: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights, (state, cell), rest = args[:4], args[4:6], args[6:]
    steps, rows, width = tensor.shape
    fixed, each = _workspace(steps, width, weights[1].shape, state.shape[-1], tensor.dtype, (rest[0], *rest[2:]))
    output = tensor.new_empty((steps, rows, state.shape[-1]))
    return (
        output,
        torch.empty_like(state),
        torch.empty_like(cell),
        tensor.new_empty((fixed + each * rows,), dtype=torch.uint8),
    )


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


def _rnn_layer_backward(tensor: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(given) for given in (tensor, *args[:6]))


def _cudnn_rnn(
    tensor: Tensor,
    weights: Sequence[Tensor],
    stride: int,
    buffer: Tensor | None,
    state: Tensor,
    cell: Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    training: bool,
    both_ways: bool,
    sizes: Sequence[int],
    *_: Any,
) -> tuple[Tensor, ...]:
    ways, given = 2 if both_ways else 1, tensor.shape[:-1]
    output = tensor.new_empty((*given, (projected or hidden) * ways))
    if batch_first and not sizes:
        output = tensor.new_empty((given[1], given[0], output.shape[-1])).transpose(0, 1)
    kept = KEPT[mode] * hidden * ways * num_layers * given.numel() if training else 0
    reserve = tensor.new_empty((kept * tensor.element_size(),), dtype=torch.uint8)
    return (
        output,
        torch.empty_like(state),
        tensor.new_empty((0,)) if cell is None else torch.empty_like(cell),
        reserve,
        tensor.new_empty((0,)),
    )


def _cudnn_rnn_backward(
    tensor: Tensor, weights: Sequence[Tensor], stride: int, buffer: Tensor, state: Tensor, cell: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    return (
        torch.empty_like(tensor),
        torch.empty_like(state),
        None if cell is None else torch.empty_like(cell),
        [torch.empty_like(weight) for weight in weights],
    )


def _lstm_mps(
    tensor: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    hidden, ways = states[0].shape[-1], 2 if both_ways else 1
    kept = (num_layers, *tensor.shape[:-1])
    output = tensor.new_empty((*tensor.shape[:-1], hidden * ways))
    sizes = (4 * hidden * ways, hidden * ways, hidden * ways)
    return (
        output,
        torch.empty_like(states[0]),
        torch.empty_like(states[1]),
        *(tensor.new_empty((*kept, size)) for size in sizes),
    )


def _lstm_mps_backward(*args: Any) -> tuple[Any, ...]:
    tensor, states, weights = args[5], args[7], args[8]
    return (
        torch.empty_like(tensor),
        [torch.empty_like(state) for state in states],
        [torch.empty_like(weight) for weight in weights],
    )


LAYERS: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _cudnn_rnn_backward,
    aten._lstm_mps: _lstm_mps,
    aten.lstm_mps_backward: _lstm_mps_backward,
    aten.mkldnn_rnn_layer: _rnn_layer,
    aten.mkldnn_rnn_layer_backward: _rnn_layer_backward,
}
