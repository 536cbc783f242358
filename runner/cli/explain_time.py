"""`explain RUN --time` and `--trace`: where a run's time went, and a trace of its first steps, taken once more."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from runner.cli.check_first import check, passing_folder
from runner.config import override_errors
from runner.config.compose import composed_with, composer
from runner.config.importing import loading
from runner.errors import Problem, RunnerError

TRACED_STEPS, STEPS_BEFORE = 20, 10
#: of a run that is taken up for a trace alone
SHORT = (
    f"train.num_steps={TRACED_STEPS + STEPS_BEFORE}",
    f"train.profile={TRACED_STEPS}",
    "train.clocked_steps=null",
    "train.max_seconds=null",
    "train.evaluate_every_steps=null",
    "train.keep_checkpoints=null",
    "train.hooks=[]",
    "tracking.enabled=false",
)


def explain_time(wanted: str) -> dict[str, Any]:
    """The tree, on the screen."""
    from runner.runs.time_tree import show_time, time_of

    show_time(found := time_of(wanted))
    return found


def trace(wanted: str, overrides: list[str]) -> dict[str, Any]:
    """Steps 11 to 30 of the run's configuration, traced; they are the run's, as far as the device gives the same numbers.

    Writes profile/ in the run's folder. overrides: of the configuration, such as device=.
    Raises: RunnerError for a run that can't be had here.
    """
    from runner.runs import find

    folder = find.find(wanted, verb="explain").absolute()
    compose, words = composer(["-cd", str(folder), "-cn", "rerun"]), [*SHORT, *overrides]
    with override_errors.explained(words, compose=compose, check=check):
        cfg = composed_with(compose, words)
    with loading():
        from rich.console import Console

        from runner.experiment.console import Screen
        from runner.experiment.context import RunContext
        from runner.experiment.run import run
        from runner.training.profile import FOLDER, TABLE, TRACE
    passing = passing_folder(folder)
    try:
        done = run(cfg, passing, context=RunContext(screen=Screen(Console(quiet=True))))
        if done.status != "finished":
            problem = f"its first steps failed when repeated: {done.error}"
            raise RunnerError(Problem(f"explain {wanted} --trace", problem, f"explain {wanted} --trace device=cpu"))
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        shutil.copytree(passing / FOLDER, folder / FOLDER)
    finally:
        shutil.rmtree(passing, ignore_errors=True)
    file = folder / FOLDER / TRACE
    last = done.num_steps
    print(f"trace   of steps {max(1, last - TRACED_STEPS + 1)} to {last}: {file}, for https://ui.perfetto.dev")
    print(f"longest operations: {Path(file).with_name(TABLE)}")
    return {"trace": str(file), "operations": str(Path(file).with_name(TABLE)), "last_step": last}
