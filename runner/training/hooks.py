"""Calls your functions between steps (train.hooks) with a view of the training, and prepares what they return for the tracker.

Hooks.call() runs in the process that tracks, in the thread that trains. A hook that fails is not called again.
"""

from __future__ import annotations

import io
import logging
import math
import numbers
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.loading.loaders import Batches
from runner.device import backends
from runner.errors import CODE_ERRORS, first_line, in_words, traceback_of, without_password
from runner.training.carried_state import evaluating, restored
from runner.training.parts import Hook, Parts

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger("runner")

#: prefixes of reserved numbers; the test's values are known only at the end
RESERVED = ("train/", "speed/", "system/")
RESERVED_BEFORE_END = (*RESERVED, "test/")
NAME = re.compile(r"[\w\-./ ]+")  # that MLflow accepts for metrics and images
MAX_NAME = 150  # bytes: an image's file name has 90 more, and the limit of file systems is 255
KINDS = "a hook returns None or {name: a number, figure, image or table, stop: True to end the run}"
FORMS = "a table is {column: values}, or [{column: value}, ...], a row each"
#: PIL's modes that a PNG file takes
FILE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")


@dataclass(frozen=True)
class View:
    """What a hook sees of a training."""

    when: str  # start, epoch or end
    model: nn.Module  # not a copy; in eval mode, without gradients; at the end with the best weights
    device: torch.device
    epoch: int  # epochs done
    step: int  # steps done
    values: dict[str, float]  # the last evaluation's, by name
    folder: Path  # the run directory
    _splits: Mapping[str, Batches | None] = field(repr=False)

    def batches(self, split: str = "val") -> Iterator[Any]:
        """The batches of `val` or `test` on the device, in order. Raises: ValueError for a split that doesn't exist."""
        batches = self._splits.get(split)
        if batches is None:
            there = [name for name, batches in self._splits.items() if batches is not None]
            raise ValueError(f"a hook has the batches of {' and '.join(there) or 'no split'}, not of {split}")
        return iter(batches.epoch(0))


class Hooks:
    """A training's hooks, without those that have failed, and the seconds that they took."""

    def __init__(
        self, hooks: Sequence[Hook], parts: Parts, folder: Path, *, say: Callable[[str], None], must_work: bool = False
    ) -> None:
        """must_work: whether an error in a hook ends the training."""
        self.seconds = 0.0
        self._must_work = must_work
        self._hooks, self._parts, self._folder, self._say = list(hooks), parts, folder, say
        self.stopped_by = ""  # the hook that ends the training
        self._measured: set[str] = set()  # names of the validation's values so far

    def call(self, when: str, *, epoch: int, step: int, values: dict[str, float]) -> HookValues:
        """Call the hooks that are due; returns what they return. Modes, gradients and generators are restored afterwards."""
        if when == "epoch":
            self._measured |= values.keys()
        due = [hook for hook in self._hooks if when in hook.at]
        if not due:
            return HookValues()
        began, parts, results = time.perf_counter(), self._parts, HookValues()
        generators, model = backends.generator_states(parts.device), parts.kept_model
        splits = {"val": parts.val, "test": parts.test}
        try:
            with restored(model, parts.task), evaluating(model), torch.no_grad():
                for hook in due:
                    model.eval()
                    model.zero_grad()  # a hook's gradients are not part of the next step
                    known = {**values, **results.numbers}
                    view = View(when, model, parts.device, epoch, step, known, self._folder, splits)
                    results = self._call_one(hook, view, results)
        finally:
            backends.set_generator_states(generators, parts.device)
            self.seconds += time.perf_counter() - began
        return results

    def _call_one(self, hook: Hook, view: View, results: HookValues) -> HookValues:
        try:
            shown = sorted_out(hook.call(view))
            _check_names(shown.numbers, view.when)
            self.stopped_by = self.stopped_by or (hook.name if shown.stop else "")
            return results.with_(shown, taken=view.values.keys() | self._measured)
        except CODE_ERRORS as error:
            if self._must_work:
                raise
            self._hooks.remove(hook)
            log.error("hook %s failed at step %d\n%s", hook.name, view.step, traceback_of(error))
            problem = without_password(first_line(in_words(error)))
            self._say(f"hook:   {hook.name} failed at step {view.step:,}, and is not called any more: {problem}")
            return results


