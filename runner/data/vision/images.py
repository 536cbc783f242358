"""Makes a Source of a directory with a directory of images per class (`data=images`); reads images for predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.checks import choice
from runner.data.map_style import batch_of
from runner.data.source import Preprocessing, Source
from runner.data.vision.augment import augmented
from runner.data.vision.dataset import (
    CHANNELS,
    ImageFiles,
    check_same,
    checked_size,
    decoded_at_once,
    each,
    fingerprint_of,
    first_size,
    is_decoded_once,
    size_of,
)
from runner.data.vision.folders import find_splits, image_files
from runner.errors import RunnerError, nearest

#: examples of a Dataset whose statistics are computed, evenly spread: enough for four digits; and how many at a time
MOST_ROWS, STATISTICS_ROWS = 16_384, 64
READER, NORMALISED = "runner.data.read_images", "runner.models.ImageInputs"
#: images that a prediction reads at a time
BLOCK = 1024


def images(
    path: str,
    *,
    size: int | Sequence[int] | None = None,
    mode: str = "rgb",
    decode: str = "auto",
    augment: Mapping[str, Any] | Sequence[Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Source:
    """Return images (C, H, W) uint8 and the classes of their directories, sorted by name.

    Args:
        path: `path/CLASS/...`, or `path/train/CLASS/...` with `path/val` and `path/test` as the other splits; directories
            below a class belong to it.
        size: The side of a square or [height, width], which each scaled image fills, cut from the middle; None if all
            images have one size.
        mode: rgb or gray.
        decode: once (into memory, by threads), workers (batch by batch), or auto (once if that takes at most a quarter of
            the free memory).
        augment: See runner.data.vision.augment.
        like: The reader of an earlier run, whose size, mode and classes hold.

    Raises:
        RunnerError: Files can't be read, with all names, or sizes differ. Without decode=once only headers are read here.
    """
    known = dict(like or {})
    mode = choice(known.get("mode", mode), CHANNELS, key="data.mode")
    sides = checked_size(known.get("size", size))
    found, classes = find_splits(path, classes=known.get("classes", ()))
    files = [file for part in found.values() for file in part.files]
    names = [str(file.relative_to(Path(path).expanduser())) for file in files]
    setting = f"data.path={path}"
    num_bytes = len(files) * CHANNELS[mode] * math.prod(sides or first_size(files))
    once, reason = is_decoded_once(decode, num_bytes=num_bytes)
    rows: dict[str, Any]
    if once:
        pixels = decoded_at_once(files, names, mode=mode, size=sides, asked=setting)
        shape = list(pixels.shape[1:])
        parts = zip(found, pixels.split([len(part.files) for part in found.values()]), strict=True)
        rows = {name: (some, found[name].labels) for name, some in parts}
    else:
        sizes = each(range(len(files)), lambda index: size_of(files[index]), names=names, asked=setting)
        sides = sides or check_same(sizes, names=names, asked=setting)
        shape = [CHANNELS[mode], *sides]
        read = partial(ImageFiles, classes=classes, size=sides, mode=mode)
        rows = {name: read(part.files, part.labels, root=part.root) for name, part in found.items()}
    facts = {"input_shape": shape, "in_features": math.prod(shape)}
    source = Source(
        Path(path).name,
        rows.pop("train"),
        facts | {"num_classes": len(classes), "out_features": len(classes)},
        labels=found["train"].labels,
        given=rows,
        origin=f"{path}: {len(files):,} images, {reason}",
        classes=classes,
        around=normalised,
        told=f"{shape} {' '.join(fingerprint_of(part.files, part.root) for part in found.values())}",
        reader={"_target_": READER, "_partial_": True, "size": shape[1:], "mode": mode, "classes": list(classes)},
    )
    return augmented(source, augment)


def normalised(rows: Any) -> Preprocessing:
    """Return the layer that takes images to a mean of 0 and a standard deviation of 1.

    Args:
        rows: The training split: (images (N, C, H, W) uint8, ...), or a Dataset of such, of which 16,384 examples are read.
    """
    mean, std = channel_statistics(rows)
    return Preprocessing(before={"_target_": NORMALISED, "mean": mean, "std": std})


def channel_statistics(rows: Any) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation by channel, of values in 0..1.

    Computed from counts of bytes, so that they do not depend on how the rows are read.
    """
    counts = torch.zeros((), dtype=torch.int64)
    for some in _image_batches(rows):  # (B, C, H, W)
        counts = counts + torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in some.unbind(1)])
    values = torch.arange(256, dtype=torch.float64) / 255
    share = counts.double() / counts.sum(1, keepdim=True)  # (C, 256)
    mean = share @ values
    variance = (share * (values - mean[:, None]) ** 2).sum(1)
    return mean.tolist(), variance.sqrt().tolist()


def _image_batches(rows: Any) -> Iterator[Tensor]:
    if not isinstance(rows, Dataset):
        yield from rows[0].split(1024)
        return
    count = len(rows)  # type: ignore[arg-type]
    chosen = torch.linspace(0, count - 1, min(count, MOST_ROWS), dtype=torch.float64).round().long()
    several = getattr(rows, "__getitems__", None)
    for part in chosen.split(STATISTICS_ROWS):
        indices = part.tolist()
        yield batch_of(rows, several(indices) if several else [rows[index] for index in indices])[0]


def read_images(
    path: str | Path | Sequence[str | Path], *, size: Sequence[int], mode: str, classes: Sequence[str] = ()
) -> Iterator[Tensor]:
    """Return the images as uint8 (n, C, H, W), block by block.

    Args:
        path: A directory, whose images are read in the order of their paths, inner directories too; an image; a text file
            with the path of an image in each line; or a list of paths.
        size: (H, W).
        classes: The run's; unused.

    Raises:
        RunnerError: The path has no images, or images of a block can't be read, with all their names.
    """
    files, sides = named_images(path), checked_size(list(size))
    mode = choice(mode, CHANNELS, key="data.mode")

    def read(part: list[Path]) -> Tensor:
        return decoded_at_once(part, [str(file) for file in part], mode=mode, size=sides, asked=f"the images {path}")

    return (read(files[start : start + BLOCK]) for start in range(0, len(files), BLOCK))


def named_images(path: Any) -> list[Path]:
    """Return the files of `path`, in the order of the rows. Raises: RunnerError if there is not one."""
    if isinstance(path, Sequence) and not isinstance(path, str):
        files = [Path(item).expanduser() for item in path]
    else:
        root = Path(path).expanduser()
        if root.is_dir():
            files = list(image_files(root))
        elif root.suffix == ".txt" and root.is_file():
            files = [root.parent / line.strip() for line in root.read_text().splitlines() if line.strip()]
        else:
            files = [root]
    if missing := [file for file in files if not file.is_file()]:
        there = [item.name for item in missing[0].parent.iterdir()] if missing[0].parent.is_dir() else []
        hits = " or ".join(f"`{missing[0].parent / hit}`" for hit in nearest(missing[0].name, there))
        problem = f"{len(missing):,} of {len(files):,} files don't exist, e.g., `{missing[0]}`"
        fix = f"use {hits or 'a directory of images, an image or a list of images'}"
        raise RunnerError.of(f"the images {path}", problem, fix)
    if not files:
        raise RunnerError.of(f"the images {path}", f"there are no images in `{path}`", "use a directory with images")
    return files
