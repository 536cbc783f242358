"""A step and a set on the device go in; the steps of an epoch are taken by replays of CUDA graphs, which need nothing of the host."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from runner.data.loading.loaders import Batches
from runner.data.loading.resident import sent
from runner.device.backends import is_out_of_memory
from runner.errors import Fault, RunnerError, first_line
from runner.inspection.call_site import UNKNOWN, line_of_error
from runner.training.step.eager import Rates
from runner.training.step.fused_update import CannotTraceError, FixedUpdate
from runner.training.step.train_step import Step
from runner.training.stopping import Limits

#: steps that a graph of several has. One launch for several small steps; more would only make the graph longer
STEPS_A_REPLAY = 8
#: that a step is taken as it is written before it is captured, as torch asks for (its notes on CUDA graphs)
WARM_UPS = 3

Run = Callable[[], None]


class Indexed(Protocol):
    """A set on the device; see runner.data.loading.resident.Indexed."""

    def begin(self, epoch: int) -> None: ...

    def batch(self, places: Tensor) -> Any: ...


class Graphed:
    """Epochs whose steps are captured, one by one and several at a time.

    All that changes from step to step lies on the device: the epoch's order and the place in it, the rates, the row of the
    metric buffer. A last small batch is a graph of its own. The first WARM_UPS steps of each size are taken as they are
    written, and count like any other. Nothing waits for the device but the capture itself, once a graph.

    make: the run's train_step.make_step, with options by their names; first: what it makes, with the guard on it, for the first step.
    graphs: what repeats a run of kernels, and what runs it before that: cuda_graphs(), but in tests.
    """

    def __init__(
        self,
        make: Callable[..., Step],
        batches: Batches,
        *,
        first: Step,
        accumulate_steps: int,
        rates: Rates,
        limits: Limits,
        graphs: Graphs,
    ) -> None:
        """batches: of a split that lies on the device. limits: which no replay may pass by."""
        data = batches.indexed()
        assert data is not None
        self._make, self._data, self._rates, self._limits, self._graphs_of = make, data, rates, limits, graphs
        self._optimizer, self._buffer, self._progress = rates.optimizer, rates.buffer, rates.progress
        self._device = device = rates.buffer.device
        num_rows, batch_size = batches.num_rows, batches.batch_size
        sizes = [min(batch_size, num_rows - start) for start in range(0, num_rows, batch_size)]
        self._steps = [tuple(sizes[at : at + accumulate_steps]) for at in range(0, len(sizes), accumulate_steps)]
        self._rows_a_step = batch_size * accumulate_steps
        self._offsets = {size: torch.arange(size, device=device) for size in set(sizes)}
        self._place = torch.zeros((), dtype=torch.int64, device=device)  # of the next step's first row in the order
        self._table = torch.empty(0)  # (STEPS_A_REPLAY, G) rates of the steps to come
        self._sent: list[list[float]] = []
        self._update: FixedUpdate | None = None
        self._step = first
        self._taken: Counter[tuple[int, ...]] = Counter()
        self._graphs: dict[tuple[tuple[int, ...], int], Run] = {}

    @property
    def steps_per_epoch(self) -> int:
        return len(self._steps)

    def steps(self, epoch: int, *, first_step: int = 0) -> Iterator[int]:
        """See loop.Epochs. Raises: RunnerError for a step that can't be captured."""
        self._data.begin(epoch)
        self._place.fill_(first_step * self._rows_a_step)
        at = first_step
        while at < len(self._steps):
            sizes = self._steps[at]
            alike = self._steps.count(sizes) - at if sizes == self._steps[0] else 1
            room = min(alike, self._buffer.room, self._limits.room(self._progress.step))
            num = STEPS_A_REPLAY if room >= STEPS_A_REPLAY and self._taken[sizes] > WARM_UPS else 1
            if self._update is None and (self._taken or self._optimizer.state):  # of a run that goes on it is there
                self._fix_update()
            self._bring_rates(num)
            with self._rounded_rates():
                self._run(sizes, num)
            if self._update is None:
                self._rates.go_on()
            self._buffer.wrote(num)
            at += num
            yield num

    def _run(self, sizes: tuple[int, ...], num: int) -> None:
        self._taken[sizes] += num
        if self._taken[sizes] <= WARM_UPS:
            self._graphs_of.warm(lambda: self._take(sizes, num))
            return
        key = sizes, num
        if key not in self._graphs:
            try:
                self._graphs[key] = self._graphs_of.capture(lambda: self._take(sizes, num))
            except HostDrawError as error:
                fix = "draws on the device (torch.rand(..., device=x.device)), or train.cuda_graph=false"
                raise RunnerError(Fault("train.cuda_graph=true", str(error), fix)) from error
            except (RuntimeError, CannotTraceError) as error:
                if is_out_of_memory(error):
                    raise
                problem = f"the step can't be captured, as something in it needs the host: {first_line(error)}"
                problem += f" at {line}" if (line := line_of_error(error)) != UNKNOWN else ""
                fix = "train.cuda_graph=false (placement.guard=always names what reads the device)"
                raise RunnerError(Fault("train.cuda_graph=true", problem, fix)) from error
        self._graphs[key]()

    def _take(self, sizes: tuple[int, ...], num: int) -> None:
        """`num` steps of the same sizes, from where the device is to where it is then."""
        for index in range(num):
            if self._update is not None:
                self._update.rates.copy_(self._table[index])
            batches = []
            for size in sizes:
                batches.append(self._data.batch(self._place + self._offsets[size]))
                self._place.add_(size)
            self._buffer.write_on_device(self._step(batches))

    def _bring_rates(self, num: int) -> None:
        """Notes the rates of the next steps and writes them where the graphs read them, if they are others."""
        if self._update is None:  # the optimizer's own first step reads its own
            self._rates.note()
            return
        rates: list[list[float]] = []
        for ahead in range(num):
            self._rates.note(ahead=ahead)
            try:
                rates.append(self._update.now())
            except CannotTraceError as error:
                fix = "a schedule of rates alone (cycle_momentum=false), or train.cuda_graph=false"
                raise RunnerError(Fault("train.cuda_graph=true", str(error), fix)) from error
            self._rates.go_on()
        if rates != self._sent[:num]:
            self._sent = rates
            self._table[:num].copy_(sent(torch.tensor(rates, dtype=self._table.dtype), self._device))

    @contextmanager
    def _rounded_rates(self) -> Iterator[None]:
        """The optimizer's own first step has the graphs' rates, float32 on a GPU: a run that goes on has no such step."""
        groups = self._optimizer.param_groups if self._update is None and self._device.type != "cpu" else []
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = float(np.float32(group["lr"]))
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _fix_update(self) -> None:
        """After the first step, which made the optimizer's state."""
        try:
            self._update = FixedUpdate(self._optimizer, as_formula=False)
        except CannotTraceError as error:
            fix = "optimizer=adam, adamw or sgd (fused, as they are by default), or train.cuda_graph=false"
            raise RunnerError(Fault("train.cuda_graph=true", f"{error}, and that takes the host", fix)) from error
        self._step = self._make(update=self._update.update)
        self._table = self._update.rates.repeat(STEPS_A_REPLAY, 1)


