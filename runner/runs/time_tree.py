"""Reads where a run's time went from its summary.json, and shows it as a tree. For `explain RUN --time` (cli/explain_time.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from runner.errors import Problem, RunnerError
from runner.experiment.summary import read_summary
from runner.experiment.terminal import Terminal, short
from runner.experiment.time_spent import AROUND, NAMES
from runner.runs import find

LEAST_SHOWN = 0.0005
KEYS = ("time", "step", "advice", "seconds", "num_steps", "device", "status")


def time_of(wanted: str) -> dict[str, Any]:
    """Of a run by any of its names: its folder, and what its summary says of its time.

    Raises: RunnerError for a run that has not ended, or is of a version that did not clock its steps.
    """
    folder = find.find(wanted, verb="explain")
    summary = read_summary(folder)
    if not summary.get("time"):
        problem = "its summary.json says nothing of its time: it did not end, or an earlier version wrote it"
        raise RunnerError(Problem(f"explain {wanted} --time", problem, f"python -m runner explain {wanted} --trace"))
    return {"folder": str(folder), **{key: summary.get(key) for key in KEYS}}


def show_time(found: Mapping[str, Any]) -> None:
    """found: of time_of()."""
    time, step, screen = found["time"], found["step"], Terminal(soft_wrap=False)
    total = sum(time.values())
    trained = sum(seconds for name, seconds in time.items() if name not in AROUND)
    tree = Tree(
        Text(f"{short(Path(found['folder']))}: {total:.2f} s on {found['device']}, {found['num_steps']:,} steps")
    )
    shown = {name: time[name] for name in NAMES if time.get(name, 0.0) >= LEAST_SHOWN * total}
    training: Tree | None = None
    for name, seconds in shown.items():
        if name in AROUND:
            tree.add(_line(name, seconds, total))
            continue
        if training is None:
            training = tree.add(_line("training", trained, total))
        training.add(_line(name, seconds, trained))
    screen.print(tree)
    if step:
        of_parts = ", ".join(f"{name} {seconds * 1e6:,.0f}" for name, seconds in step["parts"].items())
        screen.print(
            Text(f"a step: {step['seconds'] * 1e6:,.0f} us ({of_parts}), by {step['clocked']} that were clocked")
        )
    if found["advice"]:
        screen.print(Text(f"faster: {found['advice']['words']}"))


def _line(name: str, seconds: float, of: float) -> Text:
    return Text(f"{seconds:8.2f} s {seconds / of:6.1%}  {name:<12}{NAMES.get(name, '')}".rstrip())
