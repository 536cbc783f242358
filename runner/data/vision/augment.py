"""Augments training images on the device, as `data.augment` says.

    data.augment='{flip: true, crop: 4, cutout: 8}'      or, with the usual strengths,      data.augment='[flip, crop]'

The order is that of NAMES, mixup last. All that is random comes from `draws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Check
from runner.data.source import Source
from runner.errors import Problem, nearest, refuse


@dataclass(frozen=True)
class Augmentation:
    num_draws: int
    usual: float  # the strength of `true`, and of a name without one
    valid: str
    check: Callable[[float], bool]


def _is_fraction(value: float) -> bool:
    return 0 <= value < 1


def _is_whole(value: float) -> bool:
    return value >= 0 and float(value).is_integer()


FACTOR = "the largest difference of the factor from 1, 0 or more and less than 1"
#: in the order in which they are done
NAMES: dict[str, Augmentation] = {
    "flip": Augmentation(
        1, 0.5, "the probability that left and right are swapped, 0 to 1", lambda value: 0 <= value <= 1
    ),
    "vertical_flip": Augmentation(
        1, 0.5, "the probability that top and bottom are swapped, 0 to 1", lambda value: 0 <= value <= 1
    ),
    "crop": Augmentation(2, 4, "the maximum shift of an image, in whole pixels", _is_whole),
    "rotate": Augmentation(1, 10, "the maximum angle in degrees, 0 to 180", lambda value: 0 <= value <= 180),
    "scale": Augmentation(1, 0.1, FACTOR, _is_fraction),
    "brightness": Augmentation(1, 0.2, FACTOR, _is_fraction),
    "contrast": Augmentation(1, 0.2, FACTOR, _is_fraction),
    "saturation": Augmentation(1, 0.2, FACTOR, _is_fraction),
    "cutout": Augmentation(2, 8, "the side of the square that is set to 0, in whole pixels", _is_whole),
    "mixup": Augmentation(1, 0.2, "the alpha of a Beta distribution, 0 to 10", lambda value: 0 <= value <= 10),
}


def strengths_of(setting: Any) -> dict[str, float]:
    """Return the strengths by name."""
    return {name: float(NAMES[name].usual if value is True else value) for name, value in _pairs(setting).items()}


def _problems(setting: Any) -> list[Problem]:
    if isinstance(setting, str) or not isinstance(setting, Mapping | Sequence):
        problem = "`data.augment` must be a list of names, or names with strengths"
        ways = [f"data.augment=[{setting if setting in NAMES else 'flip,crop'}]", "data.augment={flip:true,crop:4}"]
        return [Problem.suggest(f"data.augment={setting}", problem, ways)]
    pairs, problems = _pairs(setting), []
    valid = {name: value for name, value in pairs.items() if name in NAMES and _is_valid(name, value)}
    for name, value in pairs.items():
        if name in valid:
            continue
        hits = [name] if name in NAMES else nearest(str(name), NAMES, cutoff=0.5)  # cutmix: mixup or cutout
        ways = [written({**valid, hit: NAMES[hit].usual}) for hit in hits] or [written(valid)]
        problem = f"there is no augmentation `{name}`; there are {', '.join(NAMES)}"
        problem = f"`data.augment.{name}` must be {NAMES[name].valid}" if name in NAMES else problem
        problems.append(Problem.suggest(f"data.augment.{name}={value}", problem, ways))
    return problems


#: the setting `data.augment`
Augmentations = Annotated[
    Mapping[str, Any] | Sequence[Any] | None, Check(lambda value: not _problems(value), "", "", explain=_problems)
]


def _is_valid(name: str, value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, int | float) and NAMES[name].check(value))


def written(strengths: Mapping[str, Any]) -> str:
    """Return augmentations as an override."""
    pairs = [f"{name}:{value if isinstance(value, bool) else f'{value:g}'}" for name, value in strengths.items()]
    return f"data.augment={{{','.join(pairs).lower()}}}" if pairs else "data.augment=[flip,crop]"


def _pairs(setting: Any) -> dict[Any, Any]:
    if isinstance(setting, Mapping | None):
        return {name: value for name, value in (setting or {}).items() if value is not None}
    pairs: dict[Any, Any] = {}
    for item in setting:
        pairs |= item if isinstance(item, Mapping) else {str(item): True}
    return pairs


def shape_problems(strengths: Mapping[str, float], shape: Sequence[int]) -> list[Problem]:
    """Return why images of this shape, (C, H, W), can't be augmented so."""
    if len(shape) != 3:
        problem = f"the inputs have the shape {tuple(shape)}, and images are (channels, height, width)"
        setting = f"data.augment={{{','.join(strengths)}}}"
        return [Problem(setting, problem, "use `data.augment=null`, or images as inputs")]
    channels, side = shape[0], min(shape[1:])
    most = {"crop": side, "cutout": side, "saturation": 1 if channels == 3 else 0}
    reasons = dict.fromkeys(most, f"the images have a side of {side} pixels")
    reasons["saturation"] = f"a saturation needs red, green and blue, and the channels of the images are {channels}"
    return [
        Problem.suggest(
            f"data.augment.{name}={strengths[name]:g}",
            reasons[name],
            [written({**strengths, name: min(limit, max(1, limit // 4))})],
        )
        for name, limit in most.items()
        if strengths.get(name, 0) > limit
    ]


#: the brightness of red, green and blue (ITU-R BT.601)
GREY = (0.299, 0.587, 0.114)


def restored(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images in their own type: integers rounded, and bytes in 0..255."""
    if images.dtype == dtype or dtype.is_floating_point:
        return images
    whole = images.round()
    return (whole.clamp(0, 255) if dtype == torch.uint8 else whole).to(dtype)


def shifted(images: Tensor, down: Tensor, right: Tensor, *, most: int) -> Tensor:  # (B, C, H, W)
    """Move by -most..most whole pixels each way; zeros come in, as in a crop of the padded image."""
    height, width = images.shape[2:]
    rows, columns = _from(down, height, most), _from(right, width, most)  # (B, H), (B, W)
    moved = images.gather(2, rows.clamp(0, height - 1)[:, None, :, None].expand_as(images))
    moved = moved.gather(3, columns.clamp(0, width - 1)[:, None, None, :].expand_as(images))
    inside = _within(rows, height)[:, None, :, None] & _within(columns, width)[:, None, None, :]
    return moved * inside  # a boolean factor: bytes stay bytes


def cut_out(images: Tensor, down: Tensor, right: Tensor, *, side: int) -> Tensor:  # (B, C, H, W)
    """Set a square around a random pixel to zero; it may reach over the border (DeVries and Taylor 2017)."""
    height, width = images.shape[2:]
    rows, columns = _square(down, height, side), _square(right, width, side)  # (B, H), (B, W)
    return images * ~(rows[:, None, :, None] & columns[:, None, None, :])


def turned(images: Tensor, angle: Tensor, zoom: Tensor, *, degrees: float, scale: float) -> Tensor:
    """Turn (B, C, H, W) floats by -degrees..degrees, and scale them by 1 - scale..1 + scale; zeros come in."""
    height, width = images.shape[2:]
    radians = (angle * 2 - 1) * math.radians(degrees)
    factor = 1 + (zoom * 2 - 1) * scale
    cos, sin = (radians.cos() / factor)[:, None, None], (radians.sin() / factor)[:, None, None]
    x = (torch.arange(width, device=images.device) * 2 + 1 - width)[None, None, :]  # in half pixels from the middle
    y = (torch.arange(height, device=images.device) * 2 + 1 - height)[None, :, None]
    # the source of each pixel, in -1..1; not affine_grid, whose matrix product TF32 would round
    grid = torch.stack([(x * cos + y * sin) / width, (y * cos - x * sin) / height], dim=3)  # (B, H, W, 2)
    return F.grid_sample(images, grid.to(images.dtype), align_corners=False)


def brightened(images: Tensor, factor: Tensor) -> Tensor:  # (B, C, H, W) floats, (B, 1, 1, 1)
    return images * factor


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * factor


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    grey = sum(weight * images[:, channel : channel + 1] for channel, weight in enumerate(GREY))
    return grey + (images - grey) * factor


def mixed_with_neighbor(values: Tensor, share: Tensor) -> Tensor:  # (B, ...) floats, share (B,)
    """Mix each row with the row before it in the batch, whose order is random."""
    share = share.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
    return share * values + (1 - share) * values.roll(1, 0)


def _from(draw: Tensor, length: int, most: int) -> Tensor:
    shift = (draw * (2 * most + 1)).long() - most
    return torch.arange(length, device=draw.device) + shift[:, None]


def _within(positions: Tensor, length: int) -> Tensor:
    return (positions >= 0) & (positions < length)


def _square(draw: Tensor, length: int, side: int) -> Tensor:
    start = (draw * length).long()[:, None] - side // 2
    positions = torch.arange(length, device=draw.device)
    return (positions >= start) & (positions < start + side)


COLORS = {"brightness": brightened, "contrast": contrasted, "saturation": saturated}
#: augmentations that need floats
BLENDING = ("rotate", "scale", *COLORS, "mixup")
#: quantiles of mixup's shares, with straight lines between them; and steps of the sum that they are computed by
NUM_QUANTILES, FINE = 1024, 2**18


class Augment(nn.Module):
    """The batch transform augment(batch, draws) -> batch of images (B, C, H, W), bytes or floats, and targets.

    In eval mode it returns the batch itself. Bytes stay bytes, so that a model gets one type of images. mixup makes
    classes (B,) into shares (B, num_classes), in which each row's own class is the largest.
    """

    quantiles: Tensor

    def __init__(self, strengths: Mapping[str, float], *, num_classes: int | None) -> None:
        super().__init__()
        self.strengths = {name: strengths[name] for name in NAMES if strengths.get(name)}
        self.num_draws = sum(NAMES[name].num_draws for name in self.strengths)
        self.num_classes = num_classes
        if "mixup" in self.strengths:
            # not a buffer: the buffers of a batch transform are data, and count in the fingerprint
            self.quantiles = nn.Parameter(_quantiles(self.strengths["mixup"]), requires_grad=False)

    def forward(self, batch: Any, draws: Tensor) -> Any:  # draws (B, num_draws)
        if not self.training or not self.strengths:
            return batch
        images, targets, *others = batch
        columns = iter(draws.unbind(1))
        draw = {name: [next(columns) for _ in range(NAMES[name].num_draws)] for name in self.strengths}
        changed = self._moved(images, draw)
        for name, recolor in COLORS.items():
            if name in draw:
                changed = recolor(changed, (1 + (draw[name][0] * 2 - 1) * self.strengths[name])[:, None, None, None])
        if "cutout" in draw:
            changed = cut_out(changed, *draw["cutout"], side=int(self.strengths["cutout"]))
        if "mixup" in draw:
            share = self._share(*draw["mixup"])
            changed = mixed_with_neighbor(changed, share)
            targets = mixed_with_neighbor(self._class_shares(targets), share)
        return (restored(changed, images.dtype), targets, *others)

    def _moved(self, images: Tensor, draw: Mapping[str, list[Tensor]]) -> Tensor:
        strength = self.strengths
        for name, axis in (("flip", 3), ("vertical_flip", 2)):
            if name in draw:
                is_flipped = (draw[name][0] < strength[name])[:, None, None, None]
                images = torch.where(is_flipped, images.flip(axis), images)
        if "crop" in draw:
            images = shifted(images, *draw["crop"], most=int(strength["crop"]))
        if any(name in draw for name in BLENDING) and not images.is_floating_point():
            images = images.float()
        if "rotate" in draw or "scale" in draw:
            middle = [torch.full_like(next(iter(draw.values()))[0], 0.5)]  # neither turned nor scaled
            angle, zoom = draw.get("rotate", middle)[0], draw.get("scale", middle)[0]
            limits = {"degrees": strength.get("rotate", 0.0), "scale": strength.get("scale", 0.0)}
            images = turned(images, angle, zoom, **limits)
        return images

    def _share(self, draw: Tensor) -> Tensor:  # (B,) -> (B,) in 0.5..1
        position = draw * NUM_QUANTILES
        index = position.long()
        return torch.lerp(self.quantiles[index], self.quantiles[index + 1], position - index)

    def _class_shares(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or self.num_classes is None:
            return targets.float()
        # not one_hot, which reads the device
        return (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).float()


def augmented(source: Source, setting: Any) -> Source:
    """Return the source with a valid `data.augment` as its batch transform. Raises: RunnerError for other rows than images."""
    strengths = strengths_of(setting)
    if not strengths:
        return source
    refuse(shape_problems(strengths, source.facts.get("input_shape") or ()))
    return replace(source, finish=Augment(strengths, num_classes=source.facts.get("num_classes")))


def _quantiles(alpha: float) -> Tensor:
    """Return (NUM_QUANTILES + 1,) float32, the quantiles of the larger share, if shares are Beta(alpha, alpha).

    Beta's density is infinite at 1 for an alpha below 1. As a function of (1 - share) ** alpha it is finite, so that a sum
    is enough.
    """
    below_one = torch.linspace(0.5**alpha, 0, FINE, dtype=torch.float64)
    share = 1 - below_one ** (1 / alpha)  # 0.5 .. 1
    density = share ** (alpha - 1)
    cumulated = torch.cat([torch.zeros(1, dtype=torch.float64), (density[1:] + density[:-1]).cumsum(0)])
    wanted = torch.linspace(0, 1, NUM_QUANTILES + 1, dtype=torch.float64) * cumulated[-1]
    return share[torch.searchsorted(cumulated, wanted).clamp(max=FINE - 1)].float()
