"""Decodes images of files or bytes into pixels, (C, H, W) uint8: batch by batch as a Dataset, or all at once."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from runner.config.checks import choice
from runner.data.map_style import BatchDataset
from runner.device.hardware import num_usable_cpus
from runner.errors import RunnerError

if TYPE_CHECKING:
    from PIL.Image import Image

CHANNELS = {"rgb": 3, "gray": 1}
#: EXIF orientations in which width and height have changed places
LYING = (5, 6, 7, 8)
ORIENTATION = 0x0112
Encoded = str | Path | bytes


def decoded(encoded: Encoded, *, mode: str, size: Sequence[int] | None) -> Tensor:
    """(C, H, W) uint8. size: (H, W), which the image is scaled to fill and cut to from the middle; None: as it is.

    Transparent pixels become white; 16 bits become 8. Raises: ValueError with the reason if it can't be read.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    with _opened(encoded) as image:
        if size is not None:  # a JPEG is decoded at a fraction of its size, still twice as large as needed
            image.draft(None, (2 * max(size), 2 * max(size)))
        upright = _in_mode(ImageOps.exif_transpose(image), mode)
        if size is not None and (upright.height, upright.width) != tuple(size):
            upright = ImageOps.fit(upright, (size[1], size[0]), Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(upright))  # (H, W) or (H, W, C)
    return pixels[None] if mode == "gray" else pixels.permute(2, 0, 1).contiguous()


def size_of(encoded: Encoded) -> tuple[int, int]:
    """Return (H, W) of the upright image, from its header. Raises: ValueError, as decoded()."""
    with _opened(encoded) as image:
        # a PNG's getexif() would decode it all, in search of a tag behind the pixels
        has_tags = image.format != "PNG" or "exif" in image.info
        is_lying = has_tags and image.getexif().get(ORIENTATION) in LYING
        return (image.width, image.height) if is_lying else (image.height, image.width)


def checked_size(size: Any) -> tuple[int, int] | None:
    """Return (H, W) for one or two whole numbers. Raises: RunnerError for other values."""
    if size is None:
        return None
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, Sequence) else []
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        problem = "`data.size` must be the side of a square in pixels, [height,width], or null for images of one size"
        raise RunnerError.suggest(f"data.size={size}", problem, ["data.size=64", "data.size=[48,64]"])
    return sides[0], sides[1]


@contextmanager
def _opened(encoded: Encoded) -> Iterator[Image]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        problem = "reading images needs a package that is not installed"
        raise RunnerError.of("images", problem, "run `pip install pillow`", code="missing-package") from None
    try:
        with Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
            yield image
    except UnidentifiedImageError:
        raise ValueError("not a readable image") from None
    except (Image.DecompressionBombError, OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it can't be read: {error or type(error).__name__}") from None


def _in_mode(image: Image, mode: str) -> Image:
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floats, whose range nobody knows")
    if image.mode.startswith("I"):
        image = Image.fromarray(_eight_bits(np.asarray(image)))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")  # Pillow would show the colors below transparent pixels
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("L" if mode == "gray" else "RGB")


def _eight_bits(pixels: Any) -> Any:  # (H, W) of 16 bits, which PIL's own conversion would cut off at 255
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > 65535:
        raise ValueError(f"its pixels are in {low}..{high}, and 8 or 16 bits are read here")
    return ((pixels.astype(np.int64) + 128) // 257).astype(np.uint8)


T = TypeVar("T")
#: of the images that can't be read so many are named
MOST_NAMED = 20
#: images are kept decoded in memory up to this part of what is free there: the splits are a copy of them
MOST_OF_MEMORY = 0.25
DECODE = ("auto", "once", "workers")
TAKE_OUT = "replace that file, or remove it"
#: files that a thread takes at a time
BLOCK = 32


class ImageFiles(BatchDataset):
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

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([self.decoded(index) for index in indices]), self.targets[torch.tensor(indices)]

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
    """Return what `read` gives for each index, in order, read by threads that end with the call.

    Raises:
        RunnerError: `read` raised a ValueError; with the names of all indices for which it did.
    """

    def read_block(start: int) -> list[T | ValueError]:
        return [_caught(read, index) for index in indices[start : start + BLOCK]]

    with ThreadPoolExecutor(num_usable_cpus()) as threads:
        results = [one for block in threads.map(read_block, range(0, len(indices), BLOCK)) for one in block]
    broken = [f"{names[i]}: {one}" for i, one in zip(indices, results, strict=True) if isinstance(one, ValueError)]
    if broken:
        more = [f"and {len(broken) - MOST_NAMED:,} more"] if len(broken) > MOST_NAMED else []
        count = f"{len(broken):,} of {len(indices):,} images can't be used"
        problem = "\n".join([f"{count}:", *broken[:MOST_NAMED], *more])
        raise RunnerError.of(asked, problem, "replace these files, or remove them")
    return cast(list[T], results)


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
