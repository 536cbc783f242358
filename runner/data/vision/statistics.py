"""Computes the mean and the standard deviation of images' channels, for the layer that normalises them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.map_style import batch_of
from runner.data.source import Preprocessing
from runner.device.placement import num_rows

#: of a Dataset so many rows are read, evenly spread: enough for four digits, and decoding more takes as long as training
MOST_ROWS = 16_384
#: rows read at a time
BLOCK = 64
NORMALISED = "runner.models.ImageInputs"


def normalised(rows: Any) -> Preprocessing:
    """The node that takes the rows' images to a mean of 0 and a spread of 1, for `Source.around`.

    rows: (images (N, C, H, W) uint8, ...) or a Dataset of such; of a Dataset at most 16,384 rows are read, here.
    """
    mean, std = channel_statistics(rows)
    return Preprocessing(before={"_target_": NORMALISED, "mean": mean, "std": std})


def channel_statistics(rows: Any) -> tuple[list[float], list[float]]:
    """By channel, of values in 0..1: from counts of bytes, so that they do not depend on how the rows are read."""
    counts: Tensor | None = None
    for images in _images(rows):  # (B, C, H, W)
        # (C, 256)
        some = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])
        counts = some if counts is None else counts + some
    assert counts is not None  # a training split has rows
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.sum(1, keepdim=True)
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(1)
    return mean.tolist(), variance.sqrt().tolist()


def _images(rows: Any) -> Iterator[Tensor]:
    if not isinstance(rows, Dataset):
        images = rows[0]
        yield from (images[start : start + 1024] for start in range(0, num_rows(rows), 1024))
        return
    count = len(rows)  # type: ignore[arg-type]
    chosen = torch.linspace(0, count - 1, min(count, MOST_ROWS), dtype=torch.float64).round().long().tolist()
    several = getattr(rows, "__getitems__", None)
    for start in range(0, len(chosen), BLOCK):
        part = chosen[start : start + BLOCK]
        yield batch_of(rows, several(part) if several else [rows[index] for index in part])[0]
