"""Finds from a metric's name whether more is better, and lists the metrics and plots of tasks. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

#: prefixes of the parts of names of metrics that rise
RISING = (
    *("acc", "auc", "auroc", "f1", "fbeta", "precision", "recall", "specificity", "sensitivity", "iou", "jaccard"),
    *("dice", "exact", "r2", "pearson", "spearman", "explained", "mcc", "kappa", "top", "psnr", "ssim", "bleu"),
    *("rouge", "speed", "hit"),
)
#: parts that take precedence: accuracy_error, f1_loss
FALLING = ("loss", "error", "perplexity", "mse", "mae", "rmse", "mape")

#: plots of predictions by kind of task (runner.experiment.figures)
PLOTS: dict[str, tuple[str, ...]] = {
    "multiclass": ("confusion", "roc", "calibration", "samples", "boundary"),
    "multilabel": ("roc", "calibration", "samples"),
    "regression": ("residuals", "samples", "boundary"),
    "autoencoding": ("reconstructions",),
    "generation": ("generated",),
    "language": (),
}


def is_rising(name: str) -> bool:
    """Return whether more is better: val/accuracy, val/f1_macro, speed/steps_per_second."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return not any(word in FALLING for word in words) and any(word.startswith(RISING) for word in words)


def is_rate(name: str) -> bool:
    """Return whether it is a learning rate, which is recorded where it changes."""
    return name == "train/lr" or name.startswith("train/lr_")


#: metrics of each batch by built-in task; those of other tasks are known after a trial
REPORTED = {
    "runner.tasks.Adversarial": ("loss",),
    "runner.tasks.Classification": ("loss", "accuracy"),
    "runner.tasks.Regression": ("loss", "mae"),
    "runner.tasks.Autoencoding": ("loss", "mae"),
    "runner.tasks.Language": ("loss", "accuracy"),
}
#: metrics that follow from them for a whole split
DERIVED = {
    "runner.tasks.Regression": ("rmse",),
    "runner.tasks.Autoencoding": ("rmse",),
    "runner.tasks.Language": ("perplexity", "bits_per_byte"),
}
#: tasks that also report the squared error, if it is not the loss
OF_NUMBERS = ("runner.tasks.Regression", "runner.tasks.Autoencoding")


def metrics_of(task: Any, reported: Sequence[str] | None = None, *, whole: bool = True) -> list[str] | None:
    """Return the metrics of a task by its node in the configuration; None for a custom task.

    Args:
        reported: Metrics of each batch (None: those of the built-in task).
        whole: Include the metrics of whole splits.
    """
    target, loss = str(task.get("_target_")), task.get("loss")
    reported = REPORTED.get(target) if reported is None else reported
    if reported is None:
        return None
    each = [*reported, *(["mse"] if target in OF_NUMBERS and loss not in (None, "mse") else [])]
    return [*each, *DERIVED.get(target, ()), *asked_metrics(task)] if whole else each


def is_of_a_class(name: str, task: Any) -> bool:
    """Return whether a name, like f1_cat, is one class's value of a metric of the task."""
    return any(name.startswith(f"{asked}_") for asked in asked_metrics(task))


def asked_metrics(task: Any) -> list[str]:
    asked = task.get("metrics") or ()
    return [asked] if isinstance(asked, str) else [str(name) for name in asked]
