"""Makes a Source of a directory with a directory of images per class (`data=images`); reads images for predictions."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.conversion import batch_of
from runner.data.source import Preprocessing, Source
from runner.data.vision.augment import Augmentations, augmented
from runner.data.vision.dataset import (
    CHANNELS,
    Decode,
    ImageFiles,
    Mode,
    Size,
    decoded_at_once,
    fingerprint_of,
    first_size,
    is_decoded_once,
    same_size,
    sides_of,
)
from runner.errors import RunnerError, nearest

ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
#: directory names of splits
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
MAX_NAMED = 5


@dataclass(frozen=True)
class SplitFiles:
    """The images of one split."""

    root: Path
    files: list[Path]  # by class, then by name
    labels: Tensor  # (N,) int64


def find_splits(path: str, *, classes: Sequence[str] = ()) -> tuple[dict[str, SplitFiles], tuple[str, ...]]:
    """Return {"train": ..., maybe "val" and "test"}, and the classes: the sorted names of the directories.

    Raises:
        RunnerError: The classes have no images, or there is a single class, or one that the training split lacks.
    """
    root = Path(path).expanduser()
    parts = _ready_splits(_directories(root, path), path) or {"train": root}
    names = tuple(classes) or tuple(item.name for item in _directories(parts["train"], path))
    found = {name: _by_class(part, names, path, is_train=name == "train") for name, part in parts.items()}
    if len(names) == 1 and not classes:
        only, count = parts["train"] / names[0], len(found["train"].files)
        inner = [item.name for item in _directories(only, path)]
        problem = f"`{only.parent}` has one directory, `{only.name}`, so all {count:,} images have one class"
        problem += f"; it contains {', '.join(inner[:MAX_NAMED])}" if inner else ""
        ways = [f"data.path={only}"] * (len(inner) > 1 and len(found) == 1)
        raise RunnerError.suggest(
            f"data.path={path}", problem, ways, f"add a directory for each class next to `{only}`"
        )
    return found, names


def _ready_splits(directories: Sequence[Path], path: str) -> dict[str, Path]:
    """Return the directories with names of splits; {} if they are classes, since a class may be called train, too."""
    by_split = {name: [item for item in directories if item.name in SPLITS[name]] for name in SPLITS}
    splits = [item for some in by_split.values() for item in some]
    if not by_split["train"] or (len(splits) == 1 and len(directories) > 1):
        return {}
    others = [item for item in directories if item not in splits]
    others += [item for some in by_split.values() for item in some[1:]]
    if others:
        names, more = (", ".join(item.name for item in some[:MAX_NAMED]) for some in (splits, others))
        problem = f"{names} have the names of splits, and {more} can't be one next to them"
        fix = f"move `{others[0].name}` elsewhere, or rename the directories if they are classes"
        raise RunnerError.of(f"data.path={path}", problem, fix)
    return {name: some[0] for name, some in by_split.items() if some}


def image_files(directory: Path) -> Iterator[Path]:
    """Yield all images below a directory, by path, without hidden ones; each directory once."""
    seen = set()
    for here, inner, names in os.walk(directory, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:  # a link that leads back
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(here) / name for name in sorted(names) if _is_image(name))


def _by_class(directory: Path, names: Sequence[str], path: str, *, is_train: bool) -> SplitFiles:
    setting, number = f"data.path={path}", {name: index for index, name in enumerate(names)}
    inner = _directories(directory, path)
    if unknown := [item.name for item in inner if item.name not in number]:
        problem = f"`{directory}` has classes that the training split lacks: {', '.join(unknown[:MAX_NAMED])}"
        raise RunnerError.of(setting, problem, "use the same classes in each split")
    if loose := [item.name for item in sorted(directory.iterdir()) if item.is_file() and _is_image(item.name)]:
        problem = f"{len(loose):,} images (such as `{loose[0]}`) are in `{directory}` and not in a class's directory"
        fix = f"move each into its class's directory, e.g., `{directory}/CLASS/{loose[0]}`"
        raise RunnerError.of(setting, problem, fix)
    by_class = {item.name: list(image_files(item)) for item in inner}
    empty = [name for name, files in by_class.items() if not files]
    if len(empty) == len(by_class) or (is_train and empty):
        where = ", ".join(empty[:MAX_NAMED]) or directory
        problem = f"{where} has no images (files that end in {', '.join(ENDINGS)})"
        fix = f"put images into `{directory}/CLASS/`, or remove the empty directories"
        raise RunnerError.of(setting, problem, fix)
    files = [file for some in by_class.values() for file in some]
    labels = [number[name] for name, some in by_class.items() for _ in some]
    return SplitFiles(directory, files, torch.tensor(labels))


def _directories(root: Path, path: str) -> list[Path]:
    if root.is_dir():
        return sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))
    parent = root.parent
    there = sorted(item.name for item in parent.iterdir() if item.is_dir()) if parent.is_dir() else []
    ways = [f"data.path={parent / hit}" for hit in nearest(root.name, there) or there]
    problem = f"there is no directory `{root.name}` in {parent.resolve()}"
    problem = f"`{root}` is a file" if root.is_file() else problem
    fix = "use `data.path=DIRECTORY` with a directory of images for each class"
    raise RunnerError.suggest(f"data.path={path}", problem, ways, fix)


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


#: examples of a Dataset whose statistics are computed, evenly spread: enough for four digits; and how many at a time
MAX_ROWS, STATISTICS_ROWS = 16_384, 64
READER, NORMALISED = "runner.data.read_images", "runner.models.ImageInputs"
#: images that a prediction reads at a time
BLOCK = 1024


def images(
    path: str,
    *,
    size: Size | None = None,
    mode: Mode = "rgb",
    decode: Decode = "auto",
    augment: Augmentations = None,
    like: Mapping[str, Any] | None = None,
) -> Source:
    """Return images (C, H, W) uint8 and the classes of their directories, sorted by name.

    Args:
        path: `path/CLASS/...`, or `path/train/CLASS/...` with `path/val` and `path/test` as the other splits; directories
            below a class belong to it. The other arguments are explained in conf/data/images.yaml.
        like: The reader of an earlier run, whose size, mode and classes hold.

    Raises:
        RunnerError: Files can't be read, with all names, or sizes differ. Without decode=once only headers are read here.
    """
    known = dict(like or {})
    mode, sides = known.get("mode", mode), sides_of(known.get("size", size))
    found, classes = find_splits(path, classes=known.get("classes", ()))
    files = [file for part in found.values() for file in part.files]
    names = [str(file.relative_to(Path(path).expanduser())) for file in files]
    setting = f"data.path={path}"
    num_bytes = len(files) * CHANNELS[mode] * math.prod(sides or first_size(files))
    once, reason = is_decoded_once(decode, num_bytes=num_bytes)
    rows: dict[str, Any]
    if once:
        pixels = decoded_at_once(files, names, mode=mode, size=sides, setting=setting)
        shape = list(pixels.shape[1:])
        parts = zip(found, pixels.split([len(part.files) for part in found.values()]), strict=True)
        rows = {name: (some, found[name].labels) for name, some in parts}
    else:
        sides = same_size(files, names, sides, setting=setting)
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
    """Return the layer that takes images (N, C, H, W) uint8 to a mean of 0 and a standard deviation of 1."""
    mean, std = channel_statistics(rows)
    return Preprocessing(before={"_target_": NORMALISED, "mean": mean, "std": std})


def channel_statistics(rows: Any) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation by channel, of values in 0..1; from counts of bytes, which need no order."""
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
    chosen = torch.linspace(0, count - 1, min(count, MAX_ROWS), dtype=torch.float64).round().long()
    several = getattr(rows, "__getitems__", None)
    for part in chosen.split(STATISTICS_ROWS):
        indices = part.tolist()
        yield batch_of(rows, several(indices) if several else [rows[index] for index in indices])[0]


def read_images(
    path: str | Path | Sequence[str | Path], *, size: Size, mode: Mode, classes: Sequence[str] = ()
) -> Iterator[Tensor]:
    """Return the images as uint8 (n, C, H, W), block by block. Raises: RunnerError with the names that can't be read.

    Args:
        path: A directory, whose images are read in the order of their paths, inner directories too; an image; a text file
            with the path of an image in each line; or a list of paths.
        size: (H, W).
    """
    files, sides = named_images(path), sides_of(size)

    def read(part: list[Path]) -> Tensor:
        return decoded_at_once(part, [str(file) for file in part], mode=mode, size=sides, setting=f"the images {path}")

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
        raise RunnerError.of(f"the images {path}", f"`{path}` has no images", "use a directory with images")
    return files
