"""The layers around a model: they scale and encode its inputs, and scale its outputs. Saved with its weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import RunnerError, nearest

#: standard deviation for a constant channel
MIN_STD = 1e-6


class ImageInputs(nn.Module):
    """Return (images / 255 - mean) / std for integers, (images - mean) / std for floats, which are between 0 and 1.

    mean, std: Per channel, of the training images between 0 and 1. They are saved with the weights and not trained.
    """

    mean: Tensor
    std: Tensor
    shift: Tensor  # -mean / std
    scale: Tensor  # (2, C, 1, 1): 1 / std, and the same over 255

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        spread = [value if value > MIN_STD else 1.0 for value in std]
        dtype = torch.get_default_dtype()
        self.register_buffer("mean", torch.tensor(list(mean), dtype=dtype)[:, None, None])
        self.register_buffer("std", torch.tensor(spread, dtype=dtype)[:, None, None])
        self.register_buffer("shift", -self.mean / self.std, persistent=False)
        self.register_buffer("scale", torch.stack([1 / self.std, 1 / (255 * self.std)]), persistent=False)
        self.register_load_state_dict_post_hook(_follow)  # type: ignore[no-untyped-call]

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> the same
        # two kernels for four; on a CPU it takes 0.95 of the time, and what follows 0.7
        if images.device.type != "cpu":
            is_bytes = int(not images.is_floating_point())
            return torch.addcmul(self.shift, images.to(self.mean.dtype), self.scale[is_bytes])
        # in place: 0.7 of the time of the same bits (128x3x32x32 on a CPU, 2026-11)
        if images.is_floating_point():
            return (images.to(self.mean.dtype) - self.mean).div_(self.std)
        return images.to(self.mean.dtype).div_(255).sub_(self.mean).div_(self.std)


def _follow(layer: ImageInputs, _: object) -> None:
    layer.shift.copy_(-layer.mean / layer.std)
    layer.scale.copy_(torch.stack([1 / layer.std, 1 / (255 * layer.std)]))


class TableColumns(nn.Module):
    """Scales the numbers of a table and turns its categories into columns.

    First the numbers, (value - mean) / spread, with `fills` for missing ones (NaN); then a 0/1 column per category; then a
    0/1 column per float in `flagged`, 1 if it is missing.

    An unknown (-1), missing or unseen category is all zeros, as its weight would never be trained. The shapes don't depend
    on values, so it can be compiled and exported.

    Args:
        sizes: For each float of a row, 0 for a number, else its number of categories; a category is its index, from 0.
        means, spreads, fills: Of the numbers only, in order.
        seen: Whether each category was in the training data, as 0 or 1, of all columns in order, then the same of
            `flagged`; None: all were.
    """

    number_places: Tensor
    means: Tensor
    spreads: Tensor
    fills: Tensor
    category_places: Tensor
    categories: Tensor
    flagged_places: Tensor
    flagged_seen: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        means: Sequence[float],
        spreads: Sequence[float],
        fills: Sequence[float],
        *,
        flagged: Sequence[int] = (),
        seen: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype()
        numbers = [place for place, size in enumerate(sizes) if not size]
        columns = [place for place, size in enumerate(sizes) for _ in range(size)]
        codes = [float(code) for size in sizes for code in range(size)]
        met = list(seen) if seen is not None else [1] * (len(codes) + len(flagged))
        assert len(numbers) == len(means) == len(spreads) == len(fills)
        assert len(met) == len(codes) + len(flagged)
        # -2 equals no category
        codes = [code if is_met else -2.0 for code, is_met in zip(codes, met, strict=False)]
        self.register_buffer("number_places", torch.tensor(numbers, dtype=torch.int64))
        self.register_buffer("means", torch.tensor(means, dtype=dtype))
        self.register_buffer("spreads", torch.tensor(spreads, dtype=dtype))
        self.register_buffer("fills", torch.tensor(fills, dtype=dtype))
        self.register_buffer("category_places", torch.tensor(columns, dtype=torch.int64))
        self.register_buffer("categories", torch.tensor(codes, dtype=dtype))
        self.register_buffer("flagged_places", torch.tensor(list(flagged), dtype=torch.int64))
        self.register_buffer("flagged_seen", torch.tensor(met[len(codes) :], dtype=dtype))
        self._parts = (bool(numbers), bool(codes), bool(flagged))

    def forward(self, inputs: Tensor) -> Tensor:  # (B, raw floats) -> (B, features)
        has_numbers, has_categories, has_flags = self._parts
        parts = []
        if has_numbers:
            numbers = inputs.index_select(1, self.number_places)
            filled = torch.where(torch.isnan(numbers), self.fills, numbers)
            parts.append((filled - self.means) / self.spreads)
        if has_categories:
            codes = inputs.index_select(1, self.category_places)
            parts.append((codes == self.categories).to(inputs.dtype))
        if has_flags:
            missing = torch.isnan(inputs.index_select(1, self.flagged_places))
            parts.append(missing.to(inputs.dtype) * self.flagged_seen)
        return torch.cat(parts, 1)


class Scaled(nn.Module):
    """Returns outputs * spreads + means, each (T,), of the targets in the training split. Raises: RunnerError for another T.

    output: The index, key or attribute of the scaled output if the model has several, as in `task.output`.
    """

    means: Tensor
    spreads: Tensor

    def __init__(self, means: Sequence[float], spreads: Sequence[float], output: int | str | None = None) -> None:
        super().__init__()
        self.register_buffer("means", torch.tensor(means, dtype=torch.get_default_dtype()))
        self.register_buffer("spreads", torch.tensor(spreads, dtype=torch.get_default_dtype()))
        self.output = output

    def forward(self, outputs: Any) -> Any:
        if isinstance(outputs, Tensor):
            return self._scaled(outputs)
        parts = _tensors(outputs)
        if not parts:  # the task raises an error
            return outputs
        if self.output not in parts:
            names = list(map(str, parts))
            hits = nearest(str(self.output), names) or names[:3]
            problem = f"the model returns a {type(outputs).__name__} of {', '.join(names)}, and `task.output` must name the predictions"
            source = f"task.output={'null' if self.output is None else self.output}"
            raise RunnerError.suggest(source, problem, (f"task.output={hit}" for hit in hits))
        return _with(outputs, self.output, self._scaled(parts[self.output]))

    def _scaled(self, outputs: Tensor) -> Tensor:
        if outputs.dim() > 1 and outputs.shape[-1] != len(self.means):
            problem = f"the model returns {tuple(outputs.shape)}, and the data has {len(self.means)} targets per row"
            raise RunnerError.suggest("model", problem, ["model.out_features='${facts.out_features}'"])
        return outputs * self.spreads + self.means


def _tensors(outputs: Any) -> dict[int | str | None, Tensor]:
    found: dict[Any, Any] = {}
    if isinstance(outputs, Mapping):
        found = dict(outputs)
    elif isinstance(outputs, list | tuple):
        found = {**dict(enumerate(outputs)), **dict(zip(getattr(outputs, "_fields", ()), outputs, strict=False))}
    else:
        found = getattr(outputs, "__dict__", {})
    return {name: part for name, part in found.items() if isinstance(part, Tensor)}


def _with(outputs: Any, name: Any, part: Tensor) -> Any:
    if isinstance(outputs, list | tuple):
        fields = getattr(outputs, "_fields", ())
        place = fields.index(name) if name in fields else name
        parts = [*outputs[:place], part, *outputs[place + 1 :]]
        return type(outputs)(*parts) if fields else type(outputs)(parts)
    changed = copy.copy(outputs)
    if isinstance(outputs, Mapping):
        changed[name] = part
    else:
        setattr(changed, name, part)
    return changed


class Prepared(nn.Module):
    """Returns after(model(before(inputs))): normalized inputs, and outputs in the units of the targets."""

    def __init__(self, model: nn.Module, *, before: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.before = before or nn.Identity()
        self.model = model
        self.after = after or nn.Identity()

    def forward(self, inputs: Any) -> Any:
        return self.after(self.model(self.before(inputs)))
