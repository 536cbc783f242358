"""Does attention by the kernel that the simulated device's own dispatcher would take. One of torch_parts.py's replacements.

C++ chooses by asking for hardware that is not here, and would end with the formula, which keeps a (T, T) matrix for
every head: 203 instead of 171 MiB of activations in a small GPT (measured on torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from runner.device import torch_private
from runner.plan.simulator.tensor import SimulatedTensor, pretence

aten = torch.ops.aten
AMPERE = (8, 0)
HALVES = (torch.float16, torch.bfloat16)
MOST_HEAD_SIZE = 256  # of the flash kernel
ALIGNED_BYTES = 16  # the size of a head, for the memory-efficient kernel


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
    """`scaled_dot_product_attention`; tensors of the host that are not simulated take torch's own."""
    given: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not any(isinstance(tensor, SimulatedTensor) for tensor in (query, key, value)):
        own: Tensor = torch_private.nn_functions.scaled_dot_product_attention(query, key, value, attn_mask, **given)
        return own
    kind = query.device.type
    query, key, value, mask = _cast(kind, query, key, value, attn_mask)
    with torch.autocast(kind, enabled=False):  # what follows is below it in C++, too
        return _by_kernel(kind, query, key, value, mask, **given)


def _by_kernel(
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    fits_flash = query.shape[-1] == key.shape[-1] == value.shape[-1]
    # a GPU's own kernels do not exist here: no numbers of them
    if query.dim() == 4 and not pretence.has_numbers:
        if kind == "cuda" and query.dtype in (*HALVES, torch.float32):
            if enable_gqa:
                times = query.shape[1] // key.shape[1]
                key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
                enable_gqa = False
            is_half = query.dtype in HALVES and fits_flash and query.shape[-1] <= MOST_HEAD_SIZE
            if is_half and mask is None and tuple(torch.cuda.get_device_capability()) >= AMPERE:
                return _first(
                    aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
                )
            if all(tensor.shape[-1] * tensor.element_size() % ALIGNED_BYTES == 0 for tensor in (query, value)):
                return _efficient(query, key, value, mask, dropout_p, is_causal, scale)
        learns_mask = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        is_even = fits_flash and _is_even(query, key, value, enable_gqa=enable_gqa)
        if kind == "cpu" and dropout_p == 0 and is_even and not learns_mask:
            bias = _as_bias(mask, query, key)
            flash = aten._scaled_dot_product_flash_attention_for_cpu
            return _first(flash(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale))
    given: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    return _first(torch_private.attention_by_parts(query, key, value, mask, dropout_p, is_causal, **given))


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    bias = _as_bias(mask, query, key)
    kernel = aten._scaled_dot_product_efficient_attention
    return _first(kernel(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale))


def _cast(kind: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    if not torch.is_autocast_enabled(kind):
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(kind)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype), mask


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        none = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, none, torch.full((), float("-inf"), dtype=query.dtype, device=query.device))
    return mask.expand(*query.shape[:3], key.shape[2])


def _is_even(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    batches = {tensor.shape[0] for tensor in (query, key, value)}
    heads = {tensor.shape[1] for tensor in (query, key, value)}
    in_one_piece = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    return len(batches) == 1 and (len(heads) == 1 or enable_gqa) and in_one_piece


def _first(results: Any) -> Tensor:
    found: Tensor = results[0]
    return found
