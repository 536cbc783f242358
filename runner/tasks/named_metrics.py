"""Makes the torchmetrics objects of the metrics that `task.metrics` names."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from runner.config.other_names import value_for
from runner.config.packages import not_installed
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.tasks.checks import UNKNOWN
from runner.tasks.metric_names import CLASSES, NAMED, metrics_for

BY_NAME = "use `'task.metrics={NAME: {_target_: ...}}'`"


COUNTS = {"multiclass": "num_classes", "multilabel": "num_labels"}


def named_metrics(names: Sequence[str], *, kind: str, num_outputs: int) -> dict[str, Any]:
    """Make torchmetrics objects by name.

    `auroc`, `average_precision` and `spearman` are exact: they keep a whole split on the device.

    Raises:
        RunnerError: For unknown names, an unknown number of classes, and if torchmetrics is missing.
    """
    known = metrics_for(kind)
    refuse([_unknown(name, known, kind) for name in names if name not in known])
    if num_outputs == UNKNOWN and kind != "autoencoding":
        problem = "the number of classes, or of values per example, is not known"
        fix = "use `task.num_classes=10`, or `'task.metrics=[]'`"
        raise RunnerError.of(f"task.metrics=[{','.join(names)}]", problem, fix)
    return {name: _make(name, kind, num_outputs) for name in names}


def _make(name: str, kind: str, num_outputs: int) -> Any:
    named = NAMED[name]
    is_binary = kind == "multiclass" and num_outputs == 2 and named.kinds == CLASSES
    arguments = {key: num_outputs if value is None else value for key, value in named.arguments.items()}
    if kind in COUNTS:
        arguments |= {"validate_args": False}
        arguments |= {} if is_binary else {COUNTS[kind]: num_outputs}
        arguments |= {"average": named.average} if named.average and not is_binary else {}
    if arguments.get("top_k", 0) > num_outputs != UNKNOWN:
        problem = f"`{name}` is always 1 with {num_outputs} classes"
        raise RunnerError.of(f"task.metrics=[{name}]", problem, "use `'task.metrics=[]'`, or another metric")
    module = _module("classification" if kind in COUNTS else "regression")
    prefix = ("Binary" if is_binary else kind.capitalize()) if kind in COUNTS else ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `.*` will save all", UserWarning)  # documented in named_metrics()
        metric = getattr(module, f"{prefix}{named.class_name}")(**arguments)
    if named.average != "none":
        return metric
    return MeanOverPresent(metric, getattr(module, f"{prefix}StatScores")(**arguments), needs_both=named.needs_both)


class MeanOverPresent(nn.Module):
    """The mean of a metric over the classes that have examples, as in scikit-learn; NaN if no class has any.

    torchmetrics (1.8) counts a class that a split lacks as 0.
    """

    def __init__(self, metric: Any, counts: Any, *, needs_both: bool) -> None:
        super().__init__()
        self.metric, self.counts, self.needs_both = metric, counts, needs_both

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.metric.update(predictions, targets)
        self.counts.update(predictions, targets)

    def compute(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)
            values: Tensor = self.metric.compute()  # (C,), or () for two classes
        scores = self.counts.compute()  # (C, 5): true and false positives, true and false negatives, examples
        own, total = scores[..., 4], scores[..., :4].sum(-1)
        counted = (own > 0) & (own < total) if self.needs_both else own > 0
        mean: Tensor = values.where(counted, 0).sum() / counted.sum()
        return mean

    def reset(self) -> None:
        self.metric.reset()
        self.counts.reset()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{name}")
    except ModuleNotFoundError as error:
        problem = f"named metrics need `{error.name}`, which is not installed"
        raise not_installed("task.metrics", problem, "metrics") from None


def _unknown(name: str, known: Sequence[str], kind: str) -> Problem:
    ours = value_for("task.metrics", name)
    ways = [f"task.metrics=[{hit}]" for hit in ([ours] if ours in known else nearest(name, known))]
    otherwise = f"use a metric that conf/README.md lists, or {BY_NAME.removeprefix('use ')}"
    problem = f"there is no metric `{name}` for a task of kind {kind}"
    return Problem.suggest(f"task.metrics=[{name}]", problem, ways, otherwise)
