"""Builds the module that augments training images on the device, from `data.augment`.

    data.augment='{flip: true, crop: 4, cutout: 8}'      or, with the usual strengths,      data.augment='[flip, crop]'

However it is written, the order is that of runner.data.vision.augment_settings.NAMES, mixup last. Everything random comes from `draws`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.data.source import Source
from runner.data.vision.augment_settings import NAMES, shape_problems, strengths_of
from runner.errors import refuse

#: what the eye makes of red, green and blue (ITU-R BT.601)
GREY = (0.299, 0.587, 0.114)


def restored(images: Tensor, dtype: torch.dtype) -> Tensor:
    """In their own type again: whole numbers rounded, and bytes kept in 0..255. Floats stay what they are."""
    if images.dtype == dtype or dtype.is_floating_point:
        return images
    whole = images.round()
    return (whole.clamp(0, 255) if dtype == torch.uint8 else whole).to(dtype)


def flipped(images: Tensor, draw: Tensor, *, probability: float, axis: int) -> Tensor:  # (B, C, H, W)
    """axis: 3 swaps left and right, 2 swaps top and bottom."""
    return torch.where(_a_row(draw < probability), images.flip(axis), images)


def shifted(images: Tensor, down: Tensor, right: Tensor, *, most: int) -> Tensor:  # (B, C, H, W)
    """By -most..most whole pixels each way, zeros coming in: what a crop out of the padded image is."""
    height, width = images.shape[2:]
    rows, columns = _from(down, height, most), _from(right, width, most)  # (B, H), (B, W)
    moved = images.gather(2, rows.clamp(0, height - 1)[:, None, :, None].expand_as(images))
    moved = moved.gather(3, columns.clamp(0, width - 1)[:, None, None, :].expand_as(images))
    inside = _within(rows, height)[:, None, :, None] & _within(columns, width)[:, None, None, :]
    return moved * inside  # by a truth value: bytes stay bytes


def cut_out(images: Tensor, down: Tensor, right: Tensor, *, side: int) -> Tensor:  # (B, C, H, W)
    """A square of zeros around a pixel that is drawn; what lies beyond the border is cut off (DeVries and Taylor 2017)."""
    height, width = images.shape[2:]
    rows, columns = _square(down, height, side), _square(right, width, side)  # (B, H), (B, W)
    return images * ~(rows[:, None, :, None] & columns[:, None, None, :])


def turned(
    images: Tensor, angle: Tensor, zoom: Tensor, *, degrees: float, scale: float
) -> Tensor:  # (B, C, H, W) floats
    """Around the middle by -degrees..degrees, and larger or smaller by up to `scale`; zeros come in, values are blended."""
    height, width = images.shape[2:]
    radians = (angle * 2 - 1) * math.radians(degrees)
    factor = 1 + (zoom * 2 - 1) * scale
    cos, sin = (radians.cos() / factor)[:, None, None], (radians.sin() / factor)[:, None, None]
    x = (torch.arange(width, device=images.device) * 2 + 1 - width)[None, None, :]  # in half pixels from the middle
    y = (torch.arange(height, device=images.device) * 2 + 1 - height)[None, :, None]
    # where each pixel comes from, in -1..1; not affine_grid, whose product of matrices TF32 would round
    grid = torch.stack([(x * cos + y * sin) / width, (y * cos - x * sin) / height], dim=3)  # (B, H, W, 2)
    return F.grid_sample(images, grid.to(images.dtype), align_corners=False)


def brightened(images: Tensor, draw: Tensor, *, most: float) -> Tensor:  # (B, C, H, W) floats
    """Times a factor in 1 - most .. 1 + most."""
    return images * _factor(draw, most)


def contrasted(images: Tensor, draw: Tensor, *, most: float) -> Tensor:  # (B, C, H, W) floats
    """Each value's distance from its image's mean, times a factor in 1 - most .. 1 + most."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + (images - mean) * _factor(draw, most)


def saturated(images: Tensor, draw: Tensor, *, most: float) -> Tensor:  # (B, 3, H, W) floats
    """Each colour's distance from grey, times a factor in 1 - most .. 1 + most."""
    grey = sum(weight * images[:, channel : channel + 1] for channel, weight in enumerate(GREY))
    return grey + (images - grey) * _factor(draw, most)


def mixed_with_neighbour(values: Tensor, share: Tensor) -> Tensor:  # (B, ...) floats, share (B,)
    """share of each row and 1 - share of the row before it in the batch; rows lie in random order there."""
    share = share.to(values.dtype).reshape(-1, *[1] * (values.dim() - 1))
    return share * values + (1 - share) * values.roll(1, 0)


def _a_row(values: Tensor) -> Tensor:  # (B,) -> (B, 1, 1, 1)
    return values[:, None, None, None]


def _factor(draw: Tensor, most: float) -> Tensor:
    return _a_row(1 + (draw * 2 - 1) * most)


def _from(draw: Tensor, length: int, most: int) -> Tensor:
    shift = (draw * (2 * most + 1)).long() - most
    return torch.arange(length, device=draw.device) + shift[:, None]


def _within(places: Tensor, length: int) -> Tensor:
    return (places >= 0) & (places < length)


def _square(draw: Tensor, length: int, side: int) -> Tensor:
    start = (draw * length).long()[:, None] - side // 2
    places = torch.arange(length, device=draw.device)
    return (places >= start) & (places < start + side)


