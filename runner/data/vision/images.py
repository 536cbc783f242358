"""Makes a Source of a folder with a folder of images per class: bytes that the model normalises. `data=images`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from runner.config.checks import choice
from runner.data.source import Source
from runner.data.vision.augment import augmented
from runner.data.vision.dataset import (
    ImageFiles,
    check_same,
    decoded_at_once,
    each,
    fingerprint_of,
    first_size,
    is_decoded_once,
)
from runner.data.vision.decode import CHANNELS, checked_size, size_of
from runner.data.vision.folders import found_splits
from runner.data.vision.statistics import normalised

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
