"""Says by a metric's name whether more of it is better; knows tasks' and pictures' names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

#: prefixes of the parts of such names
RISING = (
    *(
        "acc",
        "auc",
        "auroc",
        "f1",
        "fbeta",
        "precision",
        "recall",
        "specificity",
        "sensitivity",
        "iou",
        "jaccard",
        "dice",
        "exact",
    ),
    *("r2", "pearson", "spearman", "explained", "mcc", "kappa", "top", "psnr", "ssim", "bleu", "rouge", "speed", "hit"),
)
#: a part that decides, whatever else the name has: accuracy_error, f1_loss
FALLING = ("loss", "error", "perplexity", "mse", "mae", "rmse", "mape")

#: by the kind of a task, the pictures that can be drawn of what it predicts (runner.experiment.figures)
PLOTS: dict[str, tuple[str, ...]] = {
    "multiclass": ("confusion", "roc", "calibration", "samples", "boundary"),
    "multilabel": ("roc", "calibration", "samples"),
    "regression": ("residuals", "samples", "boundary"),
    "autoencoding": ("reconstructions",),
    "generation": ("generated",),
    "language": (),
}


def is_rising(name: str) -> bool:
    """Whether a metric of this name is better when it is more: val/accuracy, val/f1_macro, speed/steps_per_second."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return not any(word in FALLING for word in words) and any(word.startswith(RISING) for word in words)


def is_rate(name: str) -> bool:
    """Whether it is a learning rate, which is noted where it changes: the optimizer's, or one's of those that take turns."""
    return name == "train/lr" or name.startswith("train/lr_")


#: of the built-in tasks; other tasks report their metrics first in a trial
REPORTED = {
    "runner.tasks.Adversarial": ("loss",),
    "runner.tasks.Classification": ("loss", "accuracy"),
    "runner.tasks.Regression": ("loss", "mae"),
    "runner.tasks.Autoencoding": ("loss", "mae"),
    "runner.tasks.Language": ("loss", "accuracy"),
}
#: what follows from them, over a whole split
DERIVED = {
    "runner.tasks.Regression": ("rmse",),
    "runner.tasks.Autoencoding": ("rmse",),
    "runner.tasks.Language": ("perplexity", "bits_per_byte"),
}
#: tasks whose loss may differ from the squared error, which is reported as well then
OF_NUMBERS = ("runner.tasks.Regression", "runner.tasks.Autoencoding")


def metrics_of(task: Any, reported: Sequence[str] | None = None, *, whole: bool = True) -> list[str] | None:
    """Return the metrics of a task by its node in the configuration; None for a custom task.

    reported: of each batch (None: as the task is known for). whole: of whole splits, not only of batches.
    """
    target, loss = str(task.get("_target_")), task.get("loss")
    reported = REPORTED.get(target) if reported is None else reported
    if reported is None:
        return None
    each = [*reported, *(["mse"] if target in OF_NUMBERS and loss not in (None, "mse") else [])]
    return [*each, *DERIVED.get(target, ()), *asked_metrics(task)] if whole else each


def is_of_a_class(name: str, task: Any) -> bool:
    """f1_cat, of a metric f1 that has a value for each class."""
    return any(name.startswith(f"{asked}_") for asked in asked_metrics(task))


def asked_metrics(task: Any) -> list[str]:
    asked = task.get("metrics") or ()
    return [asked] if isinstance(asked, str) else [str(name) for name in asked]
