"""Finds the image files of each split and their classes, in a directory with a directory per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runner.errors import Problem, RunnerError, nearest

ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
#: directory names of splits
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
MOST_NAMED = 5


@dataclass(frozen=True)
class SplitFiles:
    """The images of one split."""

    root: Path
    files: list[Path]  # by class, then by name
    labels: Tensor  # (N,) int64


def find_splits(path: str, *, classes: Sequence[str] = ()) -> tuple[dict[str, SplitFiles], tuple[str, ...]]:
    """Return {"train": ..., maybe "val" and "test"}, and the classes: the sorted names of the directories.

    Args:
        classes: An earlier run's.

    Raises:
        RunnerError: The directory is missing or has no images by class, there is a single class, or a split has a class
            that the training split lacks.
    """
    root = Path(path).expanduser()
    parts = _ready_splits(_directories(root, path), path) or {"train": root}
    names = tuple(classes) or tuple(item.name for item in _directories(parts["train"], path))
    found = {name: _by_class(part, names, path, is_train=name == "train") for name, part in parts.items()}
    if len(names) == 1 and not classes:
        raise RunnerError(_single_class(parts["train"] / names[0], found, path))
    return found, names


def _ready_splits(directories: Sequence[Path], path: str) -> dict[str, Path]:
    """Return the directories with names of splits; {} if they are classes, since a class may be called train, too.

    Raises:
        RunnerError: There are others next to a training and a test split; as classes they would share examples.
    """
    by_split = {name: [item for item in directories if item.name in SPLITS[name]] for name in SPLITS}
    splits = [item for some in by_split.values() for item in some]
    if not by_split["train"] or (len(splits) == 1 and len(directories) > 1):
        return {}
    others = [item for item in directories if item not in splits]
    others += [item for some in by_split.values() for item in some[1:]]
    if others:
        names, more = (", ".join(item.name for item in some[:MOST_NAMED]) for some in (splits, others))
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
        problem = f"`{directory}` has classes that the training split lacks: {', '.join(unknown[:MOST_NAMED])}"
        raise RunnerError.of(setting, problem, "use the same classes in each split")
    if loose := [item.name for item in sorted(directory.iterdir()) if item.is_file() and _is_image(item.name)]:
        problem = f"{len(loose):,} images (such as `{loose[0]}`) are in `{directory}` and not in a class's directory"
        fix = f"move each into its class's directory, e.g., `{directory}/CLASS/{loose[0]}`"
        raise RunnerError.of(setting, problem, fix)
    by_class = {item.name: list(image_files(item)) for item in inner}
    empty = [name for name, files in by_class.items() if not files]
    if len(empty) == len(by_class) or (is_train and empty):
        where = ", ".join(empty[:MOST_NAMED]) or directory
        problem = f"there are no images in {where} (files that end in {', '.join(ENDINGS)})"
        fix = f"put images into `{directory}/CLASS/`, or remove the empty directories"
        raise RunnerError.of(setting, problem, fix)
    files = [file for some in by_class.values() for file in some]
    labels = [number[name] for name, some in by_class.items() for _ in some]
    return SplitFiles(directory, files, torch.tensor(labels))


def _single_class(only: Path, found: Mapping[str, SplitFiles], path: str) -> Problem:
    inner, meant = [only], only
    while len(inner) == 1:
        meant, inner = inner[0], _directories(inner[0], path)
    count = len(found["train"].files)
    problem = f"`{only.parent}` has one directory, `{only.name}`, so all {count:,} images have one class"
    fix = f"add a directory for each class next to `{only}`"
    if inner:
        problem += f"; `{meant}` contains {', '.join(item.name for item in inner[:MOST_NAMED])}"
        fix = f"move the directories in `{meant}` up into `{only.parent}`, in each split"
    ways = [f"data.path={meant}"] * (bool(inner) and len(found) == 1)
    return Problem.suggest(f"data.path={path}", problem, ways, fix)


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
