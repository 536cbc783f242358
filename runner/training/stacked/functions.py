"""Replaces torch's dropout and attention while several models compute together (step.py).

Dropout: each member has the masks of a single run, from its own generator. Attention: torch 2.13 calls its CPU kernel for
each model separately, so it is written in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from runner.device import torch_private
from runner.models.attention import attend_by_steps

#: whether a function drops whole channels
DROPOUTS: dict[Any, bool] = {
    F.dropout: False,
    torch.dropout: False,
    F.dropout1d: True,
    F.dropout2d: True,
    F.dropout3d: True,
    torch.feature_dropout: True,
}
#: torch's attention of several heads, in which a mode sees the functions that it is made of: torch switches the mode off there
of_heads = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
#: makes the masks of values (m, ...), from a rate and whether whole channels are dropped
MakeMasks = Callable[[Tensor, float, bool], Tensor]
_make_masks: list[MakeMasks] = []  # of the members that compute now


@torch.library.custom_op("runner::member_masks", mutates_args=())
def member_masks(like: Tensor, p: float, by_channel: bool) -> Tensor:
    """Dropout's masks, computed as in single runs."""
    raise RuntimeError("dropout of values that are one for all of them")


@member_masks.register_fake
def _(like: Tensor, p: float, by_channel: bool) -> Tensor:
    return like.new_empty(_shape(like, by_channel))


def _of_members(
    info: Any, in_dims: Sequence[int | None], like: Tensor, p: float, by_channel: bool
) -> tuple[Tensor, int]:
    own = like.movedim(in_dims[0] or 0, 0)
    with torch_private.exclude_keys(torch_private.KeySet(torch_private.vmap_key)):  # it refuses whatever is random
        return _make_masks[0](own, p, by_channel), 0


torch.library.register_vmap("runner::member_masks", _of_members)


def _shape(like: Tensor, by_channel: bool) -> Sequence[int]:
    return (*like.shape[:2], *(1 for _ in like.shape[2:])) if by_channel else like.shape


class MembersFunctions(TorchFunctionMode):
    """Use these functions in the block.

    Attributes:
        generators: Of the members.
        states_before: The generators' states before the first draw since it was set to [].
    """

    def __init__(self, *, channels_last: bool) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []
        self.states_before: list[Tensor] = []
        self._channels_last = channels_last
        self._make_masks: MakeMasks = self.draw_masks

    def __enter__(self) -> MembersFunctions:
        _make_masks[:] = [self._make_masks]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def with_masks(self, make_masks: MakeMasks) -> Iterator[None]:
        """Use these functions in the block, with masks that `make_masks` makes instead of drawing them."""
        self._make_masks = make_masks
        try:
            with self:
                yield
        finally:
            self._make_masks = self.draw_masks

    def draw_masks(self, like: Sequence[Tensor] | Tensor, p: float, by_channel: bool) -> Tensor:
        """The members' next masks, (m, ...). like: Values of each member."""
        self.states_before = self.states_before or [generator.get_state() for generator in self.generators]
        pairs = zip(like, self.generators, strict=True)
        return torch.stack([self._draw_mask(own, p, by_channel, generator) for own, generator in pairs])

    def _draw_mask(self, like: Tensor, p: float, by_channel: bool, generator: torch.Generator) -> Tensor:
        if by_channel:
            mask = like.new_empty(_shape(like, by_channel))
        elif self._channels_last and like.dim() == 4:
            mask = torch.empty_like(like, memory_format=torch.channels_last)
        else:
            mask = torch.empty_like(like)  # it is filled in memory order, which differs for transposed values
        if p in (0, 1):
            return mask.fill_(1 - p)  # nothing is drawn
        return mask.bernoulli_(1 - p, generator=generator).div_(1 - p)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            with self:
                return of_heads(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func not in DROPOUTS:
            return func(*args, **kwargs)
        named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        is_training = named.get("train", named.get("training", True))
        values, p = named["input"], named.get("p", 0.5) if is_training else 0.0
        return self._drop(values, p, by_channel=DROPOUTS[func], inplace=bool(named.get("inplace")))

    def _drop(self, values: Tensor, p: float, *, by_channel: bool = False, inplace: bool = False) -> Tensor:
        if not p:
            return values
        mask = member_masks(values.detach(), p, by_channel)
        return values.mul_(mask) if inplace else values * mask

    def _attend(
        self,
        query: Tensor,  # (..., L, E)
        key: Tensor,  # (..., S, E)
        value: Tensor,  # (..., S, V)
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if more.get("enable_gqa"):
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        drop = partial(self._drop, p=dropout_p)
        scale = more.get("scale")
        return attend_by_steps(query, key, value, mask=attn_mask, is_causal=is_causal, drop=drop, scale=scale)
