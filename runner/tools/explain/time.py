"""`explain RUN --time`: where a run's time went, from its summary.json; `--trace`: a trace of its first steps, taken again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from runner.config.importing import loading
from runner.errors import RunnerError
from runner.experiment.context import RunContext
from runner.experiment.directory import temporary_folder
from runner.experiment.summary import NAMES, OUTSIDE, Summary
from runner.experiment.terminal import Terminal, short
from runner.runs import find

MIN_SHARE = 0.0005  # of the total, to be shown
TRACED_STEPS, STEPS_BEFORE = 20, 10
#: of the short run that is traced
SHORT_RUN = (
    f"train.num_steps={TRACED_STEPS + STEPS_BEFORE}",
    f"train.profile={TRACED_STEPS}",
    "train.clocked_steps=null",
    "train.max_seconds=null",
    "train.evaluate_every_steps=null",
    "train.keep_checkpoints=null",
    "train.hooks=[]",
    "tracking.enabled=false",
)
KEYS = ("time", "step", "seconds", "num_steps", "device", "status")


def time_of(wanted: str) -> dict[str, Any]:
    """Return a run's directory, and the times in its summary. Raises: RunnerError for a run without them."""
    folder = find.find(wanted, verb="explain")
    summary = Summary.read(folder)
    if not summary.time:
        problem = "the run's `summary.json` has no times: the run did not end, or an earlier version wrote it"
        raise RunnerError.of(f"explain {wanted} --time", problem, f"run `python -m runner explain {wanted} --trace`")
    return {"folder": str(folder), **{key: getattr(summary, key) for key in KEYS}}


def show_time(found: Mapping[str, Any]) -> None:
    """Print what `time_of` returned as a tree."""
    time, step, screen = found["time"], found["step"], Terminal(soft_wrap=False)
    total = sum(time.values())
    trained = sum(seconds for name, seconds in time.items() if name not in OUTSIDE)
    head = f"{short(Path(found['folder']))}: {total:.2f} s on {found['device']}, {found['num_steps']:,} steps"
    tree = Tree(Text(head))
    shown = {name: time[name] for name in NAMES if time.get(name, 0.0) >= MIN_SHARE * total}
    training: Tree | None = None
    for name, seconds in shown.items():
        if name in OUTSIDE:
            tree.add(_line(name, seconds, total))
            continue
        if training is None:
            training = tree.add(_line("training", trained, total))
        training.add(_line(name, seconds, trained))
    screen.print(tree)
    if step:
        of_parts = ", ".join(f"{name} {seconds * 1e6:,.0f}" for name, seconds in step["parts"].items())
        line = f"a step: {step['seconds'] * 1e6:,.0f} us ({of_parts}), by {step['clocked']} that were clocked"
        screen.print(Text(line))


def _line(name: str, seconds: float, of: float) -> Text:
    return Text(f"{seconds:8.2f} s {seconds / of:6.1%}  {name:<12}{NAMES.get(name, '')}".rstrip())


def trace(wanted: str, overrides: list[str]) -> dict[str, Any]:
    """Run the first steps of a run's configuration again, and write their trace to profile/ in its directory.

    overrides: of the configuration, such as device=.
    Raises: RunnerError for a run that is not here, or can't be run here.
    """
    with loading():
        from runner.experiment.check import composed
        from runner.experiment.console import Screen
        from runner.experiment.run import run
        from runner.training.profile import FOLDER, TABLE, TRACE
    folder = find.find(wanted, verb="explain").absolute()
    cfg, _ = composed(["-cd", str(folder), "-cn", "rerun"], [*SHORT_RUN, *overrides])
    with temporary_folder(folder) as place:
        done = run(cfg, place, context=RunContext(screen=Screen(Console(quiet=True))))
        if done.status != "finished":
            problem = f"its first steps failed when repeated: {done.error}"
            asked = f"explain {wanted} --trace"
            raise RunnerError.suggest(asked, problem, [f"python -m runner {asked} device=cpu"])
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        shutil.copytree(place / FOLDER, folder / FOLDER)
    trace, table, last = folder / FOLDER / TRACE, folder / FOLDER / TABLE, done.num_steps
    print(f"trace   of steps {max(1, last - TRACED_STEPS + 1)} to {last}: {trace}, for https://ui.perfetto.dev")
    print(f"longest operations: {table}")
    return {"trace": str(trace), "operations": str(table), "last_step": last}
