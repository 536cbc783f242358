"""Decodes an image, from a file or from bytes, into pixels, (C, H, W) uint8: upright, in one mode, of one size."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

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

    What is transparent becomes white; 16 bits become 8. Raises: ValueError, with words for a person, where it can't be read.
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
    """(H, W) of the upright image, from its header alone. Raises: ValueError as decoded() does."""
    with _opened(encoded) as image:
        # a PNG's getexif() would decode it all, in search of a tag behind the pixels
        has_tags = image.format != "PNG" or "exif" in image.info
        is_lying = has_tags and image.getexif().get(ORIENTATION) in LYING
        return (image.width, image.height) if is_lying else (image.height, image.width)


def checked_size(size: Any) -> tuple[int, int] | None:
    """(H, W) from a whole number or two. Raises: RunnerError for what is no size."""
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
        above = image.convert("RGBA")  # PIL would show the colours that lie hidden under what is transparent
        image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
    return image.convert("L" if mode == "gray" else "RGB")


def _eight_bits(pixels: Any) -> Any:  # (H, W) of 16 bits, which PIL's own conversion would cut off at 255
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > 65535:
        raise ValueError(f"its pixels are in {low}..{high}, and 8 or 16 bits are read here")
    return ((pixels.astype(np.int64) + 128) // 257).astype(np.uint8)
