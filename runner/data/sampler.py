"""Makes what draws the rows of each epoch, from `data.sampler`; describes uneven classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.data.loading.order import ClassSampler
from runner.data.source import Source
from runner.errors import Problem, RunnerError, nearest, refuse

#: classes are uneven if one has this many times the rows of another
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
    return (
        f"uneven classes: {_listed_counts(counts, source)} rows; {share} (see task.metrics=[f1], data.sampler=balanced)"
    )


def _listed_counts(counts: Tensor, source: Source) -> str:
    order = counts.argsort(descending=True, stable=True).tolist()
    half = MOST_NAMED // 2
    shown = order if len(order) <= MOST_NAMED else [*order[:half], None, *order[-half:]]
    return ", ".join("..." if at is None else f"{source.classes[at]} {int(counts[at]):,}" for at in shown)


Asked = str | Sequence[float] | Mapping[Any, float]


def sampler_of(
    asked: Asked | None,
    labels: Tensor | None,  # (N,) int64, of the training rows
    source: Source,
) -> ClassSampler | None:
    """None where each row comes once an epoch. A class without a training row is left out, whatever its weight.

    asked: balanced, or how often each class is drawn beside the others: by its place, or by its name.
    Raises: RunnerError for data without classes, and for weights that are not one for each of them.
    """
    if asked is None:
        return None
    if labels is None or source.labels is None:
        problem = f"the rows of `{source.name}` have no classes to draw by"
        raise RunnerError.suggest(_shown(asked), problem, ["data.sampler=null"])
    sizes, shares = _sizes_and_shares(asked, labels, source)
    below = shares.cumsum(0)
    return ClassSampler(below / below[-1], labels.argsort(stable=True), sizes)


def class_counts(asked: Asked | None, labels: Tensor, source: Source) -> list[int]:
    """How many rows of each class an epoch has: with a sampler those that it draws, on the mean. asked: as sampler_of()'s."""
    if asked is None:
        return torch.bincount(labels, minlength=len(source.classes)).tolist()
    _, shares = _sizes_and_shares(asked, labels, source)
    return (len(labels) * shares / shares.sum()).ceil().long().tolist()


def _sizes_and_shares(asked: Asked, labels: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    classes = source.classes or tuple(map(str, range(int(source.labels.max()) + 1)))  # type: ignore[union-attr]
    sizes = torch.bincount(labels, minlength=len(classes))
    shares = torch.tensor(_weights(asked, classes, source.name), dtype=torch.float64) * (sizes > 0)
    if not shares.any():
        problem = "no training row belongs to a class with a weight above 0"
        raise RunnerError.of(_shown(asked), problem, "give another class a weight, or use `data.sampler=balanced`")
    return sizes, shares


def _weights(asked: Asked, classes: Sequence[str], name: str) -> list[float]:
    if isinstance(asked, str):
        return [1.0] * len(classes)
    if not isinstance(asked, Mapping):
        if len(asked) == len(classes):
            return list(asked)
        problem = f"there are {len(asked)} weights, and `{name}` has {len(classes)} classes: {_listed(classes)}"
        raise RunnerError.of(
            _shown(asked), problem, "give a weight for each class, in this order, or use `data.sampler=balanced`"
        )
    weights = {_called(each, classes): weight for each, weight in asked.items()}
    problems = []
    for unknown in (each for each in weights if each not in classes):
        fix = f"use {' or '.join(f'`{hit}`' for hit in nearest(unknown, classes)) or _listed(classes)}"
        problems.append(Problem(f"data.sampler={{{unknown}: ...}}", f"`{name}` has no class `{unknown}`", fix))
    if missing := [each for each in classes if each not in weights]:
        ones = ", ".join(f"{each}: 1" for each in missing[:3])
        fix = f"use `'data.sampler={{..., {ones}}}'` (0: never drawn)"
        problems.append(Problem(_shown(asked), f"`data.sampler` has no weight for {_listed(missing)}", fix))
    refuse(problems)
    return [weights[each] for each in classes]


def _called(each: Any, classes: Sequence[str]) -> str:
    names = (str(each), str(each).lower()) if isinstance(each, bool) else (str(each),)
    return next((name for name in names if name in classes), names[-1])


def _shown(asked: Any) -> str:
    if isinstance(asked, Mapping):
        return f"data.sampler={{{', '.join(f'{name}: {weight}' for name, weight in asked.items())}}}"
    return f"data.sampler={asked if isinstance(asked, str) else list(asked)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
