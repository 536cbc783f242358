"""The dimensions of a search, read from the overrides, and a trial's overrides and name. Imports Optuna."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner.config.schema import find_key
from runner.errors import Problem, RunnerError, refuse
from runner.sweep.jobs.prepare import is_of_the_sweep, parsed_params, refuse_swept_settings

if TYPE_CHECKING:
    from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution


@dataclass(frozen=True)
class Dimension:
    """The values of a key, as an Optuna distribution: some texts, or all numbers between two ends, both included."""

    key: str  # as on the command line, e.g., "+optimizer.momentum"
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution

    def __str__(self) -> str:
        numbers = self.numbers
        if numbers is None:
            return ", ".join(_plain(value) for value in self.corners())
        step = f" in steps of {numbers.step:g}" if numbers.step not in (None, 1) else ""
        return f"{numbers.low:g} to {numbers.high:g}{step}{', logarithmic' if numbers.log else ''}"

    @property
    def numbers(self) -> FloatDistribution | IntDistribution | None:
        return None if hasattr(self.distribution, "choices") else self.distribution

    def text(self, value: Any) -> str:
        """Return the value as on the command line."""
        numbers = self.numbers
        if numbers is None:
            return str(value)
        if isinstance(numbers.low, int):
            return str(int(value))
        return repr(float(value)) if numbers.step is None else f"{value:.12g}"  # 0.3, not 0.30000000000000004

    def listed(self) -> list[Any] | None:
        """Return all values; None for an interval of floats."""
        numbers = self.numbers
        if numbers is None:
            return self.corners()
        if numbers.step is None:
            return None
        count = round((numbers.high - numbers.low) / numbers.step) + 1
        values = [numbers.low + index * numbers.step for index in range(count)]
        return values if isinstance(numbers.low, int) else [float(f"{value:.12g}") for value in values]

    def corners(self) -> list[Any]:
        """Return the values to check before the search: all texts, or both ends."""
        numbers = self.numbers
        return list(self.distribution.choices if numbers is None else dict.fromkeys([numbers.low, numbers.high]))


@dataclass(frozen=True)
class Space:
    """The search space."""

    fixed: tuple[str, ...]  # overrides of all trials
    dimensions: dict[str, Dimension]  # by key, without Hydra's + and ~

    def overrides(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return a trial's overrides, from its value in each dimension."""
        return (*self.fixed, *(f"{each.key}={each.text(values[name])}" for name, each in self.dimensions.items()))

    def name(self, values: Mapping[str, Any]) -> str:
        """Return a trial's name: "optimizer.lr=0.001234 model=mlp"."""
        return " ".join(f"{key}={_short(values[key])}" for key in self.dimensions)

    def corners(self) -> list[dict[str, Any]]:
        """Return trials with every choice and both ends of each interval, to check before the search."""
        values = {key: dimension.corners() for key, dimension in self.dimensions.items()}
        first = {key: each[0] for key, each in values.items()}
        return [first, *({**first, key: value} for key, each in values.items() for value in each[1:])]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _plain(str(value))


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)  # Hydra's escapes: cuda\:0


