"""Draws a run's plots at its end: its curves, and the predictions of its best weights for the test split.

Another plot: a function draw_NAME in plots/draw.py, and its name in tasks/metric_names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.importing import loading
from runner.config.instantiate import build
from runner.errors import first_line
from runner.experiment.plots import draw, style
from runner.experiment.plots.curves import draw_curves
from runner.experiment.plots.predictions import Results, collect
from runner.models.generate import sample
from runner.tasks.metric_names import PLOTS
from runner.tasks.task import Predicting, is_predicting
from runner.tracking.journal_reader import Series
from runner.training.parts import Parts
from runner.training.result import Result

Say = Callable[[str], None]


def illustrate(
    parts: Parts, result: Result, folder: Path, *, series: Mapping[str, Series], of: str, say: Say
) -> list[Path]:
    """Draw a run's plots below plots/ of its directory, and return the files. Raises: OSError for curves on a full disk.

    of: Model, data and device, for the titles. say: Called with a line about a plot of predictions that failed.
    """
    plots, task = folder / "plots", parts.task
    best = (result.best.metric, result.best.step) if result.best.value is not None else None
    with loading():
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    drawn = draw_curves(series, plots, title=of, best=best)
    if result.status != "finished" or not is_predicting(task) or parts.shards is not None:
        return drawn
    try:
        is_text = task.kind == "language"
        return drawn + (_write_sample(parts, plots) if is_text else _draw_predictions(parts, task, plots, of, say))
    except Exception as error:  # of a custom task or model
        say(f"plots: left out, {type(error).__name__}: {first_line(error)}")
        return drawn


def _draw_predictions(parts: Parts, task: Predicting, plots: Path, of: str, say: Say) -> list[Path]:
    split, batches = ("test", parts.test) if parts.test is not None else ("val", parts.val)
    wanted = getattr(task, "plots", PLOTS.get(task.kind, ()))
    if batches is None or not wanted:
        return []
    try:
        results = collect(
            parts.kept_model, task, batches.epoch(0), split_rows=batches.num_rows, autocast=parts.precision.autocast
        )
    finally:
        batches.close()
    source, num_rows = parts.source, batches.num_rows
    results = replace(results, classes=source.classes, names=source.targets, split=split, of=of, num_rows=num_rows)
    return draw_results(results, plots, wanted=wanted, say=say)


def _write_sample(parts: Parts, plots: Path) -> list[Path]:
    num_tokens = getattr(parts.task, "sample_tokens", 0)
    if parts.source.reader is None or not num_tokens:
        return []
    reader: Any = build(parts.source.reader, key="data")
    text = sample(parts.kept_model, reader, num_tokens=num_tokens)
    plots.mkdir(parents=True, exist_ok=True)
    (plots / "sample.txt").write_text(text, encoding="utf-8")
    return [plots / "sample.txt"]


def draw_results(results: Results, folder: Path, *, wanted: Sequence[str], say: Say = print) -> list[Path]:
    """Draw the wanted plots (metric_names.PLOTS) that make sense for these results, and return their files. 0.15 s each."""
    drawn = []
    for name in wanted:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            figure = getattr(draw, f"draw_{name}")(results)
            if figure is not None:
                drawn.append(style.save(figure, folder / f"{name}.png"))
        except Exception as error:  # e.g., of values that are not finite
            say(f"plots: {name}.png left out: {type(error).__name__}: {first_line(error)}")
    return drawn
