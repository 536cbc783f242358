"""Tries one setting after the other against what has won so far, and keeps what wins beyond the noise. For tune.py.

It holds at most three runs at a time: the one as it is, the one that leads, and the one that is tried.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from omegaconf import DictConfig

from runner.device import backends
from runner.errors import Fault, RunnerError
from runner.experiment import build
from runner.plan.tune_measure import NOISE, Candidate, Comparison, compare, difference, is_same
from runner.plan.tune_options import Option, options, with_settings

#: what a compilation takes at least, and what part of a step it may save at most
LEAST_SECONDS_TO_COMPILE, MOST_SAVED = 8.0, 0.75
SLOWER = "slower"
#: of the time there is, what a comparison takes
SHARE = 0.08
LEAST_SECONDS = 0.5


@dataclass
class Row:
    """What came of one try. ratio: the time of its step by that of the run as it is."""

    settings: dict[str, Any]
    outcome: str
    step_seconds: float | None = None
    ratio: float | None = None
    setup_seconds: float | None = None
    difference: float | None = None


#: losses of the first steps, and the name of the precision that they were computed in
Numbers = tuple[Any, str]


@dataclass
class Search:
    """A run, and what has been found for it so far."""

    cfg: DictConfig
    device: torch.device
    seconds: float
    tell: Callable[[Row], None]  # hears of each try
    rows: list[Row] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # of the one that leads
    ratio: float = 1.0  # of the one that leads: its step's time by that of the run as it is
    ahead: float = 0.0  # likewise: seconds before its steps, beside those of the run as it is
    # that what is tried has to give: the run's, or those of a precision that has won
    numbers: Numbers = field(init=False)

    def read(self) -> None:
        """Reads the rows, which all that are tried share. Raises: RunnerError."""
        data = build.prepare_data(with_settings(self.cfg, {}), self.device)
        for batches in data.loaders.values():  # each has its own
            batches.close()
        self.data = replace(data, loaders={})

    def begin(self, plan: dict[str, Any]) -> None:
        """Builds the run as it is; where the plan says that it does not fit, with what it proposes. Raises: RunnerError."""
        self.needed = {"train.recompute": [plan["recompute"]]} if plan.get("recompute") else {}
        self.settings = dict(self.needed)
        try:
            self.usual = self.holder = self._candidate(self.settings)
        except Exception as error:
            if not backends.is_out_of_memory(error):
                raise
            fix = "python -m runner plan with the same words: it says what fits"
            raise RunnerError(Fault("tune", "the memory does not take a step of the run as it is", fix)) from error
        self.numbers = _numbers(self.usual)
        self.step_seconds, self.num_steps = self.usual.step_seconds, self.usual.parts.limits.num_steps
        self._end = time.monotonic() + self.seconds

    def options(self, plan: dict[str, Any], precisions: Sequence[str]) -> list[Option]:
        cfg = with_settings(self.cfg, self.needed)
        return options(cfg, self.usual.parts, plan, precisions=precisions)

    def take(self, option: Option) -> None:
        """Tries each answer of an option on top of what leads."""
        if option.why_not:
            self._add(Row({option.name: ""}, f"not tried: {option.why_not}"))
        for each in option.tries:
            steps = self.ratio * self.step_seconds * self.num_steps
            if each.get("train.compile") and MOST_SAVED * steps < LEAST_SECONDS_TO_COMPILE:
                why = f"it takes {LEAST_SECONDS_TO_COMPILE:.0f} s or more, and the run's steps take {steps:.1f} s"
                self._add(Row(each, f"not tried: {why}"))
            elif self._try(each) == SLOWER and option.goes_on:
                break

    def confirm(self) -> None:
        """Holds what leads against the run as it is once more: what does not win in the whole run's time is not taken."""
        if self.settings == self.needed:
            return
        found = compare(self.usual, self.holder, seconds=max(LEAST_SECONDS, SHARE * self.seconds))
        self.ratio = found.ratio
        if not (found.is_beyond_noise and self._gains(found, self.ahead, 0.0)):
            self._add(Row(self.settings, "at the end no faster than the run as it is", ratio=found.ratio))
            self.settings, self.ratio, self.ahead = dict(self.needed), 1.0, 0.0

    def close(self) -> None:
        for candidate in {id(each): each for each in (self.usual, self.holder)}.values():
            candidate.close()

    def _candidate(self, settings: dict[str, Any]) -> Candidate:
        return Candidate(with_settings(self.cfg, settings), self.device, read=self.data)

    def _try(self, each: dict[str, Any]) -> str:
        if time.monotonic() > self._end:
            return self._add(Row(each, f"not tried: {self.seconds:.0f} s were over (--seconds)"))
        settings = {**self.settings, **each}
        try:
            candidate = self._candidate(settings)
        except Exception as error:
            if not isinstance(error, RunnerError) and not backends.is_out_of_memory(error):
                raise
            why = error.faults[0].problem if isinstance(error, RunnerError) else "out of memory"
            return self._add(Row(each, f"refused: {why}"))
        row = Row(each, "", candidate.step_seconds, setup_seconds=candidate.setup_seconds)
        losses, precision = self.numbers
        if "train.precision" not in each and not is_same(losses, candidate.losses, precision=precision):
            row.outcome = "other numbers"
        else:
            seconds = max(LEAST_SECONDS, SHARE * self.seconds)
            found = compare(self.holder, candidate, seconds=seconds)
            row.step_seconds, row.ratio = found.step_seconds, self.ratio * found.ratio
            row.outcome = self._judged(found, settings, candidate)
        row.difference = difference(self.usual.losses, candidate.losses)
        self._add(row)
        loser = candidate
        if row.outcome == "wins":
            self.settings, self.ratio, self.ahead = settings, self.ratio * found.ratio, self._ahead(candidate, settings)
            loser, self.holder = self.holder, candidate
            if "train.precision" in each:
                self.numbers = _numbers(candidate)
        if loser is not self.usual:
            loser.close()
            gc.collect()
        return row.outcome

    def _add(self, row: Row) -> str:
        self.rows.append(row)
        self.tell(row)
        return row.outcome

    def _judged(self, found: Comparison, settings: dict[str, Any], candidate: Candidate) -> str:
        if not found.is_beyond_noise:
            return SLOWER if found.ratio > 1 + NOISE else "no faster beyond the noise"
        if not self._gains(found, self._ahead(candidate, settings), self.ahead):
            return f"too short a run: {candidate.setup_seconds:.0f} s of compiling are not won back"
        return "wins"

    def _ahead(self, candidate: Candidate, settings: dict[str, Any]) -> float:
        is_compiled = bool(settings.get("train.compile"))
        return candidate.setup_seconds - self.usual.setup_seconds if is_compiled else 0.0

    def _gains(self, found: Comparison, ahead: float, holders: float) -> bool:
        own = found.step_seconds * self.num_steps
        return ahead + own < holders + own / found.ratio


def _numbers(candidate: Candidate) -> Numbers:
    return candidate.losses, candidate.parts.precision.name
