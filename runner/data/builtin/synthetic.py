"""Generates a random but learnable data set of any size, from a seed: for tests of speed and of placement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runner.data.loading.order import ROWS, generator
from runner.data.source import Source, facts_of
from runner.data.vision.augment import augmented
from runner.errors import Problem, refuse

#: of the teacher's answers, in parts of their spread: what no model can learn
NOISE = 0.1
EXAMPLES = {"shape": "[1,8,8]", "num_features": "64"}


def synthetic(
    num_rows: int = 60_000,
    num_features: int | None = None,
    *,
    shape: Sequence[int] | None = (1, 8, 8),
    num_classes: int | None = 10,
    seed: int = 0,
    augment: Mapping[str, Any] | Sequence[Any] | None = None,
) -> Source:
    """Normal inputs, (num_rows, *shape), and what a random linear teacher says of them, with a little noise.

    num_features: rows of so many numbers; wins over shape. num_classes: the teacher's highest answer is the class;
    None for a regression, the answer itself, (num_rows, 1) with a spread of about 1. augment: see runner.data.vision.augment.
    Raises: RunnerError for sizes that are none.
    """
    size = [num_features] if num_features is not None else list(shape or ())
    _check(num_rows, num_features, size, num_classes)
    draw = generator(seed, ROWS)
    inputs = torch.randn(num_rows, *size, generator=draw)
    width = math.prod(size)
    teacher = torch.randn(width, num_classes or 1, generator=draw) / math.sqrt(width)
    answers = inputs.flatten(1) @ teacher  # (N, C)
    answers += NOISE * torch.randn(answers.shape, generator=draw)
    targets = answers if num_classes is None else answers.argmax(1)
    source = Source(
        "synthetic",
        (inputs, targets),
        facts_of(inputs, targets, num_classes=num_classes),
        labels=None if num_classes is None else targets,
        origin=f"made up, seed {seed}",
        classes=tuple(map(str, range(num_classes or 0))),
    )
    return augmented(source, augment)


def _check(num_rows: int, num_features: int | None, size: Sequence[int], num_classes: int | None) -> None:
    width = "shape" if num_features is None else "num_features"
    shown = f"[{','.join(map(str, size))}]" if num_features is None else num_features
    checks = [("num_rows", num_rows, num_rows, 1, "10"), (width, shown, min(size, default=0), 1, EXAMPLES[width])]
    if num_classes is not None:
        checks.append(("num_classes", num_classes, num_classes, 2, "10"))
    problems = [
        Problem.suggest(f"data.{key}={shown}", f"`data.{key}` must be {least} or more", [f"data.{key}={example}"])
        for key, shown, value, least, example in checks
        if value < least
    ]
    refuse(problems)
