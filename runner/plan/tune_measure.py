"""Takes a run's own steps with some settings, for as long as it is asked to, and compares two in turns. For tune.py.

In the command's process and on the real device; what is compared lives side by side, two at a time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from runner.config.settings import Settings
from runner.device import backends
from runner.device.streams import wait_for
from runner.distributed.group import Alone
from runner.experiment import build
from runner.experiment.build_data import Data, set_switches
from runner.inspection.guard import Guard
from runner.training.background import Background
from runner.training.loop import Progress
from runner.training.metric_buffer import MetricBuffer, Window
from runner.training.step.choose import Watchers, choose_steps

NUM_LOSSES = 50
#: turns of a comparison, and of one whose steps take longer than their share of its time
TURNS, FEW_TURNS = 16, 6
#: how often two that take the same have so few turns against one of them, at most: for what is faster, and for what is
#: so much faster that no further turn is needed. A gain of an eighth has one turn of six against it here (2026-11)
BY_CHANCE, SELDOM, CLEARLY = 0.11, 0.04, 0.95
#: of a step's time, what is noise whatever the turns say
NOISE = 0.02
#: of the first steps' losses, relative: rounding is 1e-6, and another mask of dropout 1e-2
SAME, SAME_OF_HALVES, FIRST = 1e-3, 3e-2, 5
#: the calls of the first steps, at least: one makes the optimizer's state, one compiles; and their seconds at most
FIRST_CALLS, FIRST_SECONDS = 3, 0.5


class Candidate:
    """A run with some settings. setup_seconds: that it took before its steps are as quick as they stay."""

    def __init__(self, cfg: DictConfig, device: torch.device, *, read: Data) -> None:
        """Builds it and takes its first steps. read: its rows. Raises: what a run would raise."""
        began = time.perf_counter()
        self._cfg, self._windows = cfg, list[Window]()
        self.parts = parts = build.prepare(cfg, device, read=read)
        self.threads = torch.get_num_threads()
        self._background = Background(begin=partial(backends.use_in_thread, device))
        self._wait = partial(wait_for, device)
        self._progress = Progress(best=parts.best)
        self._buffer = MetricBuffer(device, self._windows.append, background=self._background, pull_every=100, watch="")
        try:
            self._steps = self._endless(self._buffer)
            times = self._first_steps()
        except BaseException:
            self.close()
            raise
        self.step_seconds = statistics.median(times[len(times) // 2 :])
        self.setup_seconds = max(0.0, time.perf_counter() - began - self._progress.step * self.step_seconds)

    @property
    def losses(self) -> Any:
        """Of the steps so far, the first NUM_LOSSES at most. Waits for the device."""
        if sum(len(window.steps) for window in self._windows) < min(NUM_LOSSES, self._progress.step):
            self._buffer.pull()
            self._background.wait()
        return np.concatenate([window.values[:, 0] for window in self._windows])[:NUM_LOSSES]

    def _endless(self, buffer: MetricBuffer) -> Iterator[int]:
        self.parts.schedule.last_step = self.parts.limits.num_steps  # some refuse more steps than the run's
        parts = replace(self.parts, limits=replace(self.parts.limits, num_steps=2**40))
        guard = Guard(parts.device, when="off", model=parts.model, task=parts.task, optimizer=parts.optimizer)
        steps = choose_steps(
            parts,
            Settings.of(self._cfg),
            progress=self._progress,
            buffer=buffer,
            ranks=Alone(),
            watchers=Watchers(guard, None, lambda text: None),
        )
        parts.model.train()
        for epoch in count():
            for taken in steps.epoch(epoch):
                self._progress.step += taken
                yield taken

    def _first_steps(self) -> list[float]:
        times: list[float] = []
        calls, end = 0, time.perf_counter() + FIRST_SECONDS
        while calls < FIRST_CALLS or len(times) < FIRST or (len(times) < NUM_LOSSES and time.perf_counter() < end):
            began = time.perf_counter()
            taken = next(self._steps)
            self._wait()
            times += [(time.perf_counter() - began) / taken] * taken
            calls += 1
        return times

    def seconds_a_step(self, seconds: float) -> float:
        """Takes steps for so long, one call at least, and says what each took. Waits for the device."""
        set_switches(self._cfg, self.parts.device)
        if self.parts.device.type == "cpu":
            torch.set_num_threads(self.threads)
        self._wait()
        began, taken = time.perf_counter(), 0
        with backends.backward_in_this_thread():  # as a run does
            while time.perf_counter() - began < seconds or not taken:
                taken += next(self._steps)
        self._wait()
        return (time.perf_counter() - began) / taken

    def close(self) -> None:
        self._background.close()
        for batches in (self.parts.train, self.parts.val, self.parts.test):
            if batches is not None:
                batches.close()
        backends.empty_cache(self.parts.device)


@dataclass(frozen=True)
class Comparison:
    """ratios: the challenger's time a step by the holder's, a turn each. num_turns: that there would be in all."""

    ratios: tuple[float, ...]
    step_seconds: float  # the challenger's
    num_turns: int = TURNS

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_beyond_noise(self) -> bool:
        """Whether the challenger is faster, and it is no accident."""
        return self.ratio < 1 - NOISE and self._by_chance(len(self.ratios)) <= BY_CHANCE

    @property
    def is_decided(self) -> bool:
        """Whether no further turn would change what is said."""
        is_clear = self.ratio < CLEARLY and self._by_chance(len(self.ratios)) <= SELDOM
        return is_clear or self._by_chance(self.num_turns) > BY_CHANCE

    def _by_chance(self, num: int) -> float:
        num_against = sum(ratio >= 1 for ratio in self.ratios)
        return sum(math.comb(num, against) for against in range(num_against + 1)) * 0.5**num


def compare(holder: Candidate, challenger: Candidate, *, seconds: float, to_the_end: bool = False) -> Comparison:
    """In turns, each first as often as the other. seconds: of all of them; they end where it is decided, but if they are
    to go on to the end."""
    each, began = seconds / (2 * TURNS), time.perf_counter()
    ratios, times = [], []
    for turn in range(TURNS):
        order = (holder, challenger) if turn % 2 else (challenger, holder)
        took = {candidate is holder: candidate.seconds_a_step(each) for candidate in order}
        ratios.append(took[False] / took[True])
        times.append(took[False])
        in_time = len(ratios) * seconds / max(time.perf_counter() - began, 1e-9)
        num = min(TURNS, max(FEW_TURNS, math.ceil(in_time)))
        found = Comparison(tuple(ratios), statistics.median(times), num)
        if len(ratios) >= num or (found.is_decided and not to_the_end):
            break
    return found


def difference(one: Any, other: Any) -> float:
    """The largest relative difference of two rows of losses."""
    num = min(len(one), len(other))
    one, other = np.asarray(one[:num], np.float64), np.asarray(other[:num], np.float64)
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(one), 1e-12))) if num else 0.0


def is_same(one: Any, other: Any, *, precision: str) -> bool:
    """Whether two runs begin alike but for rounding, which grows from step to step: by their first few losses."""
    return difference(one[:FIRST], other[:FIRST]) <= (SAME_OF_HALVES if precision in ("bf16", "fp16") else SAME)
