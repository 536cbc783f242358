"""What run() needs in a notebook: its result with a picture, code that was edited, and a way to stop."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import Problem, RunnerError

if TYPE_CHECKING:
    import pandas

#: a module of the person's, by name: when its file was written, as far as it was loaded
_loaded: dict[str, int] = {}


class Result(dict[str, Any]):
    """What summary.json holds, and `folder`. As a cell's last line it shows the picture of the loss."""

    def __init__(self, summary: dict[str, Any], folder: Path) -> None:
        super().__init__(summary, folder=str(folder))
        self.folder = folder

    @property
    def history(self) -> pandas.DataFrame:
        """Every point of the journal: a row per step, a column per metric, NaN if a metric has no value at a step.

        A learning rate has a value only at the steps where it changes, so `history["train/lr"].ffill()` fills in the others.
        """
        from runner.runs.history import table  # numpy: not on the way to --help
        from runner.tracking.journal_reader import read_series

        return table(read_series(self.folder))

    def _repr_png_(self) -> bytes | None:
        picture = self.folder / "plots" / "loss.png"
        return picture.read_bytes() if picture.is_file() else None


def overrides_of(overrides: str | Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Split a line into its overrides. Raises: RunnerError for keyword arguments."""
    if values:
        given = ", ".join(f"{key}={value!r}" for key, value in values.items())
        fix = f"run({[f'{key}={value}' for key, value in values.items()]})"
        raise RunnerError(Problem.suggest(f"run({given})", "run() takes overrides, KEY=VALUE in a list", [fix], fix))
    return shlex.split(overrides) if isinstance(overrides, str) else list(overrides)


def refuse_in_own_process() -> None:
    """Raises: RunnerError where the script that calls run() is loaded by a process that it started, as one that reads data loads
    it where processes are no forks: each would train, too, and leave a run that failed."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            asked = f"run() in {Path(frame.f_code.co_filename).name}"
            problem = "the processes that read its data load the script themselves, and each would begin a run"
            raise RunnerError(Problem(asked, problem, "if __name__ == '__main__': before it, or data.num_workers=0"))
        frame = frame.f_back


def forget_edited() -> None:
    """Has the person's modules loaded anew where a file of theirs was edited since: all of them, as they hold each other's names.

    A module that was imported before the first call counts as loaded then.
    """
    own = _own_modules()
    if any(_loaded.setdefault(name, written) != written for name, written in own.items()):
        for name in own:
            module = sys.modules.pop(name)
            if cached := getattr(module, "__cached__", None):
                # an edit within the second, of the same size, would pass for no edit
                Path(cached).unlink(missing_ok=True)
            del _loaded[name]
        importlib.invalidate_caches()


def note_loaded() -> None:
    """Remembers what is loaded by now."""
    for name, written in _own_modules().items():
        _loaded.setdefault(name, written)


def _own_modules() -> dict[str, int]:
    here, own = os.path.join(Path.cwd(), ""), {}  # noqa: PTH118  # of thousands of modules few are asked for more than this
    # in a home that is the current folder
    pythons = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is None or not file.startswith(here) or name == "__main__" or name.partition(".")[0] == "runner":
            continue
        path = Path(file)
        if file.startswith(pythons) or {"site-packages", "dist-packages"} & {*path.parts}:
            continue
        if path.suffix == ".py" and path.is_file():
            own[name] = path.stat().st_mtime_ns
    return own
