"""Augments batches of images on the device, each row by random numbers of its own.

Everything here is arithmetic on whole batches: no loop over rows, nothing read from the device, nothing else random.
`draws` are (B,) float32 in [0, 1), one tensor for each number that a row needs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

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
