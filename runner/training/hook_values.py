"""What a hook returned goes in; numbers, images and tables by name come out, on the host."""

from __future__ import annotations

import math
import numbers
import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

NAME = re.compile(r"[\w\-./ ]+")  # that MLflow takes for metrics and images
MOST_NAME = 150  # bytes: an image's file has 90 more in its name, and disks take 255
KINDS = "a hook returns None or {name: a number, figure, image or table}"
FORMS = "a table is {column: values}, or [{column: value}, ...], a row each"
#: modes of PIL that a PNG takes, those that are numbers in the end, and the ones among these of 16 bits
OF_A_FILE = ("1", "L", "LA", "P", "RGB", "RGBA")
OF_16_BITS = ("I;16", "I;16B", "I;16L", "I;16N")
OF_NUMBERS = ("F", "I", *OF_16_BITS)


@dataclass(frozen=True)
class Shown:
    """Of the hooks of one moment. tables: a mapping of its columns for each row."""

    numbers: dict[str, float] = field(default_factory=dict)
    images: dict[str, Image.Image] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def with_(self, other: Shown, *, taken: Set[str]) -> Shown:
        """Both. taken: names of numbers. Raises: ValueError for a name that the run itself, or another hook, has."""
        images, tables = self.images.keys(), self.tables.keys()
        for ours, theirs in ((taken, other.numbers), (images, other.images), (tables, other.tables)):
            if twice := sorted(ours & theirs.keys()):
                raise ValueError(f"there is {', '.join(twice)} already")
        return Shown(self.numbers | other.numbers, self.images | other.images, self.tables | other.tables)


def sorted_out(returned: Any) -> Shown:
    """Waits for the device where it holds tensors. Raises: TypeError, ValueError for what can't be logged."""
    if returned is None:
        return Shown()
    if not isinstance(returned, Mapping):
        raise TypeError(f"it returned a {type(returned).__name__}; {KINDS}")
    shown = Shown()
    for name, value in returned.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name or name.startswith("/"):
            raise ValueError(f"{name!r} is no name for MLflow: letters, digits and _ - . / are")
        if (number := _number(value)) is not None:
            shown.numbers[name] = number
        elif len(name.encode()) > MOST_NAME:
            raise ValueError(f"{name[:40]}... has {len(name.encode())} bytes, and a name of a file {MOST_NAME} at most")
        elif (rows := _rows(value)) is not None:
            shown.tables[name] = rows
        elif (image := _image(value)) is not None:
            shown.images[name] = image
        else:
            size = f" of {tuple(value.shape)}" if hasattr(value, "shape") else ""
            raise TypeError(f"{name} is a {type(value).__name__}{size}; {KINDS}")
    return shown


def _number(value: Any) -> float | None:
    is_one = isinstance(value, numbers.Real | np.number | np.bool_)
    if isinstance(value, Tensor | np.ndarray) and value.ndim < 2 and math.prod(value.shape) == 1:
        is_one, value = True, value.item()
    return float(value) if is_one else None


def _rows(value: Any) -> list[dict[str, Any]] | None:
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        value = value.to_dict("list")
    if isinstance(value, Mapping):
        if single := [name for name, each in value.items() if not _is_column(each)]:
            nested = [name for name in single if isinstance(value[name], Mapping)]
            if nested or len(single) < len(value):
                name = (nested or single)[0]
                kind = type(value[name]).__name__
                raise TypeError(f"{name} of a table is a {kind}; {FORMS}")
            value = [value]
        else:
            columns = {str(name): list(column) for name, column in value.items()}
            _check_columns(columns)
            if len({len(column) for column in columns.values()}) > 1:
                raise ValueError("its columns are not of one length")
            return [dict(zip(columns, map(_plain, row), strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(row, Mapping) for row in value):
        rows = [{str(name): _plain(cell) for name, cell in row.items()} for row in value]
        for row in rows:
            _check_columns(row)
        return rows
    return None


def _is_column(value: Any) -> bool:
    is_single = isinstance(value, str | bytes | Mapping) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Iterable) and not is_single


def _check_columns(names: Container[str]) -> None:
    """Raises: ValueError."""
    if "step" in names:  # rows are kept or written anew by it
        raise ValueError("a table's column step is the run's own; call it otherwise")


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _image(value: Any) -> Image.Image | None:
    """Of a matplotlib figure, a picture of PIL, or an array (H, W), (H, W, C), of a tensor (H, W), (C, H, W), (N, C, H, W).

    Floats go from 0 to 1; integers from 0 to 255, where they are no mask of 0 and 1.
    """
    from PIL import Image  # 20 ms

    if isinstance(value, Image.Image):
        if value.mode in OF_A_FILE and all(value.size):
            return value.copy()
        if value.mode not in OF_NUMBERS:
            return value.convert("RGB") if all(value.size) else None
        array = np.asarray(value)
        if value.mode in OF_16_BITS:
            array = (array // 256).astype(np.uint8)
    elif hasattr(value, "savefig"):
        return _drawn(value)
    elif isinstance(value, Tensor):
        array = value.detach().float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
        if array.ndim == 4:
            array = _grid(array)
        if array.ndim == 3:
            array = array.transpose(1, 2, 0)
    elif isinstance(value, np.ndarray):
        array = value
    else:
        return None
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        return None
    if array.dtype.kind not in "biuf":  # complex numbers, texts, objects
        return None
    if array.dtype != np.uint8:
        most = 255 if array.dtype.kind in "iu" and array.max() > 1 else 1
        array = (np.nan_to_num(array.astype(np.float64)).clip(0, most) * (255 / most)).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


def _drawn(figure: Any) -> Image.Image:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    if pyplot := sys.modules.get("matplotlib.pyplot"):  # which keeps each that it has made, and warns of the 21st
        pyplot.close(getattr(figure, "figure", figure))
    return Image.open(buffer).copy()


def _grid(images: NDArray[Any]) -> NDArray[Any]:
    num, channels, height, width = images.shape
    columns = max(1, math.ceil(math.sqrt(num)))
    rows = math.ceil(num / columns)
    grid = np.zeros((channels, rows * (height + 1) - 1, columns * (width + 1) - 1), images.dtype)
    for at, image in enumerate(images):
        top, left = at // columns * (height + 1), at % columns * (width + 1)
        grid[:, top : top + height, left : left + width] = image
    return grid
