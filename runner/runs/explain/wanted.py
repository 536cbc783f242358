"""Finds which step of a run is to be explained: the one that is named, or the first whose loss is not finite. For explain.py."""

from __future__ import annotations

import math
import shlex
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from omegaconf import DictConfig

from runner.errors import Fault, RunnerError
from runner.experiment.summary import read_summary
from runner.tracking.journal_reader import read_series

LOSS = "train/loss"
#: steps beside a spike that are shown, on each side
NEIGHBOURS = 3


@dataclass(frozen=True)
class Wanted:
    """What is to be explained."""

    folder: Path
    step: int  # that is asked for, or whose loss is the first that is not finite
    is_failure: bool  # the loss is not finite there
    by_step: Mapping[int, float]  # the run's losses, in their order
    every: int  # steps a point

    @property
    def in_words(self) -> str:
        """What the run kept of that step."""
        if self.step in self.by_step:
            return f"{LOSS} is {self.by_step[self.step]:.4g} at step {self.step:,}"
        why = f" (metrics.every={self.every})" if self.every > 1 else ""
        return f"no {LOSS} was kept at step {self.step:,}{why}"

    def around(self, step: int) -> list[int]:
        """The steps beside one, and itself, that have a loss."""
        steps = list(self.by_step)
        place = bisect_left(steps, step)
        return steps[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]


def asked_for(wanted: str, cfg: DictConfig, folder: Path, step: int | None) -> Wanted:
    """wanted: the run, as it was named. step: None for the first whose loss is not finite.

    Raises: RunnerError where the run has no such step.
    """
    series = read_series(folder).get(LOSS)
    if series is None:
        error, _, fix = str(read_summary(folder).get("error") or "").partition("; write: ")
        problem = f"it failed in its first step: {error}" if error else "it has taken no step"
        fix = fix or (
            f"fix that and train again, or resume {shlex.quote(wanted)}" if error else f"resume {shlex.quote(wanted)}"
        )
        raise RunnerError(Fault(f"explain {wanted}", problem, fix))
    last = dict(zip(series[0].tolist(), series[2].tolist(), strict=True))  # one that went on has steps twice
    by_step = {number: last[number] for number in sorted(last)}
    newest = max(by_step)
    if step is None:
        spoilt = [number for number, loss in by_step.items() if not math.isfinite(loss)]
        if not spoilt:
            leap = _largest_leap(by_step)
            problem = f"its {len(last):,} losses are all finite; the largest leap of one is at step {leap:,}"
            raise RunnerError(Fault(f"explain {wanted}", problem, f"explain {wanted} --step {leap}"))
        step = spoilt[0]
    elif step > newest:
        raise RunnerError(Fault(f"--step {step}", f"the run took {newest:,} steps", f"--step {newest}"))
    is_failure = not math.isfinite(by_step.get(step, 0.0))
    return Wanted(folder, step, is_failure, by_step, int(cfg.metrics.every))


def _largest_leap(by_step: Mapping[int, float]) -> int:
    leaps = {after: by_step[after] - by_step[before] for before, after in pairwise(by_step)}
    return max(leaps, key=leaps.__getitem__, default=next(iter(by_step)))
