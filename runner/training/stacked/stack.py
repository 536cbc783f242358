"""Computes several models of one shape as one, with one more dimension (`torch.func.vmap`).

ModelStack keeps their weights in one tensor for each name, (M, ...), and each model's own are views of them. So a step over all
of them changes each, and what uses one model (its checkpoint, its evaluation) needs no change.

MembersFunctions replaces torch's dropout and attention. Dropout: each member has the masks of a single run, from its own
generator. Attention: torch 2.13 calls its CPU kernel for each model separately, so it is written in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from runner.device import torch_private
from runner.models.attention import attend_by_steps
from runner.tasks.task import Task
from runner.training.parts import Parts

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


class CannotStackError(Exception):
    """Why jobs can't be trained together, as a text for one line."""


class ModelAndTask(nn.Module):
    """A model and its task as one module, so that the buffers of both have names."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, batch: Any) -> Mapping[str, Tensor]:
        return self.task(self.model, batch)


class ModelStack:
    """The stacked weights and buffers of some members, and their forward pass.

    parameters, buffers: By name, (M, ...). The weights are copied once. Frozen weights that are equal are not stacked: all
    members have the memory of the first, and compute with it at once.

    Raises:
        CannotStackError: For models of different shapes.
    """

    def __init__(self, members: Sequence[Parts]) -> None:
        self.wholes = [ModelAndTask(parts.model, parts.task) for parts in members]
        self.parameters = _stacked([dict(whole.named_parameters()) for whole in self.wholes])
        self.buffers = _stacked([dict(whole.named_buffers()) for whole in self.wholes])
        self._autocast = members[0].precision.autocast
        self.device, self.channels_last = members[0].device, members[0].layout.startswith("channels last")

    def forward(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Any
    ) -> Mapping[str, Tensor]:
        """The task's values of the members with these weights, (M,) each. batch: Its tensors are (M, B, ...).

        Raises what the model raises with one more dimension; so do random operations that MembersFunctions doesn't replace.
        """

        def forward_one(
            parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], own: Any
        ) -> Mapping[str, Tensor]:
            with self._autocast():
                weights = {**parameters, **buffers}
                values: Mapping[str, Tensor] = functional_call(self.wholes[0], weights, (own,))
                return values

        each: Callable[..., Mapping[str, Tensor]] = vmap(forward_one, randomness="error")
        return each(parameters, buffers, batch)


def _stacked(each: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    found = {}
    for name in dict.fromkeys(name for named in each for name in named):
        tensors = [named[name] for named in each if name in named]
        first = tensors[0]
        if _are_shared(tensors, len(each)):
            for tensor in tensors:
                tensor.data = first.data
            continue
        if len(tensors) < len(each) or any((own.shape, own.dtype) != (first.shape, first.dtype) for own in tensors):
            raise CannotStackError(f"their weights differ in shape ({name.removeprefix('model.')})")
        together = _as_laid_out([tensor.detach() for tensor in tensors])
        for own, tensor in zip(together, tensors, strict=True):
            tensor.data = own
        found[name] = together.requires_grad_(first.requires_grad)
    return found


def _are_shared(tensors: Sequence[Tensor], num_members: int) -> bool:
    is_frozen = not any(own.requires_grad or not isinstance(own, nn.Parameter) for own in tensors)
    if num_members == 1 or len(tensors) < num_members or not is_frozen:
        return False
    first = tensors[0]
    return all(own.shape == first.shape and own.dtype == first.dtype and torch.equal(own, first) for own in tensors)


def _as_laid_out(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    if extent != first.numel():  # with gaps, or one number for several
        return torch.stack(list(tensors))
    memory = first.new_empty(len(tensors) * extent)
    together = memory.as_strided((len(tensors), *first.shape), (extent, *first.stride()))
    for own, tensor in zip(together, tensors, strict=True):
        own.copy_(tensor)
    return together


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
