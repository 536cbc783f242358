"""`python -m runner report`: prints a sweep's table once more, and makes its files anew."""

from __future__ import annotations

from pathlib import Path

from runner.config.trust import check_folder
from runner.errors import RunnerError
from runner.experiment.terminal import Terminal
from runner.sweep.jobs import ledger
from runner.sweep.report import build, text

ROOT = Path("multirun")


def show(folder: Path | None) -> Path:
    """Returns the sweep's folder. None: the last sweep below multirun/."""
    found = folder if folder is not None else ledger.find_last(ROOT)
    if found is None:
        problem = f"there is no sweep in {ROOT.absolute()}"
        raise RunnerError.of(
            "report", problem, "run `python -m runner -m KEY=VALUE1,VALUE2`, or name a sweep's directory"
        )
    check_folder(found)
    console = Terminal()
    text.show(build.write(found), console)
    console.print(f"report  {found / 'report.html'}", markup=False)
    return found
