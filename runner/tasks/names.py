"""The name of a metric goes in; whether more of it is better comes out. And the names of pictures. Imports no torch."""

from __future__ import annotations

import re

#: how the words of such names begin
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
    ),
    *("r2", "pearson", "spearman", "explained", "mcc", "kappa", "top", "psnr", "ssim", "bleu", "rouge", "speed", "hit"),
)
#: a word that decides, whatever stands beside it: accuracy_error, f1_loss
FALLING = ("loss", "error", "perplexity", "mse", "mae", "rmse", "mape")

#: by the kind of a task, the pictures that can be drawn of what it predicts (runner.plots.results)
PLOTS: dict[str, tuple[str, ...]] = {
    "multiclass": ("confusion", "roc", "calibration", "samples", "boundary"),
    "multilabel": ("roc", "calibration", "samples"),
    "regression": ("residuals", "samples", "boundary"),
    "autoencoding": ("reconstructions",),
    "language": (),
}


def is_rising(name: str) -> bool:
    """Whether a metric of this name is better when it is more: val/accuracy, val/f1_macro, speed/steps_per_second."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return not any(word in FALLING for word in words) and any(word.startswith(RISING) for word in words)
