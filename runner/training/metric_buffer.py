"""Keeps each step's values on the device, one row per step, and copies them to the host a window at a time.

Rows are written after each step (step/choose.py, step/on_device.py, stacked/fit.py). The background thread gives each Window
to the session.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner.device import streams
from runner.errors import RunnerError
from runner.training.background import Background

#: values that must be finite, or the training ends
WATCHED = "train/loss"


@dataclass(frozen=True)
class Window:
    """The points of one copy. `notes` are host numbers, {name: [(step, value), ...]}."""

    names: tuple[str, ...]
    steps: NDArray[np.int64]  # (n,)
    values: NDArray[np.floating[Any]]  # (n, k)
    times_ms: NDArray[np.int64]  # (n,) when each step ended, spread evenly over the window
    seconds: float  # of the window's steps
    num_steps: int
    notes: Mapping[str, list[tuple[int, float]]]


class NotFiniteError(ArithmeticError):
    """The loss of a step is NaN or infinite."""

    def __init__(self, step: int, name: str, value: float) -> None:
        super().__init__(f"{name} is {value} at step {step}")
        self.step = step


class MetricBuffer:
    """Keeps every step's values on the device and copies them in windows.

    One half fills while the other is copied. On devices with streams the copy runs on a second stream to pinned memory, and
    only the background thread waits for it. On MPS and the CPU it is a plain copy, once per window. Rows are float32,
    or float64 if a value is.

    Args:
        sink: Called with each Window, in order, in the background thread.
        pull_every: Steps between copies.
        every: Steps per point, which is their mean, computed on the device.
        checks: Raise for a loss that is not finite, in the background.
        waits: Wait for that check at each copy, so that it raises at the same step in each run.
        mean: The mean over all processes, if several write at the same steps.
    """

    def __init__(
        self,
        device: torch.device,
        sink: Callable[[Window], None],
        *,
        background: Background,
        pull_every: int,
        every: int = 1,
        checks: bool = True,
        waits: bool = False,
        mean: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.pulls = 0
        self.step = 0
        self.device, self._sink, self._background = device, sink, background
        self._every, self._checks, self._waits, self._mean = every, checks, waits, mean
        self._half = math.ceil(pull_every / every) * every
        self._names: tuple[str, ...] = ()
        self._ring = torch.empty(0)
        self._rows: list[Tensor] = []
        self._next_row: Tensor | None = None  # (1,) of the next row, if the device writes
        self._offsets = torch.empty(0)  # (half,) the rows after it
        self._filled = self._pulled = 0  # rows since the start; the buffer wraps around
        self._notes: dict[str, list[tuple[int, float]]] = {}
        self._seen = time.perf_counter(), time.time()
        self._side = streams.side_stream(device)
        self._copied: list[torch.Event | None] = [None, None]

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Keep a step's 0-d tensors by one small kernel. Nothing waits.

        Raises:
            RunnerError: If the names differ from those of the first step. At a pull also errors of the background thread.
        """
        if not self._rows:
            self._allocate(values)
            self._rows = list(self._ring)  # the views, made once
        values = in_order(values, self._keys, of="a step")
        torch.stack(tuple(values.values()), out=self._rows[self._filled % len(self._rows)])
        self.wrote(1)

    def writes_on_device(self) -> bool:
        """Keep the number of the next row on the device from now on; False before the first step."""
        if len(self._ring) and self._next_row is None:
            self._next_row = torch.tensor([self._filled % len(self._ring)], device=self.device)
            self._offsets = torch.arange(self._half, device=self.device)
        return self._next_row is not None

    def write_on_device(self, steps: Sequence[Mapping[str, Tensor]]) -> None:
        """Like write(), for several steps, but the device counts the rows, as a captured step needs it.

        The caller calls wrote() afterwards, with at most `room` steps.
        """
        self._allocate(steps[0])
        self.writes_on_device()
        assert self._next_row is not None
        ordered = [in_order(values, self._keys, of="a step") for values in steps]
        rows = torch.stack([value for values in ordered for value in values.values()])
        self._ring.index_copy_(
            0, self._next_row + self._offsets[: len(steps)], rows.view(len(steps), -1).to(self._ring.dtype)
        )
        self._next_row.add_(len(steps)).remainder_(len(self._ring))

    def wrote(self, num_steps: int) -> None:
        """Count rows that were queued to be written. Raises errors of the background thread, at a pull."""
        self._filled += num_steps
        self.step += num_steps
        if self._filled % self._half == 0:
            self.pull()

    @property
    def room(self) -> int:
        """Rows until the next pull."""
        return self._half - self._filled % self._half

    @property
    def num_unread(self) -> int:
        """Rows that are not pulled yet."""
        return self._filled - self._pulled

    @property
    def seen_until(self) -> float:
        """When the last window's last step was over, by time.perf_counter, after waiting for that window."""
        return self._seen[0]

    def skip(self, seconds: float) -> None:
        """Leave the last `seconds`, such as an evaluation's, out of the next window's time. Call it before steps or after a pull."""
        self._background.put(lambda: setattr(self, "_seen", (self._seen[0] + seconds, self._seen[1] + seconds)))

    def note(self, name: str, value: float, *, ahead: int = 0) -> None:
        """Keep a host number for the next step, or one `ahead` steps later; it is delivered with the next window."""
        self._notes.setdefault(name, []).append((self.step + 1 + ahead, value))

    def state(self) -> dict[str, Any]:
        """The rows that are not pulled yet, for a checkpoint. Copying them waits for the device."""
        begin = self._pulled % max(1, len(self._ring))
        rows = self._over_all(self._ring[begin : begin + self.num_unread])
        notes = {name: list(points) for name, points in self._notes.items()}
        return {"names": list(self._names), "rows": rows, "notes": notes}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with the rows and notes of a checkpoint, before the first write()."""
        split_names = [name.removeprefix("train/") for name in state["names"]]
        if split_names:
            rows = state["rows"]
            # an earlier part with a longer window: they fill one half
            self._half = max(self._half, -(-(len(rows) + 1) // self._every) * self._every)
            self._ring, self._rows = torch.empty(0), []
            self._allocate(dict.fromkeys(split_names, torch.zeros((), dtype=rows.dtype)))
            self._ring[: len(rows)].copy_(rows)  # the mean over processes already
            self._filled = len(rows)
        self._notes = {name: [(step, value) for step, value in points] for name, points in state["notes"].items()}

    def pull(self, *, is_end: bool = True) -> None:
        """Start the copy of the rows since the last pull, and return; the background thread waits for it.

        Args:
            is_end: Whether fewer than `every` last steps make a point; else they stay for state().

        Raises:
            NotFiniteError: Of an earlier window; also errors of the sink.
        """
        num_steps = self.num_unread
        left = 0 if is_end else num_steps % self._every
        num_steps -= left
        if num_steps == 0:
            self._background.raise_error()
            return
        start = self._pulled % len(self._ring)
        half = start // self._half
        rows = self._ring[start : start + num_steps]  # never across a half: wrote() pulls at its end
        host, copied = self._copy(rows)
        self._copied[half] = copied
        self._pulled += num_steps
        self.pulls += 1
        # a part of a half, at the end: skip the rest of it
        if self._filled % self._half and not left:
            self._filled = self._pulled = (self._filled // self._half + 1) * self._half
            if self._next_row is not None:
                self._next_row.fill_(self._filled % len(self._ring))
        # sleep until the other half may be written again: the host is never more than two windows ahead of the device
        if (before := self._copied[1 - half]) is not None:
            before.synchronize()
        pull = _Pull(host, copied, num_steps, left, self.step - left, self._notes, (time.perf_counter(), time.time()))
        self._notes = {}
        self._background.do(lambda: self._deliver(pull))
        if self._waits:
            self._background.wait()

    def _allocate(self, values: Mapping[str, Tensor]) -> None:
        if len(self._ring):
            return
        self._keys = tuple(values)
        self._names = tuple(f"train/{name}" for name in values)
        is_double = any(value.dtype == torch.float64 for value in values.values())
        dtype = torch.float64 if is_double else torch.float32
        self._ring = torch.zeros(2 * self._half, len(self._names), dtype=dtype, device=self.device)
        self._filled = self._pulled = 0

    def _copy(self, rows: Tensor) -> tuple[Tensor, torch.Event | None]:
        if self._side is None:
            return self._over_all(self._means(rows)).to("cpu", copy=True), None
        self._side.wait_stream(streams.current(self.device))
        with streams.use(self._side):
            means = self._over_all(self._means(rows))
            host = torch.empty(means.shape, dtype=means.dtype, pin_memory=True)
            host.copy_(means, non_blocking=True)
            copied = streams.event(self.device)
            copied.record(self._side)
        return host, copied

    def _means(self, rows: Tensor) -> Tensor:  # (n, k) -> (ceil(n / every), k)
        if self._every == 1:
            return rows
        whole = len(rows) // self._every * self._every
        means = rows[:whole].view(-1, self._every, *rows.shape[1:]).mean(1)
        return means if whole == len(rows) else torch.cat([means, rows[whole:].mean(0, keepdim=True)])

    def _over_all(self, rows: Tensor) -> Tensor:
        return rows if self._mean is None or not len(rows) else self._mean(rows)

    def _deliver(self, pull: _Pull) -> None:
        # this thread may be late because of the disk: a copy that is over now ended when it was pulled
        (before, clock_before), (now, clock) = self._seen, pull.time
        if pull.copied is not None and (now <= before or not pull.copied.query()):
            pull.copied.synchronize()
            now, clock = time.perf_counter(), time.time()
        num_steps = pull.num_steps
        part = num_steps / (num_steps + pull.num_left)  # the remaining steps' time belongs to the next window
        now, clock = before + (now - before) * part, clock_before + (clock - clock_before) * part
        self._seen = now, clock
        values = pull.host.numpy()
        ends = np.minimum(np.arange(1, len(values) + 1) * self._every, num_steps)
        times_ms = ((clock_before + (clock - clock_before) * ends / num_steps) * 1000).astype(np.int64)
        steps = pull.last_step - num_steps + ends
        window = Window(self._names, steps, values, times_ms, now - before, num_steps, pull.notes)
        self._sink(window)
        if self._checks and WATCHED in self._names:
            _check(values[:, self._names.index(WATCHED)], steps)


class SharedRows:
    """Writes a step's rows of several buffers, values (M,), by one kernel. All of them must be at the same row."""

    def __init__(self, buffers: Sequence[MetricBuffer]) -> None:
        self.num_uncounted = 0  # rows that the buffers don't know of
        self._buffers, self._rows = buffers, list[Tensor]()

    @property
    def step(self) -> int:
        return self._buffers[0].step + self.num_uncounted

    @property
    def room(self) -> int:
        return self._buffers[0].room - self.num_uncounted

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Write a row of each buffer. Nothing waits. Afterwards the caller calls count(), and wrote() of each buffer."""
        first = self._buffers[0]
        if not self._rows:
            self._move(values)
        values = in_order(values, first._keys, of="a step")
        torch.stack(tuple(values.values()), out=self._rows[(first._filled + self.num_uncounted) % len(self._rows)])
        self.num_uncounted += 1

    def count(self) -> int:
        """Return the number of rows since the last call."""
        num, self.num_uncounted = self.num_uncounted, 0
        return num

    def _move(self, values: Mapping[str, Tensor]) -> None:
        """Make each buffer's ring a part of one tensor (2 * half, k, M)."""
        for buffer in self._buffers:
            buffer._allocate(values)
            for copied in buffer._copied:  # from the old memory
                if copied is not None:
                    copied.synchronize()
        ring = torch.stack([buffer._ring for buffer in self._buffers], dim=-1)
        for buffer, own in zip(self._buffers, ring.unbind(-1), strict=True):
            buffer._ring = own
        self._rows = list(ring)