RECOLOURING = {"brightness": brightened, "contrast": contrasted, "saturation": saturated}
#: those that need floats
BLENDING = ("rotate", "scale", *RECOLOURING, "mixup")
#: the quantiles of a row's share in a mixture: between two of them it is a straight line
NUM_QUANTILES = 1024
#: steps of the sum that gives them
FINE = 2**18


class Augment(nn.Module):
    """finish(batch, draws) -> batch, on pairs of images (B, C, H, W), bytes or floats, and targets.

    In eval mode it hands back what it got. Bytes come out as bytes, rounded where values were blended, so that a model
    meets one type of images. mixup makes classes (B,) into shares (B, num_classes), each row's own class the strongest.
    """

    quantiles: Tensor

    def __init__(self, strengths: Mapping[str, float], *, num_classes: int | None) -> None:
        super().__init__()
        self.strengths = {name: strengths[name] for name in NAMES if strengths.get(name)}  # 0 is as good as absent
        self.num_draws = sum(NAMES[name].num_draws for name in self.strengths)
        self.num_classes = num_classes
        if "mixup" in self.strengths:
            # no buffer: what lies in a finish's buffers is data, and counts in its fingerprint
            self.quantiles = nn.Parameter(_quantiles(self.strengths["mixup"]), requires_grad=False)

    def forward(self, batch: Any, draws: Tensor) -> Any:  # draws (B, num_draws)
        if not self.training or not self.strengths:
            return batch
        images, targets, *others = batch
        draw = self._by_name(draws)
        changed = self._recoloured(self._moved(images, draw, dtype=images.dtype), draw)
        if "cutout" in draw:
            changed = cut_out(changed, *draw["cutout"], side=int(self.strengths["cutout"]))
        if "mixup" in draw:
            share = self._share(*draw["mixup"])
            changed = mixed_with_neighbour(changed, share)
            targets = mixed_with_neighbour(self._shares(targets), share)
        return (restored(changed, images.dtype), targets, *others)

    def _by_name(self, draws: Tensor) -> dict[str, list[Tensor]]:
        columns = iter(draws.unbind(1))
        return {name: [next(columns) for _ in range(NAMES[name].num_draws)] for name in self.strengths}

    def _moved(self, images: Tensor, draw: Mapping[str, list[Tensor]], *, dtype: torch.dtype) -> Tensor:
        """Floats where something that follows blends values, else what they were."""
        strength = self.strengths
        for name, axis in (("flip", 3), ("vertical_flip", 2)):
            if name in draw:
                images = flipped(images, *draw[name], probability=strength[name], axis=axis)
        if "crop" in draw:
            images = shifted(images, *draw["crop"], most=int(strength["crop"]))
        if any(name in draw for name in BLENDING) and not dtype.is_floating_point:
            images = images.float()
        if "rotate" in draw or "scale" in draw:
            middle = [torch.full_like(next(iter(draw.values()))[0], 0.5)]  # neither turned nor scaled
            degrees, scale = strength.get("rotate", 0.0), strength.get("scale", 0.0)
            angle, zoom = draw.get("rotate", middle)[0], draw.get("scale", middle)[0]
            images = turned(images, angle, zoom, degrees=degrees, scale=scale)
        return images

    def _recoloured(self, images: Tensor, draw: Mapping[str, list[Tensor]]) -> Tensor:
        for name, recolour in RECOLOURING.items():
            if name in draw:
                images = recolour(images, *draw[name], most=self.strengths[name])
        return images

    def _share(self, draw: Tensor) -> Tensor:  # (B,) -> (B,) in 0.5..1
        place = draw * NUM_QUANTILES
        index = place.long()
        low, high = self.quantiles[index], self.quantiles[index + 1]
        return torch.lerp(low, high, place - index)

    def _shares(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point() or self.num_classes is None:
            return targets.float()
        # not one_hot, which reads the device
        return (targets[:, None] == torch.arange(self.num_classes, device=targets.device)).float()


def augmented(source: Source, asked: Any) -> Source:
    """The source with `data.augment` as its finish; the same object where nothing is asked for.

    asked: a mapping of names and strengths, a list of names, or None.
    Raises: RunnerError for names and strengths that are none, all at once, and for inputs that are no images.
    """
    strengths = strengths_of(asked)
    if not strengths:
        return source
    shape = source.facts.get("input_shape") or ()
    problems = shape_problems(strengths, shape)
    refuse(problems)
    return replace(source, finish=Augment(strengths, num_classes=source.facts.get("num_classes")))


def _quantiles(alpha: float) -> Tensor:
    """(NUM_QUANTILES + 1,) float32: of the larger share of a mixture, where shares are Beta(alpha, alpha).

    Beta's density is infinite at 1 for an alpha below 1; over (1 - share) ** alpha it is not, and a plain sum is enough.
    """
    place = torch.linspace(0.5**alpha, 0, FINE, dtype=torch.float64)
    share = 1 - place ** (1 / alpha)  # 0.5 .. 1
    density = share ** (alpha - 1)
    below = torch.cat([torch.zeros(1, dtype=torch.float64), (density[1:] + density[:-1]).cumsum(0)])
    wanted = torch.linspace(0, 1, NUM_QUANTILES + 1, dtype=torch.float64) * below[-1]
    return share[torch.searchsorted(below, wanted).clamp(max=FINE - 1)].float()
