"""Opens a file of arrays (npz, npy, safetensors), each of which is read when it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.config.identity import as_typed
from runner.config.packages import not_installed
from runner.errors import Problem, RunnerError, first_line, nearest_files

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


def no_such_file(source: str, file: Path, key: str, is_wanted: Callable[[Path], bool], otherwise: str) -> Problem:
    """Return the error of a path without a file, with the nearest names; without one, the help is `otherwise`."""
    folder, ways = file.parent, [as_typed(key, hit) for hit in nearest_files(file, is_wanted)]
    problem = f"there is no file `{file.name}` in {folder.resolve()}"
    if not folder.is_dir():
        problem = f"there is no directory `{folder}`"
        otherwise = f"use `{key}=FILE`, relative to the current directory ({Path.cwd()})"
    return Problem.suggest(source, problem, ways, otherwise, code="missing-file")


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
