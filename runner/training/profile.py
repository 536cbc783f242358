"""Writes a trace of some steps for `train.profile=N`. fit.py wraps the steps in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runner.training.loop import Epochs

if TYPE_CHECKING:
    from torch.profiler import profile

FOLDER, TRACE, TABLE = "profile", "trace.json.gz", "operations.txt"
WARM = 10  # steps before: the first ones compile, allocate and fill caches
MAX_ROWS = 30
QUIET = ("KINETO_LOG_LEVEL", "6")  # else the profiler's library prints two lines (torch 2.13)


class Profiled:
    """Traces `num_steps` of the steps; see loop.Epochs. left: until the end of training; a short one is traced earlier."""

    def __init__(
        self,
        epochs: Epochs,
        num_steps: int,
        *,
        device: torch.device,
        folder: Path,
        say: Callable[[str], None],
        left: int,
    ) -> None:
        self._epochs, self._num_steps, self._device, self._say = epochs, num_steps, device, say
        self._folder, self._wait = folder / FOLDER, max(0, min(WARM, left - num_steps))
        self._taken = self._traced = 0
        self._profiler: profile | None = None
        self._is_over = False

    def epoch(self, number: int, *, first_step: int = 0) -> Iterator[int]:
        steps = self._epochs.epoch(number, first_step=first_step)
        while True:
            if self._profiler is None and not self._is_over and self._taken >= self._wait:
                self._begin()
            with torch.profiler.record_function(f"step {self._taken + 1}"):
                taken = next(steps, None)
            if taken is None:
                return
            self._taken += taken
            if self._profiler is not None:
                self._traced += taken
                if self._traced >= self._num_steps:
                    self.end()
            yield taken

    def end(self) -> None:
        """Write the trace; waits for the device. Raises: OSError."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._is_over = True
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._folder / TRACE))
        kind = "cpu" if self._device.type == "cpu" else "device"
        averages = profiler.key_averages()
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=MAX_ROWS, max_name_column_width=60)
        (self._folder / TABLE).write_text(table)
        begin = self._taken - self._traced + 1
        self._say(
            f"profile: steps {begin:,} to {self._taken:,} are in {FOLDER}/{TRACE}, for https://ui.perfetto.dev; "
            f"the longest operations in {FOLDER}/{TABLE}"
        )

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        known = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
        activities = [ProfilerActivity.CPU, *(known[kind] for kind in known if kind == self._device.type)]
        self._profiler = profile(activities=activities, acc_events=True)  # else it warns of cycles
        is_quiet = QUIET[0] in os.environ
        os.environ.setdefault(*QUIET)
        self._profiler.start()
        if not is_quiet:
            del os.environ[QUIET[0]]
