"""The name of a metric goes in; whether more of it is better comes out."""

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


def is_rising(name: str) -> bool:
    """Whether a metric of this name is better when it is more: val/accuracy, val/f1_macro, speed/steps_per_second."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return not any(word in FALLING for word in words) and any(word.startswith(RISING) for word in words)
