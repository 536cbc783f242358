"""Why a training ends or saves: its limits, its conditions, and the answers of one or several processes after each step."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from runner.distributed.group import Ranks
from runner.errors import Problem, RunnerError, nearest
from runner.training.signals import Stop

KEY = "train.early_stopping.metric"


def missing_metric(metric: str, measured: Iterable[str]) -> Problem:
    """A metric that the validation split doesn't have."""
    names = list(measured)
    problem = f"the validation split has no {metric}; it has {', '.join(names)}"
    judged = [name for name in names if name.startswith("val/")]  # hooks add others
    ways = [f"{KEY}={hit}" for hit in nearest(metric, judged) or judged or ["val/loss"]]
    return Problem.suggest(f"{KEY}={metric}", problem, ways, code="unknown-option")


#: of train.stop_when
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def first_reached(conditions: Mapping[str, str], values: Mapping[str, float]) -> str:
    """Return the first condition that holds, as `val/loss <1e-3`, or an empty text.

    Raises:
        RunnerError: For a metric without a value.
    """
    for metric, condition in conditions.items():
        if metric not in values:
            names = [name for name in values if name.startswith(("train/", "val/"))]
            fix = f"use {' or '.join(f'`{name}`' for name in nearest(metric, names) or names[:3])}"
            problem = f"`{metric}` is not measured; measured are {', '.join(names)}"
            raise RunnerError.of(f"train.stop_when={{{metric}: {condition}}}", problem, fix, code="unknown-option")
        limit = condition.lstrip("<>=")
        if COMPARISONS[condition.removesuffix(limit)](values[metric], float(limit)):
            return f"{metric} {condition}"
    return ""


#: seconds until all processes know an answer
SECONDS_BETWEEN = 0.4
MAX_STEPS_BETWEEN = 5_000
#: of several answers the last one in this list counts
ANSWERS = (None, "save", "max_seconds", "stopped")


@dataclass(frozen=True)
class Limits:
    """When a training ends, whichever comes first."""

    num_epochs: int
    num_steps: int
    max_seconds: float | None = None
    patience: int | None = None  # evaluations without a better value; None: no early stopping
    stop_when: Mapping[str, str] = field(default_factory=dict)  # comparisons by metric, as "<1e-3"
    save_every_seconds: float | None = None
    save_every_steps: int | None = None
    evaluate_every_steps: int | None = None  # None: after each epoch

    def room(self, step: int) -> int:
        """The number of steps after `step` until one of these numbers is reached."""
        every = [number for number in (self.save_every_steps, self.evaluate_every_steps) if number]
        return min([self.num_steps - step, *(number - step % number for number in every)])

    def evaluates_at(self, step: int) -> bool:
        """Whether the validation split is evaluated after `step`, wherever in an epoch that is."""
        return self.evaluate_every_steps is not None and step % self.evaluate_every_steps == 0


#: called with each step: "stopped" and "max_seconds" end the training, "save" saves a checkpoint, None continues. With
#: at_once=True, after an evaluation, the answer is "stopped" or None, and the others come after the next step
StopCondition = Callable[..., str | None]


class OwnStopCondition:
    """The answers of one process."""

    def __init__(self, stop: Stop, limits: Limits) -> None:
        self._stop, self._limits = stop, limits
        self._started = self._saved = time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        if self._stop.signal is not None:
            return "stopped"
        if at_once:
            return None
        now, limits = time.monotonic(), self._limits
        if limits.max_seconds is not None and now - self._started >= limits.max_seconds:
            return "max_seconds"
        by_steps = limits.save_every_steps is not None and step % limits.save_every_steps == 0
        if by_steps or (limits.save_every_seconds is not None and now - self._saved >= limits.save_every_seconds):
            self._saved = now
            return "save"
        return None


class CommonStopCondition:
    """The answers of several processes, which exchange theirs about twice a second.

    The number of steps between two exchanges depends on numbers that all processes have, so all exchange at the same
    steps. Rank 0's clock decides for all.
    """

    def __init__(self, stop: Stop, limits: Limits, ranks: Ranks) -> None:
        own = replace(limits, save_every_steps=None)  # each process counts the steps
        if not ranks.is_first:
            own = replace(own, save_every_seconds=None, max_seconds=None)
        self._own, self._ranks, self._save_every_steps = OwnStopCondition(stop, own), ranks, limits.save_every_steps
        self._pending: str | None = None  # this process's answer, which the others don't know yet
        self._next: int | None = None  # the step of the next exchange
        self._step, self._since = 0, time.monotonic()

    def __call__(self, step: int, *, at_once: bool = False) -> str | None:
        self._pending = max(self._pending, self._own(step, at_once=at_once), key=ANSWERS.index)
        if not at_once and self._next is not None and step < self._next:
            return self._by_steps(step)
        seconds = (time.monotonic() - self._since) / max(1, step - self._step)
        number, seconds = self._ranks.all_reduce_max([float(ANSWERS.index(self._pending)), seconds])
        num_steps = min(int(SECONDS_BETWEEN / max(seconds, 1e-9)), 2 * max(1, step - self._step))
        self._next = step + max(1, min(num_steps, MAX_STEPS_BETWEEN))
        self._step, self._since = step, time.monotonic()
        answer = ANSWERS[int(number)]
        if at_once and answer != "stopped":
            return None  # given after the next step
        self._pending = None
        return answer or self._by_steps(step)

    def _by_steps(self, step: int) -> str | None:
        every = self._save_every_steps
        return "save" if every is not None and step % every == 0 else None
