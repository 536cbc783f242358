"""Makes a Source of a file of arrays (npz, npy, safetensors): `data=arrays`. Reads inputs for predictions, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from runner.config.checks import no_such_file
from runner.config.packages import not_installed
from runner.data.conversion import Called, Conversion, Kind, to_inputs
from runner.data.source import GIVEN, Source, from_arrays
from runner.data.vision.augment import Augmentations, augmented
from runner.data.vision.images import normalised
from runner.errors import Problem, RunnerError, at_once, first_line, nearest

ENDINGS = (".npz", ".npy", ".safetensors")
FIX = "a file that ends in `.npz`, `.npy` or `.safetensors`"
READER = "runner.data.array_inputs"
#: the name of the only array of a npy file
UNNAMED = ""
#: bytes of a npy file from which it is mapped into memory, and rows that a prediction reads at a time
MAPPED_BYTES, ROWS_A_CHUNK = 2**20, 65_536
IMAGE_DIMS = 4  # (N, C, H, W)
SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16)


def arrays(
    path: str,
    inputs: str = "x",
    *,
    targets: str = "y",
    targets_path: str | None = None,
    kind: Kind = "auto",
    float_inputs: bool = True,
    augment: Augmentations = None,
    dtype: str = "float32",
) -> Source:
    """Return the arrays `inputs` (N, ...) and `targets` (N,) or (N, T) of a file.

    If the file has x_train and y_train instead of x and y, they are used, and x_val, y_val, x_test and y_test are its own
    splits.

    Args:
        targets_path: Another file for the targets, as a npy needs it.
        kind: classification, regression, or auto (floats are a regression, all else classes).
        float_inputs: False keeps integers: rows of tokens (small ones become int32, as embeddings need it), and images
            (C, H, W) of bytes, which a layer in front of the model normalizes.
        augment: Of images (C, H, W); see runner.data.vision.augment.
        dtype: Of all other numbers: float32, or float64 (train.precision=fp64).

    Raises:
        RunnerError: The file is missing, can't be read or lacks an array, or holds NaN.
    """
    conversion = Conversion(getattr(torch, dtype), keeps_integers=not float_inputs)
    setting, given = f"data.path={path}", {}
    with ExitStack() as stack:
        file = others = stack.enter_context(opened(path, key="data.path"))
        if targets_path is not None:
            others = stack.enter_context(opened(targets_path, key="data.targets_path"))
        elif UNNAMED in file.names:
            problem = f"`{Path(path).name}` has one array, and no targets"
            fix = "use `data.targets_path=FILE.npy`, or a `.npz` with the arrays `x` and `y`"
            raise RunnerError.of(setting, problem, fix)

        def split(suffix: str, like: Source | None = None) -> Source:
            (x, x_name), (y, y_name) = at_once(
                lambda: _array(file, "data.inputs", inputs, targets, suffix),
                lambda: _array(others, "data.targets", targets, inputs, suffix),
            )
            how: dict[str, Any] = {"name": Path(path).stem, "kind": kind, "conversion": conversion, "like": like}
            return from_arrays(x, y, **how, called=(Called(setting, x_name), Called(setting, y_name)))

        is_split = file is others and not {inputs, targets} & set(file.names) and f"{inputs}_train" in file.names
        source = split("_train" if is_split else "")
        for name in GIVEN if is_split else ():
            if {f"{inputs}_{name}", f"{targets}_{name}"} & set(file.names):
                given[name] = _for_embeddings(split(f"_{name}", source).rows)
    are_images = source.rows[0].dtype == torch.uint8 and source.rows[0].dim() == IMAGE_DIMS
    reader = {"_target_": READER, "_partial_": True, "inputs": inputs, "float_inputs": float_inputs}
    if dtype != "float32":
        reader["dtype"] = dtype
    around, rows = normalised if are_images else None, _for_embeddings(source.rows)
    return augmented(replace(source, rows=rows, given=given, origin=path, around=around, reader=reader), augment)


def array_inputs(
    path: str, *, inputs: str = "x", float_inputs: bool = True, dtype: str = "float32"
) -> Iterator[Tensor]:
    """Yield the rows, (n, ...), of the array called `inputs`, or of the only one, as arrays() reads them. Raises: RunnerError."""
    setting, name = f"--input {path}", Path(path).name
    with opened(path, key="--input") as file:
        if inputs not in file.names and len(file.names) != 1:
            problem = f"`{name}` has no array `{inputs}`; it has {', '.join(file.names) or 'no arrays'}"
            raise RunnerError.of(setting, problem, f"save the rows as `{inputs}`", code="unknown-option")
        array = file.read(inputs if inputs in file.names else file.names[0])
        for start in range(0, len(array), ROWS_A_CHUNK) if array.ndim else ():
            called = f"rows {start + 1:,} and on of {name}" if start else f"the rows of {name}"
            how: dict[str, Any] = {"keep_integers": not float_inputs, "dtype": getattr(torch, dtype)}
            rows = to_inputs(array[start : start + ROWS_A_CHUNK], Called(setting, called), **how)
            yield _for_embeddings((rows,))[0]


class ArrayFile(NamedTuple):
    """An open file."""

    name: str
    names: Sequence[str]  # of its arrays
    read: Callable[[str], Any]  # returns one of them, or raises a RunnerError if the file is damaged


@contextmanager
def opened(path: str, *, key: str) -> Iterator[ArrayFile]:
    """Open a file of arrays for the block. A large npy is mapped into memory; Python objects are refused. Raises: RunnerError."""
    file = existing(path, key=key)
    if file.suffix not in ENDINGS:
        problem = f"files {f'that end in `{file.suffix}`' if file.suffix else 'without an ending'} can't be read"
        raise RunnerError.of(f"{key}={path}", problem, f"use {FIX}")
    with ExitStack() as stack:
        with _errors_of_the_user(file, key):
            names, load = _names_and_reader(file, key, stack)

        def read(name: str) -> Any:
            with _errors_of_the_user(file, key):
                return load(name)

        yield ArrayFile(file.name, names, read)


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
        archive = np.load(stream, allow_pickle=False)
        return archive.files, archive.__getitem__
    # copy on write, as torch warns of read-only memory
    array = np.load(file, mmap_mode="c" if file.stat().st_size >= MAPPED_BYTES else None, allow_pickle=False)
    return [UNNAMED], lambda _: array


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


def _for_embeddings(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    inputs, *targets = rows
    are_tokens = inputs.dim() == 2 and inputs.dtype in SMALL_INTEGERS  # torch's embeddings need int32
    return (inputs.int() if are_tokens else inputs, *targets)


def _array(file: ArrayFile, key: str, name: str, other: str, suffix: str) -> tuple[Any, str]:
    """Return an array and its name in errors. Raises: RunnerError; `other`, the second array, is not suggested."""
    wanted = name + suffix
    if UNNAMED in file.names:
        return file.read(UNNAMED), f"the array of {file.name}"
    if wanted not in file.names:
        names = [each.removesuffix(suffix) for each in file.names if each.endswith(suffix) and each != other + suffix]
        ways = [f"{key}={hit}" for hit in nearest(name, names) or names]
        problem = f"`{file.name}` has no array `{wanted}`; it has {', '.join(file.names) or 'no arrays'}"
        fix = f"use a file with an array `{wanted}`"
        raise RunnerError.suggest(f"{key}={name}", problem, ways, fix, code="unknown-option")
    return file.read(wanted), f"array {wanted} of {file.name}"
