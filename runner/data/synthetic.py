"""Sizes and a seed go in; a made-up data set of that size comes out, learnable, for tests of speed and of placement."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from runner.data.source import Source, from_arrays
from runner.errors import Fault, RunnerError


def synthetic(
    num_rows: int = 60_000,
    num_features: int | None = None,
    shape: Sequence[int] | None = (1, 8, 8),
    num_classes: int | None = 10,
    seed: int = 0,
) -> Source:
    """Normal inputs (num_rows, *shape) and what a random linear teacher makes of them.

    num_features: rows of so many numbers; wins over shape. num_classes: None makes it a regression with noise of a tenth of the target's spread.
    """
    size = list(shape or [0]) if num_features is None else [num_features]
    width = "shape" if num_features is None else "num_features"
    for key, value in (("num_rows", num_rows), (width, min(size)), ("num_classes", num_classes)):
        least = 2 if key == "num_classes" else 1
        if value is not None and value < least:
            raise RunnerError(
                Fault(f"data.{key}={value}", f"it must be {least} or more", f"data.{key}={least * 10}, say")
            )
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_rows, *size, generator=generator)
    teacher = torch.randn(math.prod(size), num_classes or 1, generator=generator) / math.sqrt(math.prod(size))
    answers = inputs.flatten(1) @ teacher  # (N, C)
    if num_classes is None:
        answers = answers + 0.1 * torch.randn(answers.shape, generator=generator)
        return from_arrays(inputs, answers, name="synthetic", origin=f"made up, seed {seed}", kind="regression")
    targets = answers.argmax(1)
    targets[: min(num_rows, num_classes)] = torch.arange(min(num_rows, num_classes))  # each class is there
    return from_arrays(inputs, targets, name="synthetic", origin=f"made up, seed {seed}", kind="classification")
