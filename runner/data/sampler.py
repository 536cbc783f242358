"""Makes what draws the rows of each epoch, from `data.sampler`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runner.data.loading.order import ClassSampler
from runner.data.source import Source
from runner.errors import Problem, RunnerError, listed, nearest, refuse

Weights = str | Sequence[float] | Mapping[Any, float]


def sampler_of(
    weights: Weights | None,
    labels: Tensor | None,  # (N,) int64, of the training rows
    source: Source,
) -> ClassSampler | None:
    """Return the sampler of an epoch's rows; None if each row comes once. A class without a training row is left out.

    weights: balanced, or how often each class is drawn compared with the others, in their order or by name.
    """
    if weights is None:
        return None
    if labels is None or source.labels is None:
        problem = f"the rows of `{source.name}` have no classes to draw by"
        raise RunnerError.suggest(_setting(weights), problem, ["data.sampler=null"])
    sizes, shares = _sizes_and_shares(weights, labels, source)
    below = shares.cumsum(0)
    return ClassSampler(below / below[-1], labels.argsort(stable=True), sizes)


def class_counts(weights: Weights | None, labels: Tensor, source: Source) -> list[int]:
    """Return how many rows of each class an epoch has, on average with a sampler."""
    if weights is None:
        return torch.bincount(labels, minlength=len(source.classes)).tolist()
    _, shares = _sizes_and_shares(weights, labels, source)
    return (len(labels) * shares / shares.sum()).ceil().long().tolist()


def _sizes_and_shares(weights: Weights, labels: Tensor, source: Source) -> tuple[Tensor, Tensor]:
    classes = source.classes or tuple(map(str, range(int(source.labels.max()) + 1)))  # type: ignore[union-attr]
    sizes = torch.bincount(labels, minlength=len(classes))
    shares = torch.tensor(_by_class(weights, classes, source.name), dtype=torch.float64) * (sizes > 0)
    if not shares.any():
        problem = "no training row belongs to a class with a weight above 0"
        raise RunnerError.of(_setting(weights), problem, "give another class a weight, or use `data.sampler=balanced`")
    return sizes, shares


def _by_class(weights: Weights, classes: Sequence[str], name: str) -> list[float]:
    if isinstance(weights, str):
        return [1.0] * len(classes)
    if not isinstance(weights, Mapping):
        if len(weights) == len(classes):
            return list(weights)
        problem = f"there are {len(weights)} weights, and `{name}` has {len(classes)} classes: {listed(classes)}"
        fix = "give a weight for each class, in this order, or use `data.sampler=balanced`"
        raise RunnerError.of(_setting(weights), problem, fix)
    # YAML's true is `true` or `True` in the data
    named = {}
    for each, weight in weights.items():
        is_other_bool = isinstance(each, bool) and str(each) not in classes
        named[str(each).lower() if is_other_bool else str(each)] = weight
    problems = []
    for unknown in (each for each in named if each not in classes):
        fix = f"use {' or '.join(f'`{hit}`' for hit in nearest(unknown, classes)) or listed(classes)}"
        problems.append(Problem(f"data.sampler={{{unknown}: ...}}", f"`{name}` has no class `{unknown}`", fix))
    if missing := [each for each in classes if each not in named]:
        ones = ", ".join(f"{each}: 1" for each in missing[:3])
        fix = f"use `'data.sampler={{..., {ones}}}'` (0: never drawn)"
        problems.append(Problem(_setting(weights), f"`data.sampler` has no weight for {listed(missing)}", fix))
    refuse(problems)
    return [named[each] for each in classes]


def _setting(weights: Any) -> str:
    if isinstance(weights, Mapping):
        return f"data.sampler={{{', '.join(f'{name}: {weight}' for name, weight in weights.items())}}}"
    return f"data.sampler={weights if isinstance(weights, str) else list(weights)}"
