"""The metrics that `task.metrics` can name, and the torchmetrics objects that compute them.

To add one, add an entry to `NAMED`, and scikit-learn's value for it to tests/tasks/test_metrics.py.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from runner.config.packages import not_installed
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.tasks.checks import UNKNOWN

BY_NAME = "use `'task.metrics={NAME: {_target_: ...}}'`"


@dataclass(frozen=True)
class Named:
    """How torchmetrics computes a named metric.

    Args:
        class_name: The class in torchmetrics.
        arguments: Its arguments, without the number of classes. None is the number of outputs.
        counts: The class that counts each class's examples, if the metric is the mean over the classes that a split has.
        needs_both: Leave out classes to which every example belongs, too: a ROC curve needs both outcomes.
    """

    class_name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    counts: str = ""
    needs_both: bool = False


MACRO: dict[str, Any] = {"average": "macro"}
PER_CLASS: dict[str, Any] = {"average": "none"}
#: for two classes, the second of which is the positive one, as in scikit-learn
BINARY = {
    "f1": Named("BinaryF1Score"),
    "precision": Named("BinaryPrecision"),
    "recall": Named("BinaryRecall"),
    "specificity": Named("BinarySpecificity"),
    "auroc": Named("BinaryAUROC", counts="BinaryStatScores", needs_both=True),
    "average_precision": Named("BinaryAveragePrecision"),
    "iou": Named("BinaryJaccardIndex"),
}
#: by the kind of task
NAMED = {
    "multiclass": {
        "f1": Named("MulticlassF1Score", MACRO),
        "precision": Named("MulticlassPrecision", MACRO),
        "recall": Named("MulticlassRecall", MACRO),
        "specificity": Named("MulticlassSpecificity", MACRO),
        "balanced_accuracy": Named("MulticlassAccuracy", PER_CLASS, counts="MulticlassStatScores"),
        "top3": Named("MulticlassAccuracy", {"top_k": 3, "average": "micro"}),
        "top5": Named("MulticlassAccuracy", {"top_k": 5, "average": "micro"}),
        "auroc": Named("MulticlassAUROC", PER_CLASS, counts="MulticlassStatScores", needs_both=True),
        "average_precision": Named("MulticlassAveragePrecision", MACRO),
        "iou": Named("MulticlassJaccardIndex", MACRO),
        "mcc": Named("MulticlassMatthewsCorrCoef"),
        "kappa": Named("MulticlassCohenKappa"),
        "calibration_error": Named("MulticlassCalibrationError", {"n_bins": 15}),
    },
    "multilabel": {
        "f1": Named("MultilabelF1Score", MACRO),
        "precision": Named("MultilabelPrecision", MACRO),
        "recall": Named("MultilabelRecall", MACRO),
        "specificity": Named("MultilabelSpecificity", MACRO),
        "auroc": Named("MultilabelAUROC", PER_CLASS, counts="MultilabelStatScores", needs_both=True),
        "average_precision": Named("MultilabelAveragePrecision", MACRO),
        "iou": Named("MultilabelJaccardIndex", MACRO),
        "exact_match": Named("MultilabelExactMatch"),
    },
    "regression": {
        "r2": Named("R2Score"),
        "mape": Named("MeanAbsolutePercentageError"),
        "smape": Named("SymmetricMeanAbsolutePercentageError"),
        "explained_variance": Named("ExplainedVariance"),
        "pearson": Named("PearsonCorrCoef", {"num_outputs": None}),
        "spearman": Named("SpearmanCorrCoef", {"num_outputs": None}),
    },
    "autoencoding": {"r2": Named("R2Score"), "explained_variance": Named("ExplainedVariance")},
}
COUNTS = {"multiclass": "num_classes", "multilabel": "num_labels"}


def named_metrics(names: Sequence[str], *, kind: str, num_outputs: int) -> dict[str, Any]:
    """Make torchmetrics objects by name.

    `auroc`, `average_precision` and `spearman` are exact: they keep a whole split on the device.

    Raises:
        RunnerError: For unknown names, an unknown number of classes, and if torchmetrics is missing.
    """
    known = NAMED.get(kind, {})
    refuse([_unknown(name, known, kind) for name in names if name not in known])
    if num_outputs == UNKNOWN and kind != "autoencoding":
        problem = "the number of classes, or of values per example, is not known"
        fix = "use `task.num_classes=10`, or `'task.metrics=[]'`"
        raise RunnerError.of(f"task.metrics=[{','.join(names)}]", problem, fix)
    return {name: _make(name, kind, num_outputs) for name in names}


def _make(name: str, kind: str, num_outputs: int) -> Any:
    is_binary = kind == "multiclass" and num_outputs == 2 and name in BINARY
    named = (BINARY if is_binary else NAMED[kind])[name]
    arguments = {key: num_outputs if value is None else value for key, value in named.arguments.items()}
    if kind in COUNTS:
        arguments |= {"validate_args": False} | ({} if is_binary else {COUNTS[kind]: num_outputs})
    if arguments.get("top_k", 0) > num_outputs != UNKNOWN:
        problem = f"`{name}` is always 1 with {num_outputs} classes"
        raise RunnerError.of(f"task.metrics=[{name}]", problem, "use `'task.metrics=[]'`, or another metric")
    module = _module("classification" if kind in COUNTS else "regression")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `.*` will save all", UserWarning)  # documented in named_metrics()
        metric = getattr(module, named.class_name)(**arguments)
    if not named.counts:
        return metric
    return MeanOverPresent(metric, getattr(module, named.counts)(**arguments), needs_both=named.needs_both)


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


def _unknown(name: str, known: dict[str, Named], kind: str) -> Problem:
    hits = nearest(name, known)
    ways = [f"task.metrics=[{hit}]" for hit in hits or known]
    problem = f"there is no metric `{name}` for a task of kind {kind}; there are {', '.join(known) or 'none'}"
    return Problem.suggest(f"task.metrics=[{name}]", problem, ways, BY_NAME)
