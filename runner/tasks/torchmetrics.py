"""Makes torchmetrics' objects, with the right arguments, from short names of metrics and the kind of task."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from runner.config.packages import install
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.tasks.checks import UNKNOWN

Arguments = dict[str, Any]

MACRO: Arguments = {"average": "macro"}
#: one number a class, of which OverPresent takes the mean
EACH: Arguments = {"average": "none"}
#: for two classes, whose second one is looked for, as scikit-learn has it
BINARY: dict[str, tuple[str, Arguments]] = {
    "f1": ("BinaryF1Score", {}),
    "precision": ("BinaryPrecision", {}),
    "recall": ("BinaryRecall", {}),
    "specificity": ("BinarySpecificity", {}),
    "auroc": ("BinaryAUROC", {}),
    "average_precision": ("BinaryAveragePrecision", {}),
    "iou": ("BinaryJaccardIndex", {}),
}
#: by the kind of task: the name, torchmetrics' class and its arguments but for the number of classes
SHORT: dict[str, dict[str, tuple[str, Arguments]]] = {
    "multiclass": {
        "f1": ("MulticlassF1Score", MACRO),
        "precision": ("MulticlassPrecision", MACRO),
        "recall": ("MulticlassRecall", MACRO),
        "specificity": ("MulticlassSpecificity", MACRO),
        "balanced_accuracy": ("MulticlassAccuracy", EACH),
        "top3": ("MulticlassAccuracy", {"top_k": 3, "average": "micro"}),
        "top5": ("MulticlassAccuracy", {"top_k": 5, "average": "micro"}),
        "auroc": ("MulticlassAUROC", EACH),
        "average_precision": ("MulticlassAveragePrecision", MACRO),
        "iou": ("MulticlassJaccardIndex", MACRO),
        "mcc": ("MulticlassMatthewsCorrCoef", {}),
        "kappa": ("MulticlassCohenKappa", {}),
        "calibration_error": ("MulticlassCalibrationError", {"n_bins": 15}),
    },
    "multilabel": {
        "f1": ("MultilabelF1Score", MACRO),
        "precision": ("MultilabelPrecision", MACRO),
        "recall": ("MultilabelRecall", MACRO),
        "specificity": ("MultilabelSpecificity", MACRO),
        "auroc": ("MultilabelAUROC", EACH),
        "average_precision": ("MultilabelAveragePrecision", MACRO),
        "iou": ("MultilabelJaccardIndex", MACRO),
        "exact_match": ("MultilabelExactMatch", {}),
    },
    "regression": {
        "r2": ("R2Score", {}),
        "mape": ("MeanAbsolutePercentageError", {}),
        "smape": ("SymmetricMeanAbsolutePercentageError", {}),
        "explained_variance": ("ExplainedVariance", {}),
        "pearson": ("PearsonCorrCoef", {"num_outputs": None}),
        "spearman": ("SpearmanCorrCoef", {"num_outputs": None}),
    },
    "autoencoding": {"r2": ("R2Score", {}), "explained_variance": ("ExplainedVariance", {})},
}
COUNTS = {"multiclass": "num_classes", "multilabel": "num_labels"}


def made_of(names: Sequence[str], *, kind: str, num_outputs: int) -> dict[str, Any]:
    """torchmetrics' objects by name. auroc, average_precision and spearman are exact: they keep a whole split on the device.

    Raises: RunnerError for unknown names, for an unknown number of classes, and where torchmetrics is missing.
    """
    known = SHORT.get(kind, {})
    refuse([_unknown(name, known, kind) for name in names if name not in known])
    if num_outputs == UNKNOWN and kind != "autoencoding":
        problem = "the number of classes, or of numbers in an example, is not known"
        fix = "task.num_classes=10, or task.metrics=[]"
        raise RunnerError(Problem(f"task.metrics=[{','.join(names)}]", problem, fix))
    return {name: _make(name, kind, num_outputs) for name in names}


def _make(name: str, kind: str, num_outputs: int) -> Any:
    is_binary = kind == "multiclass" and num_outputs == 2 and name in BINARY
    class_name, arguments = (BINARY if is_binary else SHORT[kind])[name]
    arguments = {key: num_outputs if value is None else value for key, value in arguments.items()}
    if kind in COUNTS:
        arguments |= {"validate_args": False} | ({} if is_binary else {COUNTS[kind]: num_outputs})
    if arguments.get("top_k", 0) > num_outputs != UNKNOWN:
        problem = f"there are {num_outputs} classes, and the best {arguments['top_k']} are all of them"
        raise RunnerError(Problem(f"task.metrics=[{name}]", problem, "task.metrics=[], or another one"))
    module = _module("classification" if kind in COUNTS else "regression")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `.*` will save all", UserWarning)  # it is said in made_of
        metric = getattr(module, class_name)(**arguments)
        if name in ("auroc", "balanced_accuracy"):
            counts = f"{class_name.removesuffix('AUROC').removesuffix('Accuracy')}StatScores"
            return OverPresent(metric, getattr(module, counts)(**arguments), needs_others=name == "auroc")
        return metric


class OverPresent(nn.Module):
    """The mean of one of torchmetrics over the classes that have rows, as scikit-learn has it; NaN where none has any.

    torchmetrics counts a class that a split lacks as 0 (1.8). counts: its StatScores by class. needs_others: also classes
    that have all of the rows are left out, for a curve needs both.
    """

    def __init__(self, metric: Any, counts: Any, *, needs_others: bool) -> None:
        super().__init__()
        self.metric, self.counts, self.needs_others = metric, counts, needs_others

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.metric.update(predictions, targets)
        self.counts.update(predictions, targets)

    def compute(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)
            values: Tensor = self.metric.compute()  # (C,), or () of two classes
        scores = self.counts.compute()  # (C, 5): true and false positives, true and false negatives, rows of the class
        own, total = scores[..., 4], scores[..., :4].sum(-1)
        counted = (own > 0) & (own < total) if self.needs_others else own > 0
        mean: Tensor = values.where(counted, 0).sum() / counted.sum()
        return mean

    def reset(self) -> None:
        self.metric.reset()
        self.counts.reset()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{name}")
    except ModuleNotFoundError as error:
        problem = f"they come from torchmetrics, which is not installed ({error.name})"
        raise RunnerError(Problem("task.metrics", problem, install("metrics"), code="missing-package")) from None


def _unknown(name: str, known: dict[str, Any], kind: str) -> Problem:
    hits = nearest(name, known)
    fix = " or ".join(f"task.metrics=[{hit}]" for hit in hits or [*known][:3])
    fix = fix or "task.metrics={NAME: {_target_: ...}}"
    problem = f"this short name does not exist for a task of kind {kind}; there are {', '.join(known) or 'none'}"
    return Problem(f"task.metrics=[{name}]", problem, fix)
