"""Captures steps as CUDA graphs and replays them, several with one launch: train.cuda_graph.

on_device.py calls it. There is a graph for each batch size and number of steps.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from runner.device.backends import is_out_of_memory
from runner.errors import first_line
from runner.inspection.call_site import UNKNOWN, line_of_error
from runner.training.step.fused_update import CannotTraceError
from runner.training.step.on_device import MAX_AT_ONCE, OnDevice, Repeater, Sizes, host_generators

#: steps of a graph of several steps
STEPS_A_REPLAY = 8
#: eager steps before a capture, as torch's notes on CUDA graphs recommend
WARM_UPS = 3
CUDA = torch.device("cuda")

Run = Callable[[], None]


class GraphSteps:
    """A Repeater that captures one step, or several at a time, and replays them.

    The first WARM_UPS steps of each size are eager, and count like any other. A smaller last batch has its own graph. Only
    a capture waits for the device.

    Args:
        compiled: Takes the steps to capture; None: they are not compiled.
        replaced: The names of what the model carries from step to step in new tensors or numbers: a graph would repeat the
            values of the capture.
    """

    is_required = True
    most_calls = MAX_AT_ONCE // STEPS_A_REPLAY

    def __init__(
        self, capture: Capture, *, compiled: Repeater | None = None, replaced: Callable[[], Sequence[str]] = lambda: ()
    ) -> None:
        self._capture, self._compiled, self._replaced = capture, compiled, replaced
        self._taken: Counter[Sizes] = Counter()
        self._graphs: dict[tuple[Sizes, int], Run] = {}

    def at_once(self, sizes: Sizes, room: int) -> int:
        return STEPS_A_REPLAY if room >= STEPS_A_REPLAY and self._taken[sizes] >= WARM_UPS else 1

    def take(self, steps: OnDevice, sizes: Sizes, num: int) -> None:
        run = partial(self._compiled.take, steps, sizes, num) if self._compiled else partial(steps.take, sizes, num)
        if self._taken[sizes] < WARM_UPS:
            self._capture.warm(run)
        else:
            if (sizes, num) not in self._graphs:
                self._graphs[sizes, num] = self._captured(run)
            self._graphs[sizes, num]()
        self._taken[sizes] += num

    def _captured(self, run: Run) -> Run:
        if names := self._replaced():
            problem = f"forward replaces `{names[0]}`, and a graph would repeat the value that it has in the capture"
            raise CannotTraceError(problem, "a change in place (`copy_`)")
        try:
            return self._capture.capture(run)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            problem = f"the step can't be captured, as something in it needs the host: {first_line(error)}"
            problem += f" at {line}" if (line := line_of_error(error)) != UNKNOWN else ""
            fix = "a step that reads nothing of the device (`placement.guard=always` names what does)"
            raise CannotTraceError(problem, fix) from error


class Capture(NamedTuple):
    """Functions that capture kernels, and run them before a capture."""

    capture: Callable[[Run], Run]
    warm: Callable[[Run], None]


def cuda_graphs() -> Capture:
    """Return what captures kernels on the current CUDA device. All its graphs share one memory pool.

    Capturing waits for the device. It raises the step's own error instead of CUDA's at the end of the capture, and
    restores the current stream. It raises CannotTraceError for a draw on the host, which a graph would repeat.
    """
    pool: Any = None
    side = torch.cuda.Stream()

    def capture(run: Run) -> Run:
        nonlocal pool
        graph, current, failed = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), []
        before = host_generators(CUDA)
        if pool is None:
            gc.collect()  # an earlier run's graphs are in reference cycles
        try:
            # thread_local: the background thread may use the device. side: torch's default stream is created once per
            # process, on the device of the first run that captures (torch 2.13)
            with _uncollected(), torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                try:
                    run()
                except BaseException as error:
                    failed.append(error)
                    raise
        except Exception:
            torch.cuda.set_stream(current)  # torch does not if the end of the capture fails (torch 2.13, graphs.py)
            if failed:
                raise failed[0] from None
            raise
        if drawn := [name for name, state in host_generators(CUDA).items() if state != before[name]]:
            problem = f"the step draws from {' and '.join(drawn)}, and a graph would repeat that draw at each step"
            raise CannotTraceError(problem, "draws on the device (`torch.rand(..., device=x.device)`)")
        pool = graph.pool()
        replay: Run = graph.replay
        return replay

    def warm(run: Run) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)

    return Capture(capture, warm)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Destroying a dead graph or kernel during a capture is an error of CUDA (pytorch#161037), so turn Python's gc off."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
