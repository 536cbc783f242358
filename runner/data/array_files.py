"""Opens a file of arrays (npz, npy, safetensors); each array is read by its name, when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from runner.config.identity import as_typed
from runner.config.packages import not_installed
from runner.errors import Problem, RunnerError, first_line, nearest_files

#: what the only array of a npy file is called
TABLE = ""
ENDINGS = (".npz", ".npy", ".safetensors")
#: how such files begin; what begins otherwise NumPy takes for a pickle, and says so
BEGINNINGS = {".npy": b"\x93NUMPY", ".npz": b"PK"}
Opened = tuple[dict[str, tuple[int, ...]], Callable[[str], Any]]


class Arrays(Mapping[str, Any]):
    """The arrays of one file: names and shapes at once, an array when it is asked for."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], read: Callable[[str], Any], *, file: Path, key: str) -> None:
        self.shapes, self._read, self._file, self._key = shapes, read, file, key

    def __getitem__(self, name: str) -> Any:
        """Reads it. Raises: RunnerError when that can't be done."""
        with _explained(self._file, self._key):
            return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # Mapping's own would read the array

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@contextmanager
def opened(path: str, *, key: str) -> Iterator[Arrays]:
    """The arrays of an npz, npy or safetensors file, as long as the block lasts; a npy file's one is called TABLE.

    npy is mapped into memory, so that only what is used is read. Pickled objects are refused.
    Raises: RunnerError for a file that is missing, of another kind or unreadable.
    """
    file = existing(path, key=key)
    if file.suffix not in ENDINGS:
        problem = f"files {f'that end in `{file.suffix}`' if file.suffix else 'without an ending'} can't be read"
        raise RunnerError.of(f"{key}={path}", problem, "use a file that ends in `.npz`, `.npy` or `.safetensors`")
    with ExitStack() as stack:
        with _explained(file, key):
            if file.suffix == ".safetensors":
                shapes, read = _safetensors(file, key, stack)
            else:
                stream = stack.enter_context(file.open("rb"))  # NumPy leaves a broken file open
                shapes, read = _npz(stream) if file.suffix == ".npz" else _npy(stream, file)
        yield Arrays(shapes, read, file=file, key=key)


def existing(path: str, *, key: str) -> Path:
    """The file at `path`. Raises: RunnerError with the nearest names in that folder."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    sought = file / file.name if file.is_dir() else file
    otherwise = f"use `{key}=FILE` with a file that ends in `.npz`, `.npy` or `.safetensors`"
    problem = no_such_file(f"{key}={path}", sought, key, lambda item: item.suffix in ENDINGS, otherwise)
    raise RunnerError(replace(problem, message=f"`{file}` is a directory") if file.is_dir() else problem)


def no_such_file(source: str, file: Path, key: str, is_wanted: Callable[[Path], bool], otherwise: str) -> Problem:
    """Return the error of a path without a file, with the nearest names; without one, the help is `otherwise`."""
    folder, ways = file.parent, [as_typed(key, hit) for hit in nearest_files(file, is_wanted)]
    problem = f"there is no file `{file.name}` in {folder.resolve()}"
    if not folder.is_dir():
        problem = f"there is no directory `{folder}`"
        otherwise = f"use `{key}=FILE`, relative to the current directory ({Path.cwd()})"
    return Problem.suggest(source, problem, ways, otherwise, code="missing-file")


def _npz(stream: BinaryIO) -> Opened:
    _check_beginning(stream, ".npz")
    found = np.load(stream, allow_pickle=False)
    members = {name: name if name in found.zip.namelist() else f"{name}.npy" for name in found.files}
    shapes = {}
    for name, member in members.items():
        with found.zip.open(member) as inside:
            shapes[name] = _shape(inside)
    return shapes, found.__getitem__


def _npy(stream: BinaryIO, file: Path) -> Opened:
    _check_beginning(stream, ".npy")
    shape = _shape(stream)
    # copy on write: torch warns of memory that can't be written to, and nobody writes to the file
    found = np.load(file, mmap_mode=None if 0 in shape else "c", allow_pickle=False)  # nothing can't be mapped
    return {TABLE: shape}, lambda _: found


def _safetensors(file: Path, key: str, stack: ExitStack) -> Opened:
    try:
        from safetensors import safe_open  # an optional package
    except ImportError:
        problem = "reading `.safetensors` needs a package that is not installed"
        raise not_installed(f"{key}={file}", problem, "safetensors") from None
    found = stack.enter_context(safe_open(file, framework="pt"))
    return {name: tuple(found.get_slice(name).get_shape()) for name in list(found.keys())}, found.get_tensor


def _shape(stream: IO[bytes]) -> tuple[int, ...]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return tuple(read(stream)[0])


def _check_beginning(stream: BinaryIO, ending: str) -> None:
    beginning = stream.read(8)
    stream.seek(0)
    if not beginning.startswith(BEGINNINGS[ending]):
        raise ValueError(f"it does not begin as {ending} files do" if beginning else "it is empty")


@contextmanager
def _explained(file: Path, key: str) -> Iterator[None]:
    try:
        yield
    except RunnerError:
        raise
    except Exception as error:
        raise RunnerError(_unreadable(file, f"{key}={file}", error)) from error


def _unreadable(file: Path, asked: str, error: Exception) -> Problem:
    if isinstance(error, PermissionError):
        return Problem(asked, f"no permission to read `{file}`", f"run `chmod u+r {file}`")
    if "pickle" in str(error) or "Python objects" in str(error):
        problem = f"`{file.name}` holds Python objects, which could run code when they are read"
        return Problem(asked, problem, "save arrays of numbers or texts")
    message = first_line(error)
    problem = f"`{file.name}` can't be read as `{file.suffix}`: {message}"
    return Problem(asked, problem, "use a complete file, saved by numpy or safetensors")
