"""Finds the image files of each split and their classes, in a folder with a folder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runner.errors import Problem, RunnerError, nearest

ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm")
#: what folders of ready splits are called
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
MOST_NAMED = 5


@dataclass(frozen=True)
class Found:
    """The images of one split."""

    root: Path
    files: list[Path]  # by class, then by name
    labels: Tensor  # (N,) int64


def found_splits(path: str, *, classes: Sequence[str] = ()) -> tuple[dict[str, Found], tuple[str, ...]]:
    """{"train": ..., maybe "val" and "test"} and the names of the classes, which are the folders', sorted.

    classes: those of an earlier run, which hold then. Raises: RunnerError for a folder that is none or holds no images
    by class, for a single class, and for classes that the training split lacks.
    """
    root = Path(path).expanduser()
    folders = _folders(root, path)
    parts = _ready_splits(folders, path) or {"train": root}
    names = tuple(classes) or tuple(sorted(folder.name for folder in _folders(parts["train"], path)))
    found = {name: _by_class(folder, names, path, is_train=name == "train") for name, folder in parts.items()}
    if len(names) == 1 and not classes:
        raise RunnerError(_single(parts["train"] / names[0], found, path))
    return found, names


def _ready_splits(folders: Sequence[Path], path: str) -> dict[str, Path]:
    """Folders that are called as splits are; {} where they are classes: a class may be called train, too.

    Raises: RunnerError for others beside a training and a test split: as classes they would train on the rows of each other.
    """
    by_split = {name: [folder for folder in folders if folder.name in SPLITS[name]] for name in SPLITS}
    called = [folder for some in by_split.values() for folder in some]
    if not by_split["train"] or (len(called) == 1 and len(folders) > 1):
        return {}
    others = [folder.name for folder in folders if folder not in called]
    doubled = next((some for some in by_split.values() if len(some) > 1), [])
    if others or doubled:
        names = ", ".join(folder.name for folder in doubled or called)
        problem = f"{names} have the names of splits, and " + (
            "two of them are the same split" if doubled else f"{', '.join(others[:MOST_NAMED])} next to them do not"
        )
        fix = f"move `{doubled[1].name if doubled else others[0]}` elsewhere, or rename the folders if they are classes"
        raise RunnerError.of(f"data.path={path}", problem, fix)
    return {name: some[0] for name, some in by_split.items() if some}


def image_files(folder: Path) -> Iterator[Path]:
    """All images below a folder, by path; what begins with a dot is left out, and a folder that was there already."""
    seen = set()
    for here, inner, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:  # a link that leads back
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(here) / name for name in sorted(names) if _is_image(name))


def no_folder(path: str | Path, *, key: str) -> RunnerError:
    """The error of a path that leads to no folder, with the nearest name."""
    folder = Path(path).expanduser()
    parent = folder.parent
    there = sorted(item.name for item in parent.iterdir() if item.is_dir()) if parent.is_dir() else []
    ways = [f"{key}={parent / hit}" for hit in (nearest(folder.name, there) or there)[:3]]
    problem = (
        f"`{folder}` is a file" if folder.is_file() else f"there is no directory `{folder.name}` in {parent.resolve()}"
    )
    return RunnerError.suggest(
        f"{key}={path}", problem, ways, f"use `{key}=DIRECTORY` with a folder of images for each class"
    )


def _by_class(folder: Path, names: Sequence[str], path: str, *, is_train: bool) -> Found:
    asked, number = f"data.path={path}", {name: index for index, name in enumerate(names)}
    inner = _folders(folder, path)
    if unknown := [item.name for item in inner if item.name not in number]:
        problem = f"`{folder}` has classes that the training split lacks: {', '.join(unknown[:MOST_NAMED])}"
        raise RunnerError.of(asked, problem, "use the same classes in each split")
    if loose := [item.name for item in sorted(folder.iterdir()) if item.is_file() and _is_image(item.name)]:
        problem = f"{len(loose):,} images (such as `{loose[0]}`) are in `{folder}` itself and in no class's folder"
        raise RunnerError.of(asked, problem, f"move each into its class's folder, e.g., `{folder}/CLASS/{loose[0]}`")
    files, labels, empty = [], [], []
    for item in inner:
        here = list(image_files(item))
        files += here
        labels += [number[item.name]] * len(here)
        if not here:
            empty.append(item.name)
    if not files or (is_train and empty):
        problem = (
            f"there are no images in {', '.join(empty[:MOST_NAMED]) or folder} (files that end in {', '.join(ENDINGS)})"
        )
        raise RunnerError.of(asked, problem, f"put images into `{folder}/CLASS/`, or remove the empty folders")
    return Found(folder, files, torch.tensor(labels))


def _single(only: Path, found: Mapping[str, Found], path: str) -> Problem:
    meant = only
    while len(inner := _folders(meant, path)) == 1:
        meant = inner[0]
    problem = (
        f"`{only.parent}` has one folder, `{only.name}`, so all {len(found['train'].files):,} images have one class"
    )
    if not inner:
        return Problem(f"data.path={path}", problem, f"add a folder for each class next to `{only}`")
    problem += f"; `{meant}` contains {', '.join(item.name for item in inner[:MOST_NAMED])}"
    moved = f"move the folders in `{meant}` up into `{only.parent}`, in each split"
    return Problem.suggest(f"data.path={path}", problem, [f"data.path={meant}"] * (len(found) == 1), moved)


def _folders(root: Path, path: str) -> list[Path]:
    if not root.is_dir():
        raise no_folder(path, key="data.path")
    return sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")
