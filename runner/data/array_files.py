"""Makes a Source of a file of arrays (npz, npy, safetensors): `data=arrays`. Reads inputs for predictions, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.config.checks import no_such_file
from runner.config.packages import not_installed
from runner.data.conversion import Conversion, to_inputs
from runner.data.source import GIVEN, ArrayNames, Source, from_arrays
from runner.data.vision.augment import augmented
from runner.data.vision.images import normalised
from runner.errors import Problem, RunnerError, at_once, first_line, nearest

#: the name of the only array of a npy file
TABLE = ""
ENDINGS = (".npz", ".npy", ".safetensors")
FIX = "a file that ends in `.npz`, `.npy` or `.safetensors`"
#: bytes of a npy file from which it is mapped into memory
MAPPED_BYTES = 2**20


class Arrays(Mapping[str, Any]):
    """The arrays of an open file. Reading one raises a RunnerError if the file is damaged."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Any], *, file: Path, key: str) -> None:
        self._names, self._read, self._file, self._key = names, read, file, key

    def __getitem__(self, name: str) -> Any:
        with _errors_of_the_user(self._file, self._key):
            return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own would read the array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def opened(path: str, *, key: str) -> Iterator[Arrays]:
    """Open a file of arrays for the block. A large npy is mapped into memory; Python objects are refused. Raises: RunnerError."""
    file = existing(path, key=key)
    if file.suffix not in ENDINGS:
        problem = f"files {f'that end in `{file.suffix}`' if file.suffix else 'without an ending'} can't be read"
        raise RunnerError.of(f"{key}={path}", problem, f"use {FIX}")
    with ExitStack() as stack:
        with _errors_of_the_user(file, key):
            names, read = _names_and_reader(file, key, stack)
        yield Arrays(names, read, file=file, key=key)


def _names_and_reader(file: Path, key: str, stack: ExitStack) -> tuple[Sequence[str], Callable[[str], Any]]:
    if file.suffix == ".safetensors":
        try:
            from safetensors import safe_open  # an optional package
        except ImportError:
            problem = "reading `.safetensors` needs a package that is not installed"
            raise not_installed(f"{key}={file}", problem, "safetensors") from None
        tensors = stack.enter_context(safe_open(file, framework="pt"))
        return list(tensors.keys()), tensors.get_tensor
    if file.suffix == ".npz":
        stream = stack.enter_context(file.open("rb"))  # NumPy leaves a broken file open
        found = np.load(stream, allow_pickle=False)
        return found.files, found.__getitem__
    # copy on write, as torch warns of read-only memory
    table = np.load(file, mmap_mode="c" if file.stat().st_size >= MAPPED_BYTES else None, allow_pickle=False)
    return [TABLE], lambda _: table


