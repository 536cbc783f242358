"""A file of arrays goes in (npz, npy, safetensors); a Source comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runner.data.source import Source, as_source, from_arrays
from runner.errors import Fault, RunnerError, nearest

SPLITS = ("train", "val", "test")


def arrays(
    path: str, inputs: str = "x", targets: str = "y", targets_path: str | None = None, kind: str = "auto"
) -> Source:
    """The arrays `inputs` (N, ...) and `targets` (N,) or (N, T) of a file in the person's folder.

    npz and safetensors: by those names; x_train, y_train, x_test, y_test (and _val) are taken as given splits.
    npy: the targets lie in `targets_path`, or in the last column of a table. kind: auto, classification, regression.
    Raises: RunnerError for a file that is missing, unreadable or lacks what is asked for.
    """
    file = _existing(path, "data.path")
    if file.suffix == ".npy":
        return _from_npy(file, path, targets_path, kind)
    if file.suffix == ".npz":
        found: Mapping[str, Any] = _read(file, "data.path", lambda: _numpy(file))
    elif file.suffix == ".safetensors":
        found = _read(file, "data.path", lambda: _safetensors(file))
    else:
        so = f"files of kind {file.suffix or 'without an ending'} are not read here"
        raise RunnerError(Fault(f"data.path={path}", so, "a file that ends in .npz, .npy or .safetensors"))
    if inputs not in found and f"{inputs}_train" in found:
        parts = {
            name: _pair(found, f"{inputs}_{name}", f"{targets}_{name}", file, path, kind)
            for name in SPLITS
            if f"{inputs}_{name}" in found
        }
        return as_source(parts, name=file.stem)
    return _pair(found, inputs, targets, file, path, kind)


def _pair(found: Mapping[str, Any], inputs: str, targets: str, file: Path, path: str, kind: str) -> Source:
    for key, name in (("inputs", inputs), ("targets", targets)):
        if name not in found:
            listed = ", ".join(f"{item} {tuple(found[item].shape)}" for item in found) or "nothing"
            hits = nearest(name, found) or list(found)
            write = " or ".join(f"data.{key}={hit}" for hit in hits[:3]) or "a file with arrays in it"
            raise RunnerError(Fault(f"data.{key}={name}", f"{file.name} has no array {name}; it has {listed}", write))
    return from_arrays(found[inputs], found[targets], name=file.stem, origin=path, kind=kind)


def _from_npy(file: Path, path: str, targets_path: str | None, kind: str) -> Source:
    table = _read(file, "data.path", lambda: _numpy(file))
    if targets_path is not None:
        other = _existing(targets_path, "data.targets_path")
        answers = _read(other, "data.targets_path", lambda: _numpy(other))
        return from_arrays(table, answers, name=file.stem, origin=path, kind=kind)
    if table.ndim != 2 or table.shape[1] < 2:
        so = f"its array is {table.shape}; without data.targets_path the targets are the last column of a table"
        raise RunnerError(Fault(f"data.path={path}", so, "data.targets_path=FILE.npy"))
    answers = table[:, -1]
    if kind == "classification" or (
        kind == "auto" and np.array_equal(answers, answers.round()) and len(np.unique(answers)) <= 100
    ):
        answers = answers.astype(np.int64)
    return from_arrays(table[:, :-1], answers, name=file.stem, origin=path, kind=kind)


def _existing(path: str, key: str) -> Path:
    file = Path(path).expanduser()
    if file.is_file():
        return file
    folder = file.parent
    if file.is_dir():
        so, names = "that is a folder", [f"{path.rstrip('/')}/{item.name}" for item in sorted(file.iterdir())]
    elif not folder.is_dir():
        so, names = f"there is no folder {folder}", []
    else:
        so = f"there is no such file in {folder.resolve().name}/"
        by_name = {item.name: str(item) for item in folder.iterdir()}
        names = [by_name[hit] for hit in nearest(file.name, by_name)] or [
            str(item) for item in sorted(folder.glob("*.np[yz]"))
        ]
    write = " or ".join(f"{key}={name}" for name in names[:3]) or f"{key}=FILE, relative to the current folder"
    raise RunnerError(Fault(f"{key}={path}", so, write))


def _read(file: Path, key: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RunnerError:
        raise
    except PermissionError:
        raise RunnerError(Fault(f"{key}={file}", "you may not read that file", f"chmod u+r {file}")) from None
    except Exception as error:
        if "pickle" in str(error):
            so = "it holds Python objects, which could run code when they are read; only plain arrays are"
            raise RunnerError(
                Fault(f"{key}={file}", so, "the file saved again from arrays of numbers or texts")
            ) from None
        so = f"it can't be read as {file.suffix}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'broken'}"
        raise RunnerError(Fault(f"{key}={file}", so, "a whole file, saved by numpy or safetensors")) from None


def _numpy(file: Path) -> Any:
    """An array (npy) or all of them by name (npz)."""
    with file.open("rb") as opened:  # numpy leaves a broken file open
        found = np.load(opened, allow_pickle=False)
        return dict(found) if file.suffix == ".npz" else found


def _safetensors(file: Path) -> dict[str, Any]:
    try:
        from safetensors.numpy import load_file
    except ImportError:
        so = "reading .safetensors takes a package that is not installed"
        raise RunnerError(Fault(f"data.path={file}", so, 'pip install "runner[safetensors]"')) from None
    return load_file(file)
