"""Attention and recurrent layers with the kernel that torch would choose on the simulated device.

Without its hardware, torch would compute recurrent cells step by step, and attention with a (T, T) matrix per head. With
numbers, this is what happens, as a GPU's kernels don't exist here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.device import torch_private
from runner.tools.plan.simulator.shapes import NotSimulated
from runner.tools.plan.simulator.tensor import SimulatedTensor, pretence

aten = torch.ops.aten
AMPERE = (8, 0)
HALVES = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 256  # of the flash kernel
ALIGNED_BYTES = 16  # alignment of a head's size, for the memory-efficient kernel
#: of cuDNN
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands for `scaled_dot_product_attention`; tensors of the host get torch's."""
    given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not any(isinstance(tensor, SimulatedTensor) for tensor in (query, key, value)):
        own: Tensor = torch_private.nn_functions.scaled_dot_product_attention(query, key, value, attn_mask, **given)
        return own
    kind, mask = query.device.type, attn_mask
    query, key, value = _cast(kind, query, key, value)
    if mask is not None and mask.is_floating_point():
        (mask,) = _cast(kind, mask)
    with torch.autocast(kind, enabled=False):  # the kernel is below autocast in C++, too
        found = None
        if query.dim() == 4 and not pretence.has_numbers:
            if enable_gqa and kind == "cuda":
                num = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(num, 1), value.repeat_interleave(num, 1)
            found = _by_kernel(kind, query, key, value, mask, dropout_p, is_causal, scale)
        if found is None:
            is_grouped = enable_gqa and key.shape[1] != query.shape[1]
            given = {"scale": scale, "enable_gqa": is_grouped}
            found = torch_private.attention_by_parts(query, key, value, mask, dropout_p, is_causal, **given)
    result: Tensor = found[0]
    return result


def _by_kernel(
    kind: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *rest: Any
) -> Any:
    is_causal, scale = rest
    is_even = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if kind == "cuda" and query.dtype in (*HALVES, torch.float32):
        is_half = query.dtype in HALVES and is_even and query.shape[-1] <= MAX_HEAD_SIZE
        if is_half and mask is None and tuple(torch.cuda.get_device_capability()) >= AMPERE:
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout, is_causal, scale=scale)
        if all(tensor.shape[-1] * tensor.element_size() % ALIGNED_BYTES == 0 for tensor in (query, value)):
            needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            bias = _as_bias(mask, query, key)
            kernel = aten._scaled_dot_product_efficient_attention
            return kernel(query, key, value, bias, needs_grad, dropout, is_causal, scale=scale)
    learns_mask = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    is_whole = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if kind == "cpu" and dropout == 0 and is_even and is_whole and not learns_mask:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, key, value, 0.0, is_causal, attn_mask=_as_bias(mask, query, key), scale=scale)
    return None


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        none = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, none, torch.full((), float("-inf"), dtype=query.dtype, device=query.device))
    return mask.expand(*query.shape[:3], key.shape[2])


def recurrent(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for `torch.lstm` and the others: a GPU's kernel for whole layers if it has one, else torch's."""

    def layer(inputs: Tensor, second: Any, third: Any, *rest: Any) -> Any:
        is_packed = isinstance(third if name != "lstm" else second, Tensor)
        kind = inputs.device.type if isinstance(inputs, SimulatedTensor) and not pretence.has_numbers else ""
        if kind == "cuda" and torch.backends.cudnn.enabled:
            if is_packed:
                return _cudnn(name, inputs, third, rest, batch_first=False, lengths=second.tolist())
            return _cudnn(name, inputs, second, (third, *rest[:-1]), batch_first=rest[-1], lengths=[])
        if kind == "mps" and name == "lstm" and not is_packed and second[0].shape == second[1].shape:
            return aten._lstm_mps(inputs, second, third, *rest)[:3]
        return own(inputs, second, third, *rest)

    return layer


def ctc_loss(log_probs: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Stands for `torch.ctc_loss`, which would choose by the missing hardware."""
    if isinstance(log_probs, SimulatedTensor) and not pretence.has_numbers:
        raise NotSimulated("ctc_loss can't be simulated")
    result: Tensor = torch_private.variable_functions.ctc_loss(log_probs, *rest, **named)
    return result


def _cudnn(
    name: str, inputs: Tensor, state: Any, rest: Sequence[Any], *, batch_first: bool, lengths: Sequence[int]
) -> Any:
    weights, has_bias, num_layers, dropout, training, both_ways = rest
    state, *cell = state if name == "lstm" else (state,)
    inputs, state, *others = _cast("cuda", inputs, state, *cell, *weights)
    cell, weights = others[: len(cell)], others[len(cell) :]
    hidden = weights[1].shape[0] // {"lstm": 4, "gru": 3}.get(name, 1)
    projected = state.shape[-1] if name == "lstm" and state.shape[-1] != hidden else 0
    stride = (4 if has_bias else 2) + bool(projected)
    settings = (MODES[name], hidden, projected, num_layers, batch_first, dropout, training, both_ways)
    found = aten._cudnn_rnn(inputs, weights, stride, None, state, *(cell or [None]), *settings, lengths, None)
    return found[:3] if name == "lstm" else found[:2]


def _cast(kind: str, *tensors: Tensor) -> list[Any]:
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return [tensor.to(dtype) if dtype else tensor for tensor in tensors]
