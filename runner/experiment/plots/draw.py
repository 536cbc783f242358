"""Draws the pictures that suit a task, from what a model said of a split: finds the module of each, and says what failed.

Called by figures.py. Another picture: a module here, its name in _drawing() and in tasks/metric_names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from runner.errors import first_line
from runner.experiment.plots import boundary, calibration, confusion, generated, residuals, roc, samples
from runner.experiment.plots.predictions import Results

Draw = Callable[[Results, Path], bool]


def draw_results(
    results: Results, folder: Path, *, wanted: Sequence[str], say: Callable[[str], None] = print
) -> list[Path]:
    """The wanted pictures that make sense of these results; returns their files, about 0.15 s each.

    wanted: names as in runner.tasks.metric_names.PLOTS. say: told, in a line, of a picture that failed. Raises nothing.
    """
    drawn = []
    for name in wanted:
        path = folder / f"{name}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if _drawing(name)(results, path):
                drawn.append(path)
        except Exception as error:
            say(f"plots: {path.name} left out: {type(error).__name__}: {first_line(error)}")
    return drawn


def _drawing(name: str) -> Draw:
    return {
        "confusion": confusion.draw,
        "roc": roc.draw,
        "calibration": calibration.draw,
        "residuals": residuals.draw,
        "samples": samples.draw,
        "reconstructions": samples.draw_reconstructions,
        "boundary": boundary.draw,
        "generated": generated.draw,
    }[name]
