"""The metrics of a search (hydra.sweeper.metric), their directions, and each job's values."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from runner.errors import Problem, nearest
from runner.experiment.summary import Summary
from runner.tasks.metric_names import REPORTED, is_of_a_class, is_rising, metrics_of

SPLITS = ("train", "val", "test")
#: data sets without their own val or test split
WITHOUT_SPLITS = ("runner.data.digits", "runner.data.synthetic")
SPEEDS = ("speed/samples_per_second", "speed/steps_per_second")

Goals = tuple[dict[str, str], ...]  # as the ledger has them: {"metric": ..., "direction": ...}


def read_goals(metric: Any, direction: Any) -> tuple[Goals, list[Problem]]:
    """Return the objectives and their problems; a missing direction follows from the metric's name."""
    metrics = [metric] if isinstance(metric, str) else list(metric)
    usual = ["maximize" if is_rising(name) else "minimize" for name in metrics]
    directions = [direction] if isinstance(direction, str) else direction
    directions = [None] * len(metrics) if directions is None else directions
    problems = []
    if len(directions) != len(metrics):
        problem = f"there are {len(metrics)} metrics ({', '.join(metrics)}) and {len(directions)} directions"
        fix = f"use `hydra.sweeper.direction={_listed(usual)}`, or null"
        problems.append(Problem(f"hydra.sweeper.direction={_listed(directions)}", problem, fix))
        directions = usual
    for name in {name for name in metrics if metrics.count(name) > 1}:
        source = f"hydra.sweeper.metric={_listed(metrics)}"
        problems.append(Problem(source, f"`{name}` is listed twice", f"name `{name}` once"))
    each = zip(metrics, directions, usual, strict=True)
    return tuple({"metric": name, "direction": way or default} for name, way, default in each), problems


def goal_problems(goals: Goals, config: Any, swept: Collection[str]) -> list[Problem]:
    """Return the metrics that no job has. config: Common to all jobs. swept: The keys that differ between them."""
    task, data = (None if key in swept else str(config[key].get("_target_")) for key in ("task", "data"))
    reported = None if any(key.startswith("task.") for key in swept) else REPORTED.get(str(task))
    names = {split: metrics_of(config.task, reported or ("loss",), whole=split != "train") or () for split in SPLITS}
    known = [*(f"{split}/{name}" for split in SPLITS for name in names[split]), *SPEEDS]
    problems = []
    for name in (goal["metric"] for goal in goals):
        split, _, leaf = name.partition("/")
        source = f"hydra.sweeper.metric={name}"
        is_known = name in known or (split in ("val", "test") and is_of_a_class(leaf, config.task))
        if split not in (*SPLITS, "speed") or not leaf or ((split == "speed" or reported) and not is_known):
            likely = [hit for hit in (f"val/{name}", f"val/{leaf}") if hit in known]
            hits = dict.fromkeys([*likely, *nearest(name, known, cutoff=0.6)])
            problem = f"no job has a metric `{name}`; there are {', '.join(known)}" + ("" if reported else ", ...")
            ways = [f"hydra.sweeper.metric={hit}" for hit in [*(hits or known)][:3]]
            problems.append(Problem.suggest(source, problem, ways))
        elif data in WITHOUT_SPLITS and split in ("val", "test") and config.data[f"{split}_fraction"] == 0:
            problem = f"`data.{split}_fraction=0` leaves no rows to measure `{name}`"
            fix = f"use `data.{split}_fraction=0.1`, or `hydra.sweeper.metric=train/{leaf}`"
            problems.append(Problem(source, problem, fix))
    return problems


def values_of(summary: Summary, goals: Goals) -> tuple[list[float] | None, str]:
    """Return the value of a finished job: of its best epoch if that was chosen by this metric, else the last value.

    Returns None and the reason if it can't be compared.
    """
    best, metrics = summary.best, summary.metrics
    values = []
    for name in (goal["metric"] for goal in goals):
        kept = best.get("value") if best.get("metric") == name else None
        value = metrics.get(name) if kept is None else kept
        if value is None:
            return None, f"it has no metric {name}; it has {', '.join(sorted(metrics)) or 'none'}"
        if math.isnan(value):
            return None, f"its {name} is nan"
        values.append(float(value))
    return values, ""


def kept_by(goals: Goals, config: Any) -> tuple[str, ...]:
    """Return overrides that make a run choose its best epoch by the objective, unless the user set `train.best`.

    The default is val/loss; the best epoch can't depend on a train/ or test/ metric.
    """
    name, direction = goals[0]["metric"], goals[0]["direction"]
    stopping = config.train.early_stopping
    is_default = (name, direction) == ("val/loss", "minimize")
    if is_default or not name.startswith("val/") or stopping.metric or stopping.mode:
        return ()
    mode = "max" if direction == "maximize" else "min"
    return f"train.early_stopping.metric={name}", f"train.early_stopping.mode={mode}"


def _listed(words: Sequence[Any]) -> str:
    texts = ["null" if word is None else str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"
