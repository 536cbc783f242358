"""Defines the dimensions of a search: a trial's overrides and name from its values, and the dimension as Optuna has it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Numbers:
    """Every number between two ends, both of them included; ints where the ends are ints."""

    word: str  # the key as the command line has it, e.g. "+optimizer.momentum"
    low: float
    high: float
    step: float | None = None  # None: all of them, of floats
    is_log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        step = f" in steps of {self.step:g}" if self.step not in (None, 1) else ""
        return f"{self.low:g} to {self.high:g}{step}{', logarithmic' if self.is_log else ''}"


@dataclass(frozen=True)
class Choices:
    """Some values, each as the command line takes it."""

    word: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(_plain(value) for value in self.values)


Dimension = Numbers | Choices


@dataclass(frozen=True)
class Space:
    """What a search searches."""

    fixed: tuple[str, ...]  # overrides that all trials have
    dimensions: dict[str, Dimension]  # by key, without Hydra's + and ~

    def overrides(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """A trial's overrides, from its value in each dimension."""
        texts = {key: as_word(dimension, values[key]) for key, dimension in self.dimensions.items()}
        return (*self.fixed, *(f"{self.dimensions[key].word}={text}" for key, text in texts.items()))

    def name(self, values: Mapping[str, Any]) -> str:
        """What sets a trial apart, for people: "optimizer.lr=0.001234 model=mlp"."""
        return " ".join(f"{key}={_short(values[key])}" for key in self.dimensions)

    def corners(self) -> list[dict[str, Any]]:
        """Trials that between them have each choice and both ends of each interval: what can be checked beforehand."""
        values = {key: _corners(dimension) for key, dimension in self.dimensions.items()}
        first = {key: found[0] for key, found in values.items()}
        return [first, *({**first, key: value} for key, found in values.items() for value in found[1:])]


def as_word(dimension: Dimension, value: Any) -> str:
    """The value as the command line takes it."""
    if isinstance(dimension, Choices):
        return str(value)
    if dimension.is_whole:
        return str(int(value))
    return repr(float(value)) if dimension.step is None else f"{value:.12g}"  # 0.3, not 0.30000000000000004


def distribution(dimension: Dimension) -> BaseDistribution:
    """The dimension as Optuna has it. Imports Optuna."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Choices):
        return CategoricalDistribution(dimension.values)
    if dimension.is_whole:
        low, high, step = int(dimension.low), int(dimension.high), int(dimension.step or 1)
        return IntDistribution(low, high, log=dimension.is_log, step=step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log, step=dimension.step)


def listed(dimension: Dimension) -> list[Any] | None:
    """All its values; None for an interval of floats, which has no end of them."""
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