def read_space(overrides: Sequence[str], config_loader: Any, *, more: Mapping[str, Any] | None = None) -> Space:
    """Return the search space of the command line and of `hydra.sweeper.params` (more); the command line wins.

    Raises: RunnerError with all its problems; Hydra's error for overrides that can't be parsed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=config_loader)
    own = parser.parse_overrides(list(overrides))
    refuse_swept_settings(own)
    typed = {override.key_or_group for override in own}
    every = [each for each in parsed_params(parser, more or {}) if each.key_or_group not in typed] + own
    single = [each for each in every if not each.is_sweep_override() and not is_of_the_sweep(each)]
    dimensions: dict[str, Dimension] = {}
    problems: list[Problem] = []
    for override in every:
        if override.is_sweep_override():
            try:
                dimension = _dimension(override)
            except RunnerError as error:
                problems += error.problems
                continue
            key = dimension.key.lstrip("+~")
            if key in dimensions:
                problems.append(Problem(str(override.input_line), f"`{key}` is set twice", f"set `{key}` once"))
            dimensions[key] = dimension
    if not dimensions and not problems:
        problem = "no argument has several values, so there is nothing to search for"
        example = "'optimizer.lr=tag(log,interval(1e-4,1e-1))'"
        problems.append(Problem.suggest(" ".join(overrides) or "no words", problem, [example]))
    refuse(problems)
    return Space(tuple(str(each.input_line) for each in single), dimensions)


def _dimension(override: Override) -> Dimension:
    from hydra.core.override_parser.types import IntervalSweep, RangeSweep

    value: Any = override.value()
    if tags := set(getattr(value, "tags", ())) - {"log"}:
        raise _problem(override, f"there is no tag {min(tags)}", "tag(log,interval(1e-4,1e-1))")
    if isinstance(value, IntervalSweep):
        return _interval(override, value)
    if isinstance(value, RangeSweep):
        return _range(override, value)
    return _choices(override, value)


def _interval(override: Override, value: IntervalSweep) -> Dimension:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high, is_log = value.start, value.end, "log" in value.tags
    assert low is not None and high is not None
    key, tag = override.key_or_group, "tag(log,{})" if is_log else "{}"
    if not low < high:
        raise _problem(override, "an interval goes up", tag.format(f"interval({high:g},{low:g})"))
    if is_log and low <= 0:
        least = 1 if isinstance(low, int) else f"{high / 1000:g}"
        raise _problem(override, "a logarithmic interval begins above 0", f"tag(log,interval({least},{high:g}))")
    if isinstance(low, float) and (known := find_key(key)) is not None and known.kind.startswith("int"):
        problem = f"{key} is a whole number, and an interval is one of floats"
        raise _problem(override, problem, tag.format(f"int(interval({low:g},{high:g}))"))
    kind = IntDistribution if isinstance(low, int) else FloatDistribution
    return Dimension(override.get_key_element(), kind(low, high, log=is_log))


def _range(override: Override, value: RangeSweep) -> Dimension:
    from optuna.distributions import FloatDistribution, IntDistribution

    is_log = "log" in value.tags
    if not value.step:
        raise _problem(override, "a step of 0 leads nowhere", f"range({value.start},{value.stop})")
    numbers = sorted(value.range())
    if not numbers:
        problem = "the range has no values: it goes from its start towards its end, which is not part of it"
        assert value.start is not None and value.stop is not None
        first, last = (value.stop, value.start) if value.start != value.stop else (value.start, value.start + 1)
        raise _problem(override, problem, f"range({first},{last})")
    is_whole = isinstance(numbers[0], int)
    if is_log and (value.step != 1 or numbers[0] < 1 or not is_whole):
        problem = "a logarithmic range has whole numbers in steps of 1, and begins at 1 or above"
        raise _problem(override, problem, f"tag(log,interval({max(numbers[0], 1):g},{numbers[-1]:g}))")
    kind = IntDistribution if is_whole else FloatDistribution
    return Dimension(override.get_key_element(), kind(numbers[0], numbers[-1], log=is_log, step=abs(value.step)))


def _choices(override: Override, value: Any) -> Dimension:
    from hydra.core.override_parser.types import ChoiceSweep, Transformer
    from optuna.distributions import CategoricalDistribution

    if getattr(value, "tags", ()):
        problem, fix = "choices have no scale", f"remove `tag(log, ...)` from `{override.key_or_group}`"
        raise RunnerError.of(str(override.input_line), problem, fix)
    if isinstance(value, ChoiceSweep):  # not by sweep_string_iterator(), which may shuffle
        texts = [Transformer.str(element) for element in value.list]
    else:
        texts = list(override.sweep_string_iterator())
    if not texts:
        raise _problem(override, f"no file in {override.key_or_group} has such a name", "glob(*)")
    return Dimension(override.get_key_element(), CategoricalDistribution(tuple(dict.fromkeys(texts))))


def _problem(override: Override, problem: str, value: str) -> RunnerError:
    return RunnerError.suggest(str(override.input_line), problem, [shlex.quote(f"{override.key_or_group}={value}")])