@dataclass(frozen=True)
class _Pull:
    """A copy on its way to the host. num_left: steps after last_step that make a later point. time: when it began, by two clocks."""

    host: Tensor
    copied: torch.Event | None
    num_steps: int
    num_left: int
    last_step: int
    notes: dict[str, list[tuple[int, float]]]
    time: tuple[float, float]


def in_order(values: Mapping[str, Tensor], names: Sequence[str], *, of: str) -> Mapping[str, Tensor]:
    """The values in the order of `names`. Raises: RunnerError if the names differ."""
    if tuple(values) == tuple(names):
        return values
    if values.keys() != set(names):
        problem = f"the values of {of} are {', '.join(values) or 'none'}, and those before were {', '.join(names)}"
        fix = "return the same names each time, with `torch.tensor(float('nan'))` where there is no value"
        raise RunnerError.of("the values that the task returns", problem, fix)
    return {name: values[name] for name in names}


def check_unread(state: Mapping[str, Any], *, step: int) -> None:
    """Raise NotFiniteError for a loss in state(), the rows that are not pulled yet. Waits for the device."""
    if WATCHED in state["names"]:
        values = state["rows"][:, state["names"].index(WATCHED)].detach().cpu().numpy()
        _check(values, range(step - len(values) + 1, step + 1))


def _check(values: NDArray[np.floating[Any]], steps: Sequence[int] | NDArray[np.int64]) -> None:
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise NotFiniteError(int(steps[wrong[0]]), WATCHED, float(values[wrong[0]]))
