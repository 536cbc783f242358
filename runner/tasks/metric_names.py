"""Finds from a metric's name whether more is better, and lists the metrics and plots of tasks. Imports no torch.

To add a named metric, add an entry to `NAMED`, and scikit-learn's value for it to tests/tasks/test_metrics.py. Then run
`pytest --update-snapshots tests/test_generated.py`, which lists it in conf/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: kinds of classification. A metric of both takes two classes too, the second of which is the positive one, as in scikit-learn
CLASSES = ("multiclass", "multilabel")
NUMBERS = ("regression", "autoencoding")


@dataclass(frozen=True)
class NamedMetric:
    """A metric that `task.metrics` can name, and how torchmetrics computes it.

    Args:
        class_name: The class in torchmetrics, without the prefix that names the kind of classification.
        meaning: A phrase for conf/README.md.
        kinds: The kinds of task that have it.
        arguments: Its arguments, without the number of classes. None is the number of outputs.
        average: torchmetrics' `average` of classes; "none": our mean over the classes that a split has.
        needs_both: Leave out classes to which every example belongs, too: a ROC curve needs both outcomes.
        is_rising: More is better.
    """

    class_name: str
    meaning: str
    kinds: tuple[str, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    average: str = ""
    needs_both: bool = False
    is_rising: bool = True


NAMED = {
    "f1": NamedMetric("F1Score", "harmonic mean of precision and recall", CLASSES, average="macro"),
    "precision": NamedMetric("Precision", "share of a class's predictions that are right", CLASSES, average="macro"),
    "recall": NamedMetric("Recall", "share of a class's examples that are found", CLASSES, average="macro"),
    "specificity": NamedMetric("Specificity", "recall of all other classes", CLASSES, average="macro"),
    "balanced_accuracy": NamedMetric("Accuracy", "mean recall of the classes", CLASSES[:1], average="none"),
    "top3": NamedMetric("Accuracy", "class among the three most probable", CLASSES[:1], {"top_k": 3}, "micro"),
    "top5": NamedMetric("Accuracy", "class among the five most probable", CLASSES[:1], {"top_k": 5}, "micro"),
    "auroc": NamedMetric("AUROC", "area under the ROC curve", CLASSES, average="none", needs_both=True),
    "average_precision": NamedMetric("AveragePrecision", "area under precision over recall", CLASSES, average="macro"),
    "iou": NamedMetric("JaccardIndex", "Jaccard index, intersection over union", CLASSES, average="macro"),
    "mcc": NamedMetric("MatthewsCorrCoef", "Matthews correlation coefficient", CLASSES[:1]),
    "kappa": NamedMetric("CohenKappa", "Cohen's kappa", CLASSES[:1]),
    "calibration_error": NamedMetric(
        "CalibrationError", "expected calibration error, 15 bins", CLASSES[:1], {"n_bins": 15}, is_rising=False
    ),
    "exact_match": NamedMetric("ExactMatch", "share of examples with all labels right", CLASSES[1:]),
    "r2": NamedMetric("R2Score", "coefficient of determination", NUMBERS),
    "mape": NamedMetric("MeanAbsolutePercentageError", "mean absolute percentage error", NUMBERS[:1], is_rising=False),
    "smape": NamedMetric("SymmetricMeanAbsolutePercentageError", "symmetric `mape`", NUMBERS[:1], is_rising=False),
    "explained_variance": NamedMetric("ExplainedVariance", "explained share of the variance", NUMBERS),
    "pearson": NamedMetric("PearsonCorrCoef", "linear correlation", NUMBERS[:1], {"num_outputs": None}),
    "spearman": NamedMetric("SpearmanCorrCoef", "rank correlation", NUMBERS[:1], {"num_outputs": None}),
}
#: beginnings of the names, or of parts of the names, of metrics that rise; custom ones too
RISING = (
    *(name for name, metric in NAMED.items() if metric.is_rising),
    *("acc", "auc", "fbeta", "sensitivity", "jaccard", "dice", "exact", "explained", "top", "psnr", "ssim", "bleu"),
    *("rouge", "speed", "hit"),
)
#: names and parts that take precedence: accuracy_error, f1_loss
FALLING = (
    *(name for name, metric in NAMED.items() if not metric.is_rising),
    *("loss", "error", "perplexity", "mse", "mae", "rmse"),
)

#: plots of predictions by kind of task (runner.experiment.figures)
PLOTS: dict[str, tuple[str, ...]] = {
    "multiclass": ("confusion", "roc", "samples", "boundary"),
    "multilabel": ("roc", "samples"),
    "regression": ("residuals", "samples"),
    "autoencoding": ("reconstructions",),
    "generation": ("generated",),
    "language": (),
}


def is_rising(name: str) -> bool:
    """Return whether more is better: val/accuracy, val/f1_macro, speed/steps_per_second."""
    words = [name.lower().rpartition("/")[2], *re.split(r"[^a-z0-9]+", name.lower())]
    return not any(word in FALLING for word in words) and any(word.startswith(RISING) for word in words)


def metrics_for(kind: str) -> list[str]:
    """Return the names of the metrics that a kind of task has."""
    return [name for name, metric in NAMED.items() if kind in metric.kinds]


def is_rate(name: str) -> bool:
    """Return whether it is a learning rate, which is recorded where it changes."""
    return name == "train/lr" or name.startswith("train/lr_")


#: metrics of each batch by built-in task; those of other tasks are known after a trial. Regressions add mse, see metrics_of()
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


def metrics_of(task: Any, reported: Sequence[str] | None = None, *, whole: bool = True) -> list[str] | None:
    """Return the metrics of a task by its node in the configuration; None for a custom task.

    Args:
        reported: Metrics of each batch (None: those of the built-in task).
        whole: Include the metrics of whole splits.
    """
    target = str(task.get("_target_"))
    each, derived = REPORTED.get(target) if reported is None else reported, DERIVED.get(target, ())
    if each is None:
        return None
    if "rmse" in derived and task.get("loss") not in (None, "mse"):
        each = (*each, "mse")
    return [*each, *derived, *named_in(task)] if whole else list(each)


def named_in(task: Any) -> list[str]:
    """Return the names in `task.metrics` of a task's node in the configuration."""
    names = task.get("metrics") or ()
    return [names] if isinstance(names, str) else [str(name) for name in names]


def is_of_a_class(name: str, task: Any) -> bool:
    """Return whether a name, like f1_cat, is one class's value of a metric of the task."""
    return any(name.startswith(f"{metric}_") for metric in named_in(task))