def existing(path: str, *, key: str) -> Path:
    """Return the file at `path`. Raises: RunnerError with the nearest names in that directory."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    sought = file / file.name if file.is_dir() else file
    fix = f"use `{key}=FILE` with {FIX}"
    problem = no_such_file(f"{key}={path}", sought, key, lambda item: item.suffix in ENDINGS, fix)
    raise RunnerError(replace(problem, message=f"`{file}` is a directory") if file.is_dir() else problem)


@contextmanager
def _errors_of_the_user(file: Path, key: str) -> Iterator[None]:
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:  # the libraries raise any class for a damaged file
        raise RunnerError(_unreadable(file, f"{key}={file}", error)) from error


def _unreadable(file: Path, setting: str, error: Exception) -> Problem:
    if isinstance(error, PermissionError):
        return Problem(setting, f"no permission to read `{file}`", f"run `chmod u+r {file}`")
    if "Object arrays" in str(error):
        problem = f"`{file.name}` holds Python objects, which could run code when they are read"
        return Problem(setting, problem, "save arrays of numbers or texts")
    problem = f"`{file.name}` can't be read as `{file.suffix}`: {first_line(error)}"
    return Problem(setting, problem, "use a complete file, saved by numpy or safetensors")


READER = "runner.data.array_inputs"
IMAGE_DIMS = 4  # (N, C, H, W)
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)
#: rows that a prediction reads at a time
ROWS_A_CHUNK = 65_536
#: the last column of a table of floats holds classes if it has at most this many different values, all whole numbers
MOST_CLASSES_IN_A_COLUMN = 100


def arrays(
    path: str,
    inputs: str = "x",
    *,
    targets: str = "y",
    targets_path: str | None = None,
    kind: str = "auto",
    float_inputs: bool = True,
    augment: Mapping[str, Any] | Sequence[Any] | None = None,
    dtype: str = "float32",
) -> Source:
    """Return the arrays `inputs` (N, ...) and `targets` (N,) or (N, T) of a file.

    If the file has x_train and y_train instead of x and y, they are used, and x_val, y_val, x_test and y_test are its own
    splits. The targets of a npy file are in `targets_path`, or in the last column of its table.

    Args:
        targets_path: Another file for the targets.
        kind: classification, regression, or auto (floats are a regression, all else classes).
        float_inputs: False keeps integers: rows of tokens (small ones become int32, as embeddings need it), and images
            (C, H, W) of bytes, which a layer in front of the model normalizes.
        augment: Of images (C, H, W); see runner.data.vision.augment.
        dtype: Of all other numbers: float32, or float64 (train.precision=fp64).

    Raises:
        RunnerError: The file is missing, can't be read or lacks an array, or holds NaN.
    """
    conversion = Conversion(getattr(torch, dtype), keeps_integers=not float_inputs)
    settings: dict[str, Any] = {"kind": kind, "conversion": conversion}
    given: dict[str, Any] = {}
    with ExitStack() as stack:
        found = others = stack.enter_context(opened(path, key="data.path"))
        if targets_path is not None:
            others = stack.enter_context(opened(targets_path, key="data.targets_path"))
        if TABLE in found and targets_path is None:
            source = _from_table(found[TABLE], path, settings)
        else:
            is_split = found is others and not {inputs, targets} & set(found) and f"{inputs}_train" in found
            x = partial(_array, found, "data.inputs", path, inputs, targets)
            y = partial(_array, others, "data.targets", targets_path or path, targets, inputs)
            read = partial(_pair, x, y, path, settings)
            source = read("_train" if is_split else "")
            for name in GIVEN if is_split else ():
                if f"{inputs}_{name}" in found or f"{targets}_{name}" in found:
                    given[name] = read(f"_{name}", like=source).rows
    are_images = source.rows[0].dtype == torch.uint8 and source.rows[0].dim() == IMAGE_DIMS
    reader = {"_target_": READER, "_partial_": True, "inputs": inputs, "float_inputs": float_inputs}
    if dtype != "float32":
        reader["dtype"] = dtype
    source = replace(source, given={name: _for_embeddings(rows) for name, rows in given.items()}, reader=reader)
    source = replace(source, rows=_for_embeddings(source.rows), around=normalised if are_images else None)
    return augmented(source, augment)


def array_inputs(
    path: str, *, inputs: str = "x", float_inputs: bool = True, dtype: str = "float32"
) -> Iterator[Tensor]:
    """Yield the rows, (n, ...), of the array called `inputs`, or of the only one, as arrays() reads them. Raises: RunnerError."""
    setting = f"--input {path}"
    with opened(path, key="--input") as found:
        names = list(found)
        if inputs not in names and len(names) != 1:
            problem = f"`{Path(path).name}` has no array `{inputs}`; it has {', '.join(names) or 'no arrays'}"
            raise RunnerError.of(setting, problem, f"save the rows as `{inputs}`", code="unknown-option")
        array = found[inputs if inputs in names else names[0]]
        for start in range(0, len(array), ROWS_A_CHUNK) if array.ndim else ():
            called = f"rows {start + 1:,} and on of {Path(path).name}" if start else f"the rows of {Path(path).name}"
            rows = array[start : start + ROWS_A_CHUNK]
            how: dict[str, Any] = {"keep_integers": not float_inputs, "dtype": getattr(torch, dtype)}
            yield _for_embeddings((to_inputs(rows, asked=setting, called=called, **how),))[0]


def _for_embeddings(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    inputs, *targets = rows
    are_tokens = inputs.dim() == 2 and inputs.dtype in SMALL_INTEGERS  # torch's embeddings need int32
    return (inputs.int() if are_tokens else inputs, *targets)


def _array(found: Arrays, key: str, path: str, name: str, other: str, suffix: str) -> tuple[Any, str]:
    """Return an array and its name in errors. Raises: RunnerError; `other`, the second array, is not suggested."""
    file, wanted = Path(path).name, name + suffix
    if TABLE in found:
        return found[TABLE], f"the array of {file}"
    if wanted not in found:
        names = [each.removesuffix(suffix) for each in found if each.endswith(suffix) and each != other + suffix]
        ways = [f"{key}={hit}" for hit in nearest(name, names) or names]
        problem = f"`{file}` has no array `{wanted}`; it has {', '.join(found) or 'no arrays'}"
        fix = f"use a file with an array `{wanted}`"
        raise RunnerError.suggest(f"{key}={name}", problem, ways, fix, code="unknown-option")
    return found[wanted], f"array {wanted} of {file}"


def _pair(x: Any, y: Any, path: str, settings: dict[str, Any], suffix: str, like: Source | None = None) -> Source:
    (inputs, first), (targets, second) = at_once(lambda: x(suffix), lambda: y(suffix))
    names = ArrayNames(f"data.path={path}", first, second)
    source = from_arrays(inputs, targets, name=Path(path).stem, names=names, like=like, **settings)
    return replace(source, origin=path)


def _from_table(table: Any, path: str, settings: dict[str, Any]) -> Source:
    setting = f"data.path={path}"
    if table.ndim != 2 or table.shape[1] < 2:
        problem = f"the array has the shape {table.shape}; without `data.targets_path` the targets are the last column of a table"
        raise RunnerError.of(setting, problem, "use `data.targets_path=FILE.npy`")
    targets, origin = table[:, -1], path
    if settings["kind"] == "auto" and table.dtype.kind in "fiu":
        values = np.unique(targets)
        are_classes = len(values) <= MOST_CLASSES_IN_A_COLUMN and np.array_equal(values, np.round(values))
        reason = f"{len(values)} classes in its last column" if are_classes else "its last column is a regression's"
        settings |= {"kind": "classification" if are_classes else "regression"}
        origin = f"{path} (auto: {reason})"
    names = ArrayNames(setting, "the columns but the last", "the last column")
    source = from_arrays(table[:, :-1], targets, name=Path(path).stem, names=names, **settings)
    return replace(source, origin=origin)
