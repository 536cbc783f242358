"""The state of a run goes in; one file comes out, written whole or not at all, and back again on any device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.background import Background
from runner.errors import Fault, RunnerError


def snapshot(state: Any) -> Any:
    """The state with every tensor copied to the host, so that training may go on while it is written. Waits for the device."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(snapshot(value) for value in state)
    return state


def save(state: dict[str, Any], path: Path) -> None:
    """Writes beside `path`, then renames: a reader or a crash meets the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    with beside.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    if os.name == "posix":  # the rename itself must survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint onto the host, tensors and plain values only (`weights_only=True`): no code in it can run.

    Raises: RunnerError when the file is missing or is no checkpoint.
    """
    if not path.is_file():
        raise RunnerError(
            Fault(f"checkpoint {path}", "there is no such file", "the path of a run's checkpoints/last.pt")
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        so = f"it can't be read as a checkpoint of tensors and plain values: {str(error).splitlines()[0]}"
        raise RunnerError(
            Fault(f"checkpoint {path}", so, "checkpoints/best.pt of the same run, or run it again")
        ) from error
    return state


class Keeper:
    """Writes a run's checkpoints beside training, the newest of each name; one that is overtaken while it waits is skipped."""

    def __init__(self, folder: Path, background: Background) -> None:
        self._folder, self._background = folder, background
        self._waiting: dict[str, dict[str, Any]] = {}
        self.newest: dict[str, dict[str, Any]] = {}  # on the host, by name

    def last(self) -> dict[str, Any] | None:
        """What an earlier process left to go on from, its best weights read too; None when there is nothing."""
        for name in ("best", "last"):
            path = self._folder / f"{name}.pt"
            if path.is_file():
                self.newest[name] = load(path)
        return self.newest.get("last")

    def keep(self, name: str, state: dict[str, Any]) -> None:
        """Takes a snapshot (waits for the device) and returns; the file NAME.pt is written in the background."""
        taken = snapshot(state)
        is_waiting = name in self._waiting
        self._waiting[name] = self.newest[name] = taken
        if not is_waiting:
            self._background.do(lambda: save(self._waiting.pop(name), self._folder / f"{name}.pt"))
