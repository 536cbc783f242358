"""Computes a GPU's fused recurrent cells by their formulas, as CPUs have no such kernel.

Formulas: Hochreiter and Schmidhuber 1997, Cho et al. 2014, in torch's order of gates (i, f, g, o and r, z, n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def lstm(
    inputs: Tensor, hidden: Tensor, cell: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """inputs, hidden: (B, 4H) before the activations; cell: (B, H). The new hidden state and cell, and the gates."""
    gates = inputs + hidden
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat((i, f, g, o), 1)


def lstm_backward(
    grad_hidden: Tensor | None, grad_cell: Tensor | None, cell: Tensor, new: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, g, o = gates.chunk(4, 1)
    bent = new.tanh()
    grad = torch.zeros_like(cell) if grad_cell is None else grad_cell
    grad_o = torch.zeros_like(o)
    if grad_hidden is not None:
        grad = grad + grad_hidden * o * (1 - bent * bent)
        grad_o = grad_hidden * bent * o * (1 - o)
    grads = torch.cat((grad * g * i * (1 - i), grad * cell * f * (1 - f), grad * i * (1 - g * g), grad_o), 1)
    return grads, grad * f, grads.sum(0) if has_bias else None


def gru(
    inputs: Tensor, hidden: Tensor, state: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """inputs, hidden: (B, 3H) before the activations; state: (B, H). The new state, and what the way back needs, (B, 5H)."""
    if input_bias is not None and hidden_bias is not None:
        inputs, hidden = inputs + input_bias, hidden + hidden_bias
    (ri, zi, ni), (rh, zh, nh) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    r, z = (ri + rh).sigmoid(), (zi + zh).sigmoid()
    n = (ni + r * nh).tanh()
    return n + z * (state - n), torch.cat((r, z, n, state, nh), 1)


def gru_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    r, z, n, state, nh = workspace.chunk(5, 1)
    grad_z = grad * (state - n) * (1 - z) * z
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * nh * (1 - r) * r
    to_inputs, to_hidden = torch.cat((grad_r, grad_z, grad_n), 1), torch.cat((grad_r, grad_z, grad_n * r), 1)
    biases = (to_inputs.sum(0), to_hidden.sum(0)) if has_bias else (None, None)
    return to_inputs, to_hidden, grad * z, *biases


CELLS: dict[Any, Callable[..., Any]] = {
    aten._thnn_fused_lstm_cell: lstm,
    aten._thnn_fused_lstm_cell_backward_impl: lstm_backward,
    aten._thnn_fused_gru_cell: gru,
    aten._thnn_fused_gru_cell_backward: gru_backward,
}
