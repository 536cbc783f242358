"""Replaces torch's dropout, attention and cross-entropy while several models compute together (step.py).

Dropout: each member has the masks of a single run, from its own generator, at its own rate. Attention: torch 2.13 calls its CPU
kernel for each model separately, so it is written in steps. Cross-entropy: each member may smooth its labels differently. A
number that differs between members is a tensor, whose attribute `each` is a list on the host (stack.py).
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

#: what a mask is drawn for: each number, or whole channels
NUMBERS, CHANNELS = "numbers", "channels"
DROPOUTS: dict[Any, str] = {
    F.dropout: NUMBERS,
    torch.dropout: NUMBERS,
    F.dropout1d: CHANNELS,
    F.dropout2d: CHANNELS,
    F.dropout3d: CHANNELS,
    torch.feature_dropout: CHANNELS,
}
#: torch's attention of several heads, in which a mode sees the functions that it is made of: torch switches the mode off there
of_heads = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
#: makes a mask instead of drawing it, from values (m, ...), the name of a number of the stack, a rate, and NUMBERS or CHANNELS
Given = Callable[[Tensor, str, float, str], Tensor]
_generators: list[torch.Generator] = []  # of the members that compute now
_given: list[Given] = []  # while they do so to be compiled


@torch.library.custom_op("runner::member_masks", mutates_args=())
def member_masks(like: Tensor, p: Sequence[float], of_what: str, channels_last: bool, number: str) -> Tensor:
    """Dropout's masks, computed as in single runs. p: of each member. number: the stack's name for p, or ""."""
    return _mask(like, p[0], of_what, channels_last, None)


@member_masks.register_fake
def _(like: Tensor, p: Sequence[float], of_what: str, channels_last: bool, number: str) -> Tensor:
    return like.new_empty(_shape(like, of_what))


def _of_members(
    info: Any,
    in_dims: Sequence[int | None],
    like: Tensor,
    p: Sequence[float],
    of_what: str,
    channels_last: bool,
    number: str,
) -> tuple[Tensor, int]:
    own = like.expand(info.batch_size, *like.shape) if in_dims[0] is None else like.movedim(in_dims[0], 0)
    with torch_private.exclude_keys(torch_private.KeySet(torch_private.vmap_key)):  # it refuses whatever is random
        if _given:
            return _given[0](own, number, p[0], of_what), 0
        return _drawn(own.unbind(), p, _generators, of_what, channels_last), 0


torch.library.register_vmap("runner::member_masks", _of_members)


def _drawn(
    each: Sequence[Tensor],
    p: Sequence[float],
    generators: Sequence[torch.Generator],
    of_what: str,
    channels_last: bool,
) -> Tensor:
    masks = [
        _mask(own, rate, of_what, channels_last, generator)
        for own, rate, generator in zip(each, p, generators, strict=True)
    ]
    return torch.stack(masks)


def _shape(like: Tensor, of_what: str) -> Sequence[int]:
    return (*like.shape[:2], *(1 for _ in like.shape[2:])) if of_what == CHANNELS else like.shape


def _mask(like: Tensor, p: float, of_what: str, channels_last: bool, generator: torch.Generator | None) -> Tensor:
    if of_what == CHANNELS:
        mask = like.new_empty(_shape(like, of_what))
    elif channels_last and like.dim() == 4:
        mask = torch.empty_like(like, memory_format=torch.channels_last)
    else:
        mask = torch.empty_like(like)  # it is filled in memory order, which differs for transposed values
    if p in (0, 1):
        return mask.fill_(1 - p)  # nothing is drawn
    mask.bernoulli_(1 - p, generator=generator)
    return mask.div_(1 - p)


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

    def __enter__(self) -> MembersFunctions:
        _generators[:] = self.generators
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @contextmanager
    def given(self, mask: Given) -> Iterator[None]:
        """While it lasts, they are used, and nothing is drawn: masks are given."""
        _given[:] = [mask]
        try:
            with self:
                yield
        finally:
            _given.clear()

    def drawn(self, like: Tensor, p: Sequence[float], of_what: str) -> Tensor:
        """The members' next masks, (m, ...). like: the values of one."""
        self._remember_states()
        return _drawn([like] * len(p), p, self.generators, of_what, self._channels_last)

    def _remember_states(self) -> None:
        self.states_before = self.states_before or [generator.get_state() for generator in self.generators]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            with self:
                return of_heads(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.cross_entropy and isinstance(kwargs.get("label_smoothing"), Tensor):
            return _smoothed(*args, **kwargs)
        if func not in DROPOUTS:
            return func(*args, **kwargs)
        values, p, inplace = _asked(args, kwargs)
        return self._drop(values, p, of_what=DROPOUTS[func], inplace=inplace)

    def _drop(self, values: Tensor, p: float | Tensor, *, of_what: str = NUMBERS, inplace: bool = False) -> Tensor:
        rates: list[float] = p.each if isinstance(p, Tensor) else [p] * len(self.generators)  # type: ignore[attr-defined]
        if not any(rates):
            return values
        self._remember_states()
        number: str = p.called if isinstance(p, Tensor) else ""  # type: ignore[attr-defined]
        mask = member_masks(values.detach(), rates, of_what, self._channels_last, number)
        return values.mul_(mask) if inplace else values * mask

    def _attend(
        self,
        query: Tensor,  # (..., L, E)
        key: Tensor,  # (..., S, E)
        value: Tensor,  # (..., S, V)
        attn_mask: Tensor | None = None,
        dropout_p: float | Tensor = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if more.get("enable_gqa"):
            groups = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        drop = partial(self._drop, p=dropout_p)
        scale = more.get("scale")
        return attend_by_steps(query, key, value, mask=attn_mask, is_causal=is_causal, drop=drop, scale=scale)


def _asked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any, bool]:
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | dict(kwargs)
    trains = named["train"] if "train" in named else named.get("training", True)
    return named["input"], named.get("p", 0.5) if trains else 0.0, bool(named.get("inplace"))


def _smoothed(*args: Any, label_smoothing: Tensor, **kwargs: Any) -> Tensor:
    loss: Callable[..., Tensor] = F.cross_entropy
    none, all_of_it = (loss(*args, label_smoothing=most, **kwargs) for most in (0.0, 1.0))
    return (1 - label_smoothing) * none + label_smoothing * all_of_it
