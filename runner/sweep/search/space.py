"""The dimensions of a search: a trial's overrides and name from its values, and Optuna's distributions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Numbers:
    """All numbers between two ends, both included; integers if the ends are."""

    word: str  # the key on the command line, e.g., "+optimizer.momentum"
    low: float
    high: float
    step: float | None = None  # None: any float
    is_log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        step = f" in steps of {self.step:g}" if self.step not in (None, 1) else ""
        return f"{self.low:g} to {self.high:g}{step}{', logarithmic' if self.is_log else ''}"


@dataclass(frozen=True)
class Choices:
    """Some values, as on the command line."""

    word: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(_plain(value) for value in self.values)


Dimension = Numbers | Choices


@dataclass(frozen=True)
class Space:
    """The search space."""

    fixed: tuple[str, ...]  # overrides of all trials
    dimensions: dict[str, Dimension]  # by key, without Hydra's + and ~

    def overrides(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a trial's overrides, from its value in each dimension."""
        texts = {key: as_word(dimension, values[key]) for key, dimension in self.dimensions.items()}
        return (*self.fixed, *(f"{self.dimensions[key].word}={text}" for key, text in texts.items()))

    def name(self, values: Mapping[str, Any]) -> str:
        """Return a trial's name: "optimizer.lr=0.001234 model=mlp"."""
        return " ".join(f"{key}={_short(values[key])}" for key in self.dimensions)

    def corners(self) -> list[dict[str, Any]]:
        """Return trials with every choice and both ends of each interval, to check before the search."""
        values = {key: _corners(dimension) for key, dimension in self.dimensions.items()}
        first = {key: found[0] for key, found in values.items()}
        return [first, *({**first, key: value} for key, found in values.items() for value in found[1:])]


def as_word(dimension: Dimension, value: Any) -> str:
    """Return the value as on the command line."""
    if isinstance(dimension, Choices):
        return str(value)
    if dimension.is_whole:
        return str(int(value))
    return repr(float(value)) if dimension.step is None else f"{value:.12g}"  # 0.3, not 0.30000000000000004


def distribution(dimension: Dimension) -> BaseDistribution:
    """Return Optuna's distribution. Imports Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Choices):
        return CategoricalDistribution(dimension.values)
    if dimension.is_whole:
        low, high, step = int(dimension.low), int(dimension.high), int(dimension.step or 1)
        return IntDistribution(low, high, log=dimension.is_log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log, step=dimension.step)


def listed(dimension: Dimension) -> list[Any] | None:
    """Return all values of a dimension; None for an interval of floats."""
    if isinstance(dimension, Choices):
        return list(dimension.values)
    if dimension.step is None:
        return None
    count = round((dimension.high - dimension.low) / dimension.step) + 1
    values = [dimension.low + index * dimension.step for index in range(count)]
    return values if dimension.is_whole else [float(f"{value:.12g}") for value in values]


def _corners(dimension: Dimension) -> list[Any]:
    if isinstance(dimension, Choices):
        return list(dimension.values)
    return list(dict.fromkeys([dimension.low, dimension.high]))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)  # Hydra's escapes: cuda\:0
