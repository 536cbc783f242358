"""Reads where a run's time went from its summary.json, and shows it as a tree. For `explain RUN --time` (cli/explain_time.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.text import Text
from rich.tree import Tree

from runner.errors import Fault, RunnerError
from runner.experiment.summary import read_summary
from runner.experiment.terminal import Terminal, short
from runner.experiment.time_spent import AROUND, NAMES, rates_in_words
from runner.runs import find

KEYS = ("time", "step", "advice", "seconds", "num_steps", "device", "status")


def time_of(wanted: str) -> dict[str, Any]:
    """Of a run by any of its names: its folder, and what its summary says of its time.

    Raises: RunnerError for a run that has not ended, or is of a version that did not clock its steps.
    """
    folder = find.find(wanted, verb="explain")
    summary = read_summary(folder)
    if not summary.get("time"):
        problem = "its summary.json says nothing of its time: it did not end, or an earlier version wrote it"
        raise RunnerError(Fault(f"explain {wanted} --time", problem, f"python -m runner explain {wanted} --trace"))
    return {"folder": str(folder), **{key: summary.get(key) for key in KEYS}}


def show_time(found: Mapping[str, Any]) -> None:
    """found: of time_of()."""
    time, step, screen = found["time"], found["step"], Terminal(soft_wrap=False)
    total = sum(time.values())
    trained = sum(seconds for name, seconds in time.items() if name not in AROUND)
    tree = Tree(Text(f"{short(Path(found['folder']))}: {total:.2f} s on {found['device']}, {found['status']}"))
    names = [name for name in NAMES if name in time]
    for name in [name for name in names if name == "start-up"]:
        tree.add(_line(name, time[name], total))
    training = tree.add(_line("training", trained, total, note=f"{found['num_steps']:,} steps of the run"))
    for name in [name for name in names if name not in AROUND]:
        training.add(_line(name, time[name], trained))
    for name in [name for name in names if name in AROUND and name != "start-up"]:
        tree.add(_line(name, time[name], total))
    screen.print(tree)
    if step:
        of_parts = ", ".join(f"{name} {seconds * 1e6:,.0f}" for name, seconds in step["parts"].items())
        words = f"a step: {step['seconds'] * 1e6:,.0f} us ({of_parts}), by {step['clocked']} that were clocked"
        screen.print(Text(f"{words}{rates_in_words(step)}"))
    if found["advice"]:
        screen.print(Text(f"faster: {found['advice']['words']}"))


def _line(name: str, seconds: float, of: float, *, note: str = "") -> Text:
    share = f"{seconds / of:6.1%}" if of else ""
    return Text(f"{seconds:8.2f} s {share}  {name:<12}{note or NAMES.get(name, '')}".rstrip())