def _check_names(names: Iterable[str], when: str) -> None:
    reserved = RESERVED if when == "end" else RESERVED_BEFORE_END
    for name in names:
        if begin := next((each for each in reserved if name.startswith(each)), ""):
            raise ValueError(f"{name} is a reserved name, as are all that begin with {begin}; use another name")


@dataclass(frozen=True)
class HookValues:
    """What hooks returned: numbers, images and tables (a mapping of columns for each row) by name, on the host."""

    numbers: dict[str, float] = field(default_factory=dict)
    images: dict[str, Image.Image] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    stop: bool = False  # end the training

    def with_(self, other: HookValues, *, taken: Set[str]) -> HookValues:
        """Add another hook's. taken: names of numbers. Raises: ValueError for a name that exists."""
        images, tables = self.images.keys(), self.tables.keys()
        for ours, theirs in ((taken, other.numbers), (images, other.images), (tables, other.tables)):
            if twice := sorted(ours & theirs.keys()):
                raise ValueError(f"there is {', '.join(twice)} already")
        return HookValues(self.numbers | other.numbers, self.images | other.images, self.tables | other.tables)


def sorted_out(returned: Any) -> HookValues:
    """Sort what a hook returned. Waits for the device for tensors. Raises: TypeError, ValueError for what can't be logged."""
    if returned is None:
        return HookValues()
    if not isinstance(returned, Mapping):
        raise TypeError(f"it returned a {type(returned).__name__}; {KINDS}")
    shown = HookValues(stop=bool(returned.get("stop", False)))
    for name, value in returned.items():
        if name == "stop":
            continue
        if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name or name.startswith("/"):
            raise ValueError(f"{name!r} is not a name for MLflow: use letters, digits and _ - . /")
        if (number := _number(value)) is not None:
            shown.numbers[name] = number
        elif len(name.encode()) > MAX_NAME:
            raise ValueError(f"{name[:40]}... has {len(name.encode())} bytes, and a name of a file {MAX_NAME} at most")
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
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a data frame
        value = value.to_dict("records")
    if isinstance(value, Mapping):
        columns = [_plain(_column(each)) for each in value.values()]
        is_column = {isinstance(column, list) for column in columns}
        if len(is_column) > 1:
            raise TypeError(f"it mixes columns and single values; {FORMS}")
        rows = [columns] if is_column == {False} else zip(*columns, strict=True)
        value = [dict(zip(value, row, strict=True)) for row in rows]
    if not isinstance(value, list) or not all(isinstance(row, Mapping) for row in value):
        return None
    if any("step" in row for row in value):  # rows are replaced by their step
        raise ValueError("a table's column `step` is reserved; use another name")
    return [{str(name): _plain(cell) for name, cell in row.items()} for row in value]


def _column(value: Any) -> Any:
    """Return a list for a range, a series or another iterable of cells."""
    is_cell = isinstance(value, str | bytes | Mapping | Tensor | np.ndarray | np.generic)
    return value if is_cell or not isinstance(value, Iterable) else list(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _image(value: Any) -> Image.Image | None:
    """An image from a matplotlib figure, a PIL image, an array (H, W) or (H, W, C), or a tensor (H, W), (C, H, W) or (N, C, H, W).

    Floats are from 0 to 1, integers from 0 to 255, unless they are a mask of 0 and 1.
    """
    from PIL import Image  # 20 ms

    if isinstance(value, Image.Image) and all(value.size):
        return value.copy() if value.mode in FILE_MODES else value.convert("RGB")
    if hasattr(value, "savefig"):
        return _drawn(value)
    if isinstance(value, Tensor):
        array = value.detach().float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()
        array = np.concatenate(list(array), axis=2) if array.ndim == 4 and len(array) else array  # in a row
        array = array.transpose(1, 2, 0) if array.ndim == 3 else array
    elif isinstance(value, np.ndarray):
        array = value
    else:
        return None
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not is_image or not array.size or array.dtype.kind not in "biuf":  # not complex numbers, texts, objects
        return None
    if array.dtype != np.uint8:
        most = 255 if array.dtype.kind in "iu" and array.max() > 1 else 1
        array = (np.nan_to_num(array.astype(np.float64)).clip(0, most) * (255 / most)).round().astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


def _drawn(figure: Any) -> Image.Image:
    from PIL import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    if pyplot := sys.modules.get("matplotlib.pyplot"):  # which keeps every figure, and warns at the 21st
        pyplot.close(getattr(figure, "figure", figure))
    return Image.open(buffer).copy()
