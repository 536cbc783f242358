"""Take a run's steps with some settings and measure them; compare two runs in turns. For tune.py."""

from __future__ import annotations

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
from runner.experiment.build_data import PreparedData, set_switches
from runner.inspection.guard import Guard
from runner.training.background import Background
from runner.training.loop import Progress
from runner.training.metric_buffer import MetricBuffer, Window
from runner.training.step.choose import Watchers, choose_steps

NUM_LOSSES = 50
#: number of turns of a comparison, unless its seconds end before; a run that loses the first three is dropped
MAX_TURNS, MIN_TURNS, LOST_TURNS = 12, 6, 3
#: noise as a share of a step's time, and the share of turns that a faster run may lose (5 of 6 happen by chance in 11 %)
NOISE, MAX_LOST_SHARE = 0.02, 0.25
#: steps before the first comparison (the first creates the optimizer's state, one may compile), and their seconds
MIN_FIRST_CALLS, MIN_FIRST_STEPS, MAX_FIRST_SECONDS = 3, 5, 0.5
#: relative difference of two runs' first losses that rounding explains (1e-6 at the first step; other dropout gives 1e-2)
SAME, SAME_IN_HALVES = 1e-3, 3e-2


class Candidate:
    """A run with some settings. setup_seconds: Of building and first steps, beyond the time of as many later steps."""

    def __init__(self, cfg: DictConfig, device: torch.device, *, read: PreparedData) -> None:
        """Build the run on data that was read before, and take its first steps. Raises: what the run would raise."""
        began = time.perf_counter()
        self._cfg, self._windows = cfg, list[Window]()
        self.parts = parts = build.prepare(cfg, device, read=read)
        self.threads = torch.get_num_threads()
        self._background = Background(begin=partial(backends.use_in_thread, device))
        self._progress = Progress(best=parts.best)
        self._buffer = MetricBuffer(
            device, self._windows.append, background=self._background, pull_every=100, checks=False
        )
        try:
            self._steps = self._endless()
            times = self._first_steps()
        except BaseException:
            self.close()
            raise
        self.step_seconds = statistics.median(times[len(times) // 2 :])
        self.setup_seconds = max(0.0, time.perf_counter() - began - self._progress.step * self.step_seconds)

    @property
    def losses(self) -> Any:
        """The losses of the steps so far, at most NUM_LOSSES. Waits for the device."""
        if sum(len(window.steps) for window in self._windows) < min(NUM_LOSSES, self._progress.step):
            self._buffer.pull()
            self._background.wait()
        return np.concatenate([window.values[:, 0] for window in self._windows])[:NUM_LOSSES]

    def seconds_a_step(self, seconds: float) -> float:
        """Take steps for `seconds`, at least one call, and return the time of one. Waits for the device."""
        device = self.parts.device
        set_switches(self._cfg, device)
        if device.type == "cpu":
            torch.set_num_threads(self.threads)
        wait_for(device)
        began, num_steps = time.perf_counter(), 0
        with backends.backward_in_this_thread():  # as a run does
            while time.perf_counter() - began < seconds or not num_steps:
                num_steps += next(self._steps)
        wait_for(device)
        return (time.perf_counter() - began) / num_steps

    def close(self) -> None:
        self._background.close()
        for batches in self.parts.loaders:
            batches.close()
        backends.empty_cache(self.parts.device)

    def _endless(self) -> Iterator[int]:
        self.parts.schedule.last_step = self.parts.limits.num_steps  # some schedules refuse more steps than the run's
        parts = replace(self.parts, limits=replace(self.parts.limits, num_steps=2**40))
        guard = Guard(parts.device, when="off", model=parts.model, task=parts.task, optimizer=parts.optimizer)
        steps = choose_steps(
            parts,
            Settings.of(self._cfg),
            progress=self._progress,
            buffer=self._buffer,
            ranks=Alone(),
            watchers=Watchers(guard, None, lambda text: None),
        )
        parts.model.train()
        for epoch in count():
            for num_steps in steps.epoch(epoch):
                self._progress.step += num_steps
                yield num_steps

    def _first_steps(self) -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + MAX_FIRST_SECONDS
        for call in count(1):
            began = time.perf_counter()
            num_steps = next(self._steps)
            wait_for(self.parts.device)
            times += [(time.perf_counter() - began) / num_steps] * num_steps
            is_enough = call >= MIN_FIRST_CALLS and len(times) >= MIN_FIRST_STEPS
            if is_enough and (len(times) >= NUM_LOSSES or time.perf_counter() > end):
                break
        return times


@dataclass(frozen=True)
class SpeedComparison:
    """ratios: The time of a step of the new run divided by that of the fastest so far, per turn."""

    ratios: tuple[float, ...]
    step_seconds: float  # of the new run

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_faster(self) -> bool:
        """Whether the new run is faster, by more than noise and in nearly every turn."""
        num_lost = sum(ratio >= 1 for ratio in self.ratios)
        return self.ratio < 1 - NOISE and num_lost <= MAX_LOST_SHARE * len(self.ratios)


def compare(holder: Candidate, challenger: Candidate, *, seconds: float) -> SpeedComparison:
    """Measure both in turns, for about `seconds`; each is first equally often."""
    ratios, times = [], []
    end = time.perf_counter() + seconds
    for turn in range(MAX_TURNS):
        order = (holder, challenger) if turn % 2 else (challenger, holder)
        measured = {candidate is holder: candidate.seconds_a_step(seconds / (2 * MAX_TURNS)) for candidate in order}
        ratios.append(measured[False] / measured[True])
        times.append(measured[False])
        has_lost = len(ratios) == LOST_TURNS and min(ratios) >= 1
        if has_lost or (len(ratios) >= MIN_TURNS and time.perf_counter() > end):
            break
    return SpeedComparison(tuple(ratios), statistics.median(times))


def difference(one: Any, other: Any) -> float:
    """Return the largest relative difference of two series of losses, up to the shorter one."""
    num = min(len(one), len(other))
    one, other = np.asarray(one[:num], np.float64), np.asarray(other[:num], np.float64)
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(one), 1e-12))) if num else 0.0


def is_same(one: Any, other: Any, *, precision: str) -> bool:
    """Return whether the first losses of two runs differ by rounding only, which grows from step to step."""
    largest = SAME_IN_HALVES if precision in ("bf16", "fp16") else SAME
    return difference(one[:MIN_FIRST_STEPS], other[:MIN_FIRST_STEPS]) <= largest
