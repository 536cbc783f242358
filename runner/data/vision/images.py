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
from runner.data.vision.folders import found_splits, image_files
from runner.device.placement import num_rows
from runner.errors import RunnerError, nearest

#: rows of a Dataset that are read, evenly spread: enough for four digits
MOST_ROWS = 16_384
#: rows read at a time
STATISTICS_ROWS = 64
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
    for start in range(0, len(chosen), STATISTICS_ROWS):
        part = chosen[start : start + STATISTICS_ROWS]
        yield batch_of(rows, several(part) if several else [rows[index] for index in part])[0]


#: images in a block, where all of them do not fit into memory
BLOCK = 1024


def read_images(
    path: str | Path | Sequence[str | Path], *, size: Sequence[int], mode: str, classes: Sequence[str] = ()
) -> Tensor | Iterator[Tensor]:
    """The images as uint8 (N, C, H, W), or blocks of them where all together are too big for memory.

    path: a folder, whose images are read in the order of their paths, inner folders too; one image; a text file with the
    path of an image in each line; or a list of paths. size: (H, W). classes: the run's, which nothing here needs.
    Raises: RunnerError for a path that leads to no images, and for images that can't be read, all of them at once.
    """
    files = named_images(path)
    sides, mode = checked_size(list(size)), choice(mode, CHANNELS, key="data.mode")
    assert sides is not None
    once, _ = is_decoded_once("auto", num_bytes=len(files) * CHANNELS[mode] * sides[0] * sides[1])

    def read(part: list[Path]) -> Tensor:
        return decoded_at_once(part, [str(file) for file in part], mode=mode, size=sides, asked=f"the images {path}")

    if once:
        return read(files)
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


READER = "runner.data.read_images"


def images(
    path: str,
    *,
    size: int | Sequence[int] | None = None,
    mode: str = "rgb",
    decode: str = "auto",
    augment: Mapping[str, Any] | Sequence[Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Source:
    """Images (C, H, W) uint8 and the classes that their folders name, in the folders' sorted order.

    path: `path/CLASS/...`, or `path/train/CLASS/...` beside `path/val` and `path/test`, which are splits of their own
    then; folders below a class belong to it. size: the side of a square or [height, width], which each image is scaled to
    fill and cut to from its middle; None where all share one. mode: rgb or gray. decode: once (into memory, by threads),
    workers (by those that read the batches), auto (once, where that takes a quarter of the free memory at most).
    augment: see runner.data.vision.augment. like: the reader of an earlier run, whose size, mode and classes hold.
    The fingerprint is of the files' names and sizes, however they are decoded.
    With decode=once every file is read here, else its header: what is broken behind it is told when it is read.
    Raises: RunnerError that tells all files that can't be read, and for sizes that differ.
    """
    known = dict(like or {})
    mode = choice(known.get("mode", mode), CHANNELS, key="data.mode")
    sides = checked_size(known.get("size", size))
    found, classes = found_splits(path, classes=known.get("classes", ()))
    files = [file for part in found.values() for file in part.files]
    names = [str(file.relative_to(Path(path).expanduser())) for file in files]
    asked = f"data.path={path}"
    num_bytes = len(files) * CHANNELS[mode] * math.prod(sides or first_size(files))
    once, reason = is_decoded_once(decode, num_bytes=num_bytes)
    if once:
        pixels = decoded_at_once(files, names, mode=mode, size=sides, asked=asked)
        shape = list(pixels.shape[1:])
        prints = [fingerprint_of(part.files, part.root) for part in found.values()]
        split_pixels = pixels.split([len(part.files) for part in found.values()])
        rows: dict[str, Any] = {
            name: (some, part.labels) for (name, part), some in zip(found.items(), split_pixels, strict=True)
        }
    else:
        sizes = each(range(len(files)), lambda index: size_of(files[index]), names=names, asked=asked)
        sides = sides or check_same(sizes, names=names, asked=asked)
        shape = [CHANNELS[mode], *sides]
        read = partial(ImageFiles, classes=classes, size=sides, mode=mode)
        streamed = {name: read(part.files, part.labels, root=part.root) for name, part in found.items()}
        prints = [part.fingerprint for part in streamed.values()]
        rows = dict(streamed)
    source = Source(
        Path(path).name,
        rows.pop("train"),
        {
            "input_shape": shape,
            "in_features": math.prod(shape),
            "num_classes": len(classes),
            "out_features": len(classes),
        },
        labels=found["train"].labels,
        given=rows,
        origin=f"{path}: {len(files):,} images, {reason}",
        classes=classes,
        around=normalised,
        told=f"{shape} {' '.join(prints)}",
        reader={"_target_": READER, "_partial_": True, "size": shape[1:], "mode": mode, "classes": list(classes)},
    )
    return augmented(source, augment)
