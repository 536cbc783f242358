"""Decodes images of files or bytes into pixels, (C, H, W) uint8: batch by batch as a Dataset, or all at once."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from runner.config.checks import Check, one_of
from runner.data.conversion import BatchDataset
from runner.device.hardware import num_usable_cpus
from runner.device.host_memory import fits_in_memory
from runner.errors import RunnerError

if TYPE_CHECKING:
    from PIL.Image import Image

CHANNELS = {"rgb": 3, "gray": 1}
#: the EXIF tag of the orientation, and its values that swap width and height
ORIENTATION, SWAPPED = 0x0112, (5, 6, 7, 8)
Mode = Annotated[str, one_of(CHANNELS)]
Decode = Annotated[str, one_of(("auto", "once", "workers"))]
#: unreadable images that an error names, and images that a thread decodes at a time
MAX_NAMED, BLOCK = 20, 32
Encoded = str | Path | bytes
T = TypeVar("T")


def decoded(encoded: Encoded, *, mode: str, size: Sequence[int] | None) -> Tensor:
    """Return (C, H, W) uint8. Transparent pixels become white; 16 bits become 8. Raises: ValueError with the reason.

    size: (H, W), which the scaled image fills, cut from the middle; None to keep the image's size.
    """
    from PIL import ImageOps
    from PIL.Image import Resampling

    with _opened(encoded) as image:
        if size is not None:  # a JPEG is decoded at a fraction of its size, at least twice the requested one
            image.draft(None, (2 * max(size), 2 * max(size)))
        upright = _in_mode(ImageOps.exif_transpose(image), mode)
        if size is not None and (upright.height, upright.width) != tuple(size):
            upright = ImageOps.fit(upright, (size[1], size[0]), Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(upright))  # (H, W) or (H, W, C)
    return pixels[None] if mode == "gray" else pixels.permute(2, 0, 1).contiguous()


def size_of(encoded: Encoded) -> tuple[int, int]:
    """Return (H, W) of the upright image, from its header. Raises: ValueError, as decoded()."""
    with _opened(encoded) as image:
        # getexif() would decode a PNG, in search of a tag behind the pixels
        has_tags = image.format != "PNG" or "exif" in image.info
        is_swapped = has_tags and image.getexif().get(ORIENTATION) in SWAPPED
        return (image.width, image.height) if is_swapped else (image.height, image.width)


def sides_of(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    """Return (H, W) of `data.size`."""
    return None if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])


def _is_size(size: Any) -> bool:
    sides = [size, size] if isinstance(size, int) else list(size) if isinstance(size, Sequence) else []
    return len(sides) == 2 and all(type(side) is int and side >= 1 for side in sides)


Size = Annotated[
    int | Sequence[int],
    Check(
        _is_size,
        "the side of a square in pixels, [height,width], or null for images of one size",
        "",
        lambda size: ["64", "[48,64]"],
    ),
]


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
        raise ValueError("its pixels are floats of an unknown range")
    if image.mode.startswith("I"):
        pixels = np.asarray(image).astype(np.int64)  # 16 bits, which Pillow's own conversion would cut off at 255
        low, high = int(pixels.min()), int(pixels.max())
        if low < 0 or high > 65535:
            raise ValueError(f"its pixels are in {low}..{high}, not of 8 or 16 bits")
        image = Image.fromarray(((pixels + 128) // 257).astype(np.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        above = image.convert("RGBA")  # Pillow would show the colors below transparent pixels
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("L" if mode == "gray" else "RGB")


class ImageFiles(BatchDataset):
    """Images in files. A batch is ((B, C, H, W) uint8, (B,) int64), decoded by one thread of the process that reads it."""

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
        files = [self.files[index] for index in indices]
        how: dict[str, Any] = {"mode": self.mode, "size": self.size, "setting": f"data.path={self.root}"}
        return decoded_at_once(files, files, **how, num_threads=1), self.targets[torch.tensor(indices)]


def decoded_at_once(
    encoded: Sequence[Encoded],
    names: Sequence[str],
    *,
    mode: str,
    size: Sequence[int] | None,
    setting: str,
    num_threads: int | None = None,
) -> Tensor:
    """Return (N, C, H, W) uint8. size: (H, W); None if all have one size. num_threads: None for one per CPU.

    Raises:
        RunnerError: Images can't be read, with all of their names; or they differ in size.
    """
    height, width = size or first_size(encoded)
    images = torch.empty(len(encoded), CHANNELS[mode], height, width, dtype=torch.uint8)

    def read(index: int) -> tuple[int, int]:
        pixels = decoded(encoded[index], mode=mode, size=size)
        if pixels.shape == images.shape[1:]:
            images[index] = pixels
        return pixels.shape[1], pixels.shape[2]

    sizes = each(read, names, setting=setting, num_threads=num_threads)
    check_same(sizes, names=names, setting=setting)
    return images


def first_size(encoded: Sequence[Encoded]) -> tuple[int, int]:
    """Return (H, W) of the first image that can be read; (1, 1) without one, as the caller reports them all."""
    for one in encoded:
        with suppress(ValueError):
            return size_of(one)
    return 1, 1


def check_same(sizes: Sequence[tuple[int, int]], *, names: Sequence[str], setting: str) -> tuple[int, int]:
    """Return the size of all images. Raises: RunnerError if they differ."""
    (most, count), *others = Counter(sizes).most_common()
    if others:
        other = next(index for index, size in enumerate(sizes) if size != most)
        problem = (
            f"the images differ in size: {names[sizes.index(most)]} is {most[0]} high and {most[1]} wide, as {count:,} of "
            f"{len(sizes):,} are, and {names[other]} is {sizes[other][0]} high and {sizes[other][1]} wide"
        )
        raise RunnerError.suggest(setting, problem, [f"data.size={min(most)}", f"data.size=[{most[0]},{most[1]}]"])
    return most


def each(read: Callable[[int], T], names: Sequence[str], *, setting: str, num_threads: int | None = None) -> list[T]:
    """Return `read(index)` of each image, computed by threads. Raises: RunnerError with the names of all ValueErrors."""

    def read_block(start: int) -> list[T | ValueError]:
        results: list[T | ValueError] = []
        for index in range(start, min(start + BLOCK, len(names))):
            try:
                results.append(read(index))
            except ValueError as error:
                results.append(error)
        return results

    with ThreadPoolExecutor(num_threads or num_usable_cpus()) as threads:
        results = [one for block in threads.map(read_block, range(0, len(names), BLOCK)) for one in block]
    broken = [f"{name}: {one}" for name, one in zip(names, results, strict=True) if isinstance(one, ValueError)]
    if broken:
        more = [f"and {len(broken) - MAX_NAMED:,} more"] if len(broken) > MAX_NAMED else []
        of_a_batch = " of a batch" if num_threads == 1 else ""
        problem = f"{len(broken):,} of {len(names):,} images{of_a_batch} can't be used:"
        problem = "\n".join([problem, *broken[:MAX_NAMED], *more])
        raise RunnerError.of(setting, problem, "replace these files, or remove them")
    return cast(list[T], results)


def same_size(
    encoded: Sequence[Encoded], names: Sequence[str], size: tuple[int, int] | None, *, setting: str
) -> tuple[int, int]:
    """Return `size`, or the one of all images. Reads their headers. Raises: RunnerError for unreadable or different ones."""
    sizes = each(lambda index: size_of(encoded[index]), names, setting=setting)
    return size or check_same(sizes, names=names, setting=setting)


def is_decoded_once(decode: str, *, num_bytes: int) -> tuple[bool, str]:
    """Return whether decoded examples of this size are kept in memory, and why."""
    once, reason = fits_in_memory(num_bytes) if decode == "auto" else (decode == "once", "as asked")  # words: ok
    return once, f"decoded {'once' if once else 'by workers'} ({reason})"


def fingerprint_of(files: Sequence[Path], root: Path) -> str:
    """Return a digest of names and sizes: reading the files would take as long as an epoch."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()} {file.stat().st_size}\n".encode())
    return digest.hexdigest()
