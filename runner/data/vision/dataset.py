"""Decodes image files, batch by batch as a Dataset or all at once into memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.checks import choice
from runner.data.vision.decode import CHANNELS, Encoded, decoded, size_of
from runner.device.hardware import num_usable_cpus
from runner.errors import RunnerError

T = TypeVar("T")
#: of the images that can't be read so many are named
MOST_NAMED = 20
#: images are kept decoded in memory up to this part of what is free there: the splits are a copy of them
MOST_OF_MEMORY = 0.25
DECODE = ("auto", "once", "workers")
TAKE_OUT = "replace that file, or remove it"
#: files that a thread takes at a time
BLOCK = 32


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Images in files. A batch is ((B, C, H, W) uint8, (B,) int64); whoever reads it decodes it, one thread each."""

    def __init__(
        self,
        files: Sequence[Path],
        labels: Tensor,
        *,
        classes: Sequence[str],
        size: Sequence[int],
        mode: str,
        root: Path,
    ) -> None:
        self.files, self.targets, self.classes = [str(file) for file in files], labels, tuple(classes)
        self.size, self.mode, self.root = tuple(size), mode, str(root)
        self.fingerprint = fingerprint_of(files, root)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.decoded(index), self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([self.decoded(index) for index in indices]), self.targets[torch.tensor(indices)]

    def collate_fn(self, rows: Any) -> Any:
        return rows if isinstance(rows, tuple) else torch.utils.data.default_collate(rows)

    def decoded(self, index: int) -> Tensor:
        """(C, H, W). Raises: RunnerError with the file's name."""
        try:
            return decoded(self.files[index], mode=self.mode, size=self.size)
        except ValueError as error:
            raise RunnerError.of(f"data.path={self.root}", f"{self.files[index]}: {error}", TAKE_OUT) from None


def decoded_at_once(
    encoded: Sequence[Encoded], names: Sequence[str], *, mode: str, size: Sequence[int] | None, asked: str
) -> Tensor:
    """(N, C, H, W) uint8: everything decoded, by as many threads as there are CPUs (PIL leaves them to run side by side).

    size: (H, W); None where all have one. names: what messages call each of them.
    Raises: RunnerError that tells all that can't be read, and for sizes that differ.
    """
    height, width = size or first_size(encoded)
    images = torch.empty(len(encoded), CHANNELS[mode], height, width, dtype=torch.uint8)

    def read(index: int) -> tuple[int, int]:
        pixels = decoded(encoded[index], mode=mode, size=size)
        if pixels.shape == images.shape[1:]:
            images[index] = pixels
        return pixels.shape[1], pixels.shape[2]

    check_same(each(range(len(encoded)), read, names=names, asked=asked), names=names, asked=asked)
    return images


def first_size(encoded: Sequence[Encoded]) -> tuple[int, int]:
    """(H, W) of the first that can be read; a pixel where none can, which those who read them all will tell."""
    for one in encoded:
        with suppress(ValueError):
            return size_of(one)
    return 1, 1


def check_same(sizes: Sequence[tuple[int, int]], *, names: Sequence[str], asked: str) -> tuple[int, int]:
    """The size that all of them have. Raises: RunnerError where they differ."""
    (most, count), *others = Counter(sizes).most_common()
    if others:
        other = next(index for index, found in enumerate(sizes) if found != most)
        problem = (
            f"the images differ in size: {names[sizes.index(most)]} is {most[0]} high and {most[1]} wide, as {count:,} of "
            f"{len(sizes):,} are, and {names[other]} is {sizes[other][0]} high and {sizes[other][1]} wide"
        )
        raise RunnerError.suggest(asked, problem, [f"data.size={min(most)}", f"data.size=[{most[0]},{most[1]}]"])
    return most


def each(indices: Sequence[int], read: Callable[[int], T], *, names: Sequence[str], asked: str) -> list[T]:
    """What `read` gives for each index, in order, read by threads, which end with the call.

    Raises: RunnerError that tells all for which it raised a ValueError, by their names.
    """

    def block(part: Sequence[int]) -> list[T | ValueError]:
        return [_caught(read, index) for index in part]

    found: list[T] = []
    broken: list[str] = []
    for part, results in zip(_blocks(indices), _in_threads(block, _blocks(indices)), strict=True):
        for index, result in zip(part, results, strict=True):
            if isinstance(result, ValueError):
                broken.append(f"{names[index]}: {result}")
            else:
                found.append(result)
    if broken:
        more = [f"and {len(broken) - MOST_NAMED:,} more"] if len(broken) > MOST_NAMED else []
        count = f"{len(broken):,} of {len(indices):,} images can't be used"
        problem = "\n".join([f"{count}:", *broken[:MOST_NAMED], *more])
        raise RunnerError.of(asked, problem, "replace these files, or remove them")
    return found


def is_decoded_once(asked: str, *, num_bytes: int) -> tuple[bool, str]:
    """Whether rows are kept decoded in memory, and why. asked: data.decode. num_bytes: that they take there.

    Raises: RunnerError for another word.
    """
    import psutil

    choice(asked, DECODE, key="data.decode")
    free = psutil.virtual_memory().available
    size = f"{num_bytes / 2**20:,.1f} MiB of {free / 2**20:,.0f} MiB free"
    if asked != "auto":
        return asked == "once", f"decoded {'once' if asked == 'once' else 'by workers'} (as asked)"
    if num_bytes <= free * MOST_OF_MEMORY:
        return True, f"decoded once (auto: {size})"
    return False, f"decoded by workers (auto: {size})"


def _blocks(indices: Sequence[int]) -> list[Sequence[int]]:
    return [indices[start : start + BLOCK] for start in range(0, len(indices), BLOCK)]


def _in_threads(work: Callable[[Any], T], parts: Iterable[Any]) -> Iterator[T]:
    with ThreadPoolExecutor(num_usable_cpus()) as threads:
        yield from threads.map(work, parts)


def _caught(read: Callable[[int], T], index: int) -> T | ValueError:
    try:
        return read(index)
    except ValueError as error:
        return error


def fingerprint_of(files: Sequence[Path], root: Path) -> str:
    """Of names and sizes: reading the files would take as long as an epoch."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
