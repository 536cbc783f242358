"""Does layers by the kernel that the simulated device's own C++ would choose, cuDNN's among them: recurrent ones, CTC.

C++ asks for hardware that is not here: it would end with recurrent cells step by step, and with CTC on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device import torch_private
from runner.plan.simulator.shapes import NotSimulated
from runner.plan.simulator.tensor import SimulatedTensor, pretence

aten = torch.ops.aten
#: of cuDNN
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def recurrent(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.lstm` and its like, by the kernel of a GPU for whole layers, where it has one; else torch's own.

    With numbers it is torch's own too: such a kernel does not exist here.
    """

    def layer(inputs: Tensor, second: Any, third: Any, *rest: Any) -> Any:
        is_packed = isinstance(third if name != "lstm" else second, Tensor)
        kind = inputs.device.type if isinstance(inputs, SimulatedTensor) and not pretence.has_numbers else ""
        if kind == "cuda" and torch.backends.cudnn.enabled:
            if is_packed:
                return _cudnn(name, inputs, third, *rest, batch_first=False, sizes=second)
            return _cudnn(name, inputs, second, third, *rest[:-1], batch_first=rest[-1])
        if kind == "mps" and name == "lstm" and not is_packed and second[0].shape == second[1].shape:
            return aten._lstm_mps(inputs, second, third, *rest)[:3]
        return own(inputs, second, third, *rest)

    return layer


def _cudnn(
    name: str,
    inputs: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    *,
    batch_first: bool,
    sizes: Tensor | None = None,
) -> Any:
    state, cell = state if name == "lstm" else (state, None)
    inputs, state, cell, *weights = _cast(inputs, state, cell, *weights)
    hidden = weights[1].shape[0] // {"lstm": 4, "gru": 3}.get(name, 1)
    projected = state.shape[-1] if name == "lstm" and state.shape[-1] != hidden else 0
    stride = (4 if has_bias else 2) + bool(projected)
    settings = (MODES[name], hidden, projected, num_layers, batch_first, dropout, training, both_ways)
    lengths = [] if sizes is None else sizes.tolist()
    found = aten._cudnn_rnn(inputs, weights, stride, None, state, cell, *settings, lengths, None)
    return found[:3] if name == "lstm" else found[:2]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.ctc_loss`; lengths that lie on the device are read, as C++ does it. log_probs: (T, B, C)"""
    if not isinstance(log_probs, SimulatedTensor) or pretence.has_numbers:
        own = torch_private.variable_functions.ctc_loss
        given: Tensor = own(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        return given
    steps, lengths = _lengths(input_lengths), _lengths(target_lengths)
    targets = targets.to(log_probs.device)
    losses: Tensor = aten._ctc_loss(log_probs, targets, steps, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == torch.inf, torch.zeros((), dtype=losses.dtype, device=losses.device), losses)
    if reduction == 1:
        counts = torch.tensor(lengths).clamp_min(1).to(losses.dtype).to(losses.device)
        return (losses / counts).mean()
    return losses.sum() if reduction else losses


def _lengths(given: Any) -> Sequence[int]:
    if not isinstance(given, Tensor):
        return list(given)
    there = given.cpu()
    if isinstance(there, SimulatedTensor) and there.backing.is_meta:
        raise NotSimulated("ctc_loss goes by values: its lengths lie on the device")
    return [int(length) for length in there.tolist()]


def _cast(*tensors: Tensor | None) -> list[Any]:
    if not torch.is_autocast_enabled("cuda"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cuda")
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]
