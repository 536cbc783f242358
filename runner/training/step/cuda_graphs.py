"""Captures steps on the device as CUDA graphs and replays them, several by one launch: train.cuda_graph.

on_device.py hands it the steps. It keeps a graph for each size of batch and number of steps at once.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from runner.device.backends import is_out_of_memory
from runner.errors import first_line
from runner.inspection.call_site import UNKNOWN, line_of_error
from runner.training.step.fused_update import CannotTraceError
from runner.training.step.on_device import Sizes, host_generators

#: steps that a graph of several has. One launch for several small steps; more would only make the graph longer
STEPS_A_REPLAY = 8
#: that a step is taken as it is written before it is captured, as torch asks for (its notes on CUDA graphs)
WARM_UPS = 3
CUDA = torch.device("cuda")

Run = Callable[[], None]


class Graphs:
    """A Repeater: steps are captured, one by one and several at a time, and replayed.

    The first WARM_UPS steps of each size are run and not captured, and count like any other. A last small batch is a graph
    of its own. Nothing waits for the device but the capture itself, once a graph.

    take: the steps that are captured, Steps.take or what is compiled of it.
    """

    def __init__(self, take: Callable[[Sizes, int], None], capture: Capture) -> None:
        self._take, self._capture = take, capture
        self._taken: Counter[Sizes] = Counter()
        self._graphs: dict[tuple[Sizes, int], Run] = {}

    def at_once(self, sizes: Sizes, room: int) -> int:
        """See Repeater."""
        return STEPS_A_REPLAY if room >= STEPS_A_REPLAY and self._taken[sizes] >= WARM_UPS else 1

    def take(self, sizes: Sizes, num: int) -> None:
        """See Repeater."""
        run = partial(self._take, sizes, num)
        if self._taken[sizes] < WARM_UPS:
            self._capture.warm(run)
        else:
            if (sizes, num) not in self._graphs:
                self._graphs[sizes, num] = self._captured(run)
            self._graphs[sizes, num]()
        self._taken[sizes] += num

    def _captured(self, run: Run) -> Run:
        try:
            return self._capture.capture(run)
        except HostDrawError as error:
            raise CannotTraceError(str(error), "draws on the device (torch.rand(..., device=x.device))") from error
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            problem = f"the step can't be captured, as something in it needs the host: {first_line(error)}"
            problem += f" at {line}" if (line := line_of_error(error)) != UNKNOWN else ""
            fix = "a step that reads nothing of the device (placement.guard=always names what does)"
            raise CannotTraceError(problem, fix) from error


class HostDrawError(Exception):
    """A step that draws random numbers on the host: a graph would have the same ones at each step."""


class Capture(NamedTuple):
    """What captures a run of kernels, and what runs them before."""

    capture: Callable[[Run], Run]
    warm: Callable[[Run], None]


def cuda_graphs() -> Capture:
    """Return what captures kernels on the current CUDA device. All its graphs share one memory pool.

    Capturing waits for the device. It raises the step's own error instead of CUDA's at the end of the capture, and
    restores the current stream. It also raises HostDrawError.
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
            raise HostDrawError(
                f"the step draws from {' and '.join(drawn)}, and a graph would repeat that draw at each step"
            )
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
