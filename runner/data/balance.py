"""Says in one line whether the classes of a Source have very uneven numbers of rows. For the console."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.data.source import Source

#: a class with so many times the rows of another is told
UNEVEN = 10
MOST_NAMED = 4


def balance(source: Source) -> str:
    """Return the line about uneven classes; "" for a regression, or if each class has enough rows."""
    if source.labels is None or not source.classes:
        return ""
    counts = torch.bincount(source.labels, minlength=len(source.classes))
    total, most, least = int(counts.sum()), int(counts.max()), int(counts.min())
    if most == total:
        return (
            f"all {total:,} rows are of one class, {source.classes[int(counts.argmax())]}: nothing can be learned of it"
        )
    if (alone := int((counts == 1).sum())) * 2 > len(counts):
        return f"{len(counts):,} classes in {total:,} rows, and {alone:,} of them have 1 row: a number to predict, or a key?"
    if most < UNEVEN * max(1, least):
        return ""
    always = source.classes[int(counts.argmax())]
    share = f"always {always} is right in {most / total:.1%} of them"
    return f"uneven classes: {_listed(counts, source)} rows; {share} (see task.metrics=[f1], data.sampler=balanced)"


def _listed(counts: Tensor, source: Source) -> str:
    order = counts.argsort(descending=True, stable=True).tolist()
    half = MOST_NAMED // 2
    shown = order if len(order) <= MOST_NAMED else [*order[:half], None, *order[-half:]]
    return ", ".join("..." if at is None else f"{source.classes[at]} {int(counts[at]):,}" for at in shown)