class HostDrawError(Exception):
    """A step that draws random numbers on the host: a graph would have the same ones at each step."""


class Graphs(NamedTuple):
    """What captures a run of kernels, and what runs them before."""

    capture: Callable[[Run], Run]
    warm: Callable[[Run], None]


def cuda_graphs() -> Graphs:
    """What captures a run of kernels on the current CUDA device, and what runs them before; all graphs share their memory.

    Capturing waits for the device. It raises what the step raised, not what CUDA makes of that at the capture's end, and
    the current stream is then the one that it was; and HostDrawError.
    """
    pool: Any = None
    side = torch.cuda.Stream()

    def capture(run: Run) -> Run:
        nonlocal pool
        graph, current, failed = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), []
        before = _host_generators()
        try:
            # thread_local: the thread that waits for the metrics' copies may go on meanwhile
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    run()
                except BaseException as error:
                    failed.append(error)
                    raise
        except Exception:
            torch.cuda.set_stream(
                current
            )  # torch leaves the capture's where ending it fails, too (torch 2.13, graphs.py)
            if failed:
                raise failed[0] from None
            raise
        if drawn := [name for name, state in _host_generators().items() if state != before[name]]:
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

    return Graphs(capture, warm)


def _host_generators() -> dict[str, Any]:
    """By name, the state of each generator of the host."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "Python's random": random.getstate(),
        "NumPy's random": (kind, np.asarray(keys).tobytes(), *rest),
        "torch's CPU generator": torch.get_rng_state().numpy().tobytes(),
    }
