"""Reads input images for prediction, (N, C, H, W) uint8 on the host: from a folder, a file or a list of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.config.checks import choice
from runner.data.vision.dataset import decoded_at_once, is_decoded_once
from runner.data.vision.decode import CHANNELS, checked_size
from runner.data.vision.folders import image_files
from runner.errors import RunnerError, nearest

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
    """The files that `path` means, in the order of the rows. Raises: RunnerError where there are none."""
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
