"""Build a run's parts on a simulated device, and count and watch some of its steps. In the process of worker.py."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.data.loading.batches import Shard, Share
from runner.data.loading.loaders import Batches
from runner.data.loading.own_loader import Served
from runner.device.hardware import Speeds
from runner.device.placement import map_tensors, num_rows, tensors
from runner.device.precision import make_precision, number_type
from runner.errors import first_line, in_words
from runner.experiment.build import prepare_training
from runner.experiment.build_data import prepare_data
from runner.inspection import call_site
from runner.inspection.costs import Costs
from runner.inspection.findings import CERTAIN, LIKELY, Finding
from runner.inspection.guard import Meetings, Slow, of_read
from runner.inspection.host_reads import HostRead, HostReads
from runner.inspection.operations import OperationObserver, observe
from runner.inspection.tensor_names import TensorNames
from runner.tasks.metric_names import named_in
from runner.tools.plan.simulator import pretence, shapes
from runner.tools.plan.simulator.shapes import NotSimulated
from runner.tools.plan.simulator.tensor import simulated
from runner.tools.plan.simulator.values import value_reads
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import AveragedWeights
from runner.training.parts import Parts
from runner.training.step.train_step import Step, make_step

NUM_STEPS = 2  # the first one creates the optimizer's state; later ones are equal
#: reads of values that may decide what the program does, which a plan can't follow
UNFOLLOWED = {"float(tensor)", "tensor.item()", "tensor.tolist()", "tensor.numpy()", "tensor.cpu()"}
UNFOLLOWED |= {"numpy.asarray(tensor)"}
#: cuBLAS's workspace for a thread and a stream (CUBLAS_WORKSPACE_CONFIG=:4096:8). Two threads use it, forward and backward;
#: a graph's steps before the capture use a second stream
CUBLAS_BYTES = 8 * 4096 * 2**10
MAX_READS = 256  # of one line in a step: `while tensor > 1` would never end


class SimulatedRun:
    """A run's parts on a simulated device, without numbers. findings, reads: Of the steps so far."""

    def __init__(
        self,
        cfg: DictConfig,
        device: torch.device,
        *,
        speeds: Speeds | None = None,
        num_processes: int = 1,
        in_parts: bool = False,
    ) -> None:
        """Build the parts as prepare() does. Reads the batches of one step.

        Args:
            num_processes: That train together.
            in_parts: Whether each process has a part of every weight.
        """
        self.cfg, self.device = cfg, device
        self.num_processes, self.in_parts = num_processes, in_parts
        self.names, lines = TensorNames(), call_site.Lines()
        self.meetings = Meetings(device, self.names, lines)
        self.slow = Slow(device, lines, chosen={number_type(cfg.train.precision)})
        is_tf32, cudnn_tf32 = cfg.train.precision == "tf32", device.type == "cuda" and cfg.backends.cuda.cudnn_tf32
        self.costs = costs = Costs(device, speeds=speeds, tf32=is_tf32, cudnn_tf32=cudnn_tf32)
        self.findings: list[Finding] = []
        self.reads: list[HostRead] = []
        self._num_reads: Counter[str] = Counter()  # by line, in this step
        self.unknown = ""  # why the run can't be simulated
        pretence.forgives = _forgiving(self.meetings, self.findings, lines)
        value_reads.on_read = self._on_read
        data = prepare_data(cfg, device)
        pretence.big_is_shapes = True
        parts = prepare_training(cfg, device, data)
        self.parts = parts = _without_numbers(cfg, parts) if device.type == "cpu" else parts
        shard = Shard(0, num_processes) if _has_its_own_size(parts.train) else None
        batches = islice(parts.train.epoch(0, shard=shard), int(cfg.train.accumulate_steps))
        whole = (batch.batch if isinstance(batch, Share) else batch for batch in batches)
        self.group = tuple(map_tensors(batch, lambda tensor: simulated(tensor, device)) for batch in whole)
        parts.train.close()
        for tensor in _all(self.group):
            tensor.requires_grad_(False)
        self.names.model(parts.model)
        self.names.object(parts.task, "task")
        for batch in self.group:
            self.names.batch(batch)
        costs.hold("data set", sum(split.device_bytes for split in parts.loaders))
        if device.type == "cuda":
            costs.hold("libraries", CUBLAS_BYTES * 2 * (2 if cfg.train.cuda_graph else 1))
        costs.belongs((*parts.model.parameters(), *parts.model.buffers()), "weights")
        if parts.average is not None:
            costs.belongs((*parts.average.model.parameters(), *parts.average.model.buffers()), "average")
        costs.belongs(_all(self.group), "batch")
        self.buffer = MetricBuffer(
            device, lambda window: None, background=Background(), pull_every=cfg.metrics.pull_every
        )
        parts.model.train()

    def step(self, *, precision: str | None = None) -> Step:
        """Return the run's step, in this precision or in the run's."""
        parts = self.parts
        return make_step(
            parts.model,
            parts.task,
            optimizer=parts.optimizer,
            precision=make_precision(precision, device=self.device) if precision else parts.precision,
            clip_grad_norm=self.cfg.train.clip_grad_norm,
            average=parts.average,
        )

    def take_steps(self) -> None:
        """Take two steps with all checks; `costs` then has the work and the peak of the second."""
        step, costs = self.step(), self.costs
        ahead = self._ahead(self.group)
        costs.belongs(_all(ahead), "batch")
        for number in range(NUM_STEPS):
            if number:
                for part, num_bytes in _exchange(self.parts, self.num_processes, in_parts=self.in_parts).items():
                    costs.hold(part, num_bytes)
            costs.forget_work()
            with self._watching(self.meetings, self.slow, costs):
                self.buffer.write(step(self.group))
                if number < self.parts.limits.num_steps:
                    self.parts.schedule.after_step()
            states = (value for state in self.parts.optimizer.state.values() for value in state.values())
            costs.belongs((value for value in states if isinstance(value, Tensor)), "optimizer")

    def evaluate(self) -> None:
        """Evaluate a training batch with all checks, if the run evaluates."""
        if self.rows_evaluated:
            with self._watching(self.meetings, self.slow):
                self._evaluate(self.group[0])

    @property
    def rows_trained(self) -> int:
        """The rows of a training batch in this process."""
        return _rows_of_one(self.parts.train, self.num_processes)

    @property
    def rows_evaluated(self) -> int:
        """The rows of the largest evaluation batch in this process; 0: none. Metrics over a whole split need all rows."""
        num = 1 if named_in(self.cfg.task) else self.num_processes
        splits = (self.parts.val, self.parts.test)
        return max((min(_rows_of_one(split, num), split.num_rows) for split in splits if split is not None), default=0)

    def drop_batches(self) -> None:
        """Keep only the shapes of the batches, so that they don't take memory next to batches of other sizes."""
        self.group = tuple(map_tensors(batch, shapes.of) for batch in self.group)
        self.names.forget()

    def peak_bytes(self, batch_size: int, *, precision: str) -> int:
        """Return the peak memory of a step with batches of another size."""
        group = tuple(self._of_size(batch, batch_size) for batch in self.group)
        step = self.step(precision=precision)
        with self._counting(group):
            step(group)
        return self.costs.peak.num_bytes

    def evaluation_bytes(self) -> int | None:
        """Return the peak memory of an evaluation; if it is above the step's, `costs` keeps it. Call it after drop_batches().

        None: without an evaluation, or if the model does not accept this batch size. Discards the work counted so far.
        """
        if not self.rows_evaluated:
            return None
        costs, found, peak = self.costs, None, self.costs.peak
        batch = self._of_size(self.group[0], self.rows_evaluated)
        try:
            with self._counting((batch,), phase="evaluation"):
                self._evaluate(batch)
            found = costs.peak.num_bytes
        except Exception:  # reported by the step
            pass
        if found is None or found <= peak.num_bytes:
            costs.peak = peak
        return found

    def _evaluate(self, batch: Any) -> None:
        parts = self.parts
        parts.kept_model.eval()
        try:
            with torch.set_grad_enabled(getattr(parts.task, "needs_grad", False)), parts.precision.autocast():
                parts.task(parts.kept_model, batch)
        finally:
            parts.kept_model.train()
            parts.model.train()

    def _of_size(self, batch: Any, batch_size: int) -> Any:
        num = max(1, num_rows(self.group[0]))

        def resize(tensor: Tensor) -> Tensor:
            has_rows = tensor.dim() and tensor.shape[0] == num
            size = (batch_size, *tensor.shape[1:]) if has_rows else tensor.shape
            return simulated(torch.empty(size, dtype=tensor.dtype, device="meta"), self.device)

        return map_tensors(batch, resize)

    def _ahead(self, group: Sequence[Any]) -> list[Any]:
        """Allocate the next batch, which is copied during a streamed one."""
        if self.device.type != "cuda" or self.parts.train.device_bytes:
            return []
        sizes = [tensor.untyped_storage().nbytes() for tensor in _all(group[:1])]
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]

    @contextmanager
    def _watching(self, *observers: OperationObserver) -> Iterator[None]:
        self._num_reads.clear()
        watch = HostReads(self.device, observers=observers)
        try:
            with watch, _phases(self.costs, self.parts):
                yield
        finally:
            self.reads += watch.reads
            self.findings += [of_read(read) for read in watch.reads]

    @contextmanager
    def _counting(self, group: Sequence[Any], *, phase: str = "") -> Iterator[None]:
        self._num_reads.clear()
        with observe(self.costs), _phases(self.costs, self.parts):
            self.costs.phase = phase or self.costs.phase
            ahead = self._ahead(group)
            self.costs.belongs(_all((*group, *ahead)), "batch")
            self.costs.forget_work()
            yield

    def _on_read(self, what: str, decides: bool) -> None:
        stack = list(call_site.frames())
        place = str(HostRead(what, call_site.line(stack), call_site.module(stack)))
        if decides and not self.unknown:
            self.unknown = f"it goes by values: {place}"
        self._num_reads[place] += 1
        if self._num_reads[place] > MAX_READS:
            raise NotSimulated(f"it goes by values, over and over: {what}")


def _rows_of_one(batches: Batches, num_processes: int) -> int:
    return -(-batches.batch_size // num_processes) if _has_its_own_size(batches) else batches.batch_size


def _has_its_own_size(batches: Batches) -> bool:
    return isinstance(batches, Served) and batches.is_loader


def _exchange(parts: Parts, num: int, *, in_parts: bool) -> dict[str, int]:
    if num == 1:
        return {}
    if not in_parts:  # DistributedDataParallel's buckets
        return {"exchange": sum(each.nbytes for each in parts.model.parameters() if each.requires_grad)}
    from runner.distributed.sharding import BLOCK, blocks

    sizes = [sum(each.nbytes for each in block.parameters()) for block in blocks(parts.model, at_least=BLOCK)]
    weights = sum(each.nbytes for each in parts.model.parameters())
    rest = weights - sum(sizes)
    average = sum(each.nbytes for each in parts.average.model.parameters()) if parts.average else 0
    states = [value for state in parts.optimizer.state.values() for value in state.values()]
    optimizer = sum(value.nbytes for value in states if isinstance(value, Tensor) and value.dim())
    others = {"weights": weights, "average": average, "optimizer": optimizer}
    # a block is gathered during the computation of the one before; gradients are counted before they are scattered
    return {"gathered": rest + 2 * max(sizes, default=0), **{name: -(n - n // num) for name, n in others.items()}}


def of_error(error: BaseException) -> Finding:
    """Return the finding of an error that would also end the run."""
    stack: list[FrameType] = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    line, module = call_site.line_of_error(error), call_site.module(stack)
    return Finding(CERTAIN, "error", first_line(in_words(error)), line, module)


def _forgiving(
    meetings: Meetings, findings: list[Finding], lines: call_site.Lines
) -> Callable[[Exception, Any, Sequence[Tensor]], None]:

    def forgive(error: Exception, op: Any, inputs: Sequence[Tensor]) -> None:
        name = op._overloadpacket.__name__
        if isinstance(error, NotImplementedError):
            what = f"{name} has no kernel for MPS in this torch"
            fix = "PYTORCH_ENABLE_MPS_FALLBACK=1 before the command, to have the CPU compute it, or another operation"
            findings.append(Finding(LIKELY, "no kernel", what, *lines.now(), fix))
        elif isinstance(error, TypeError):
            findings.append(meetings.lacks_float64(name, inputs))
        elif (finding := meetings.explain(name, inputs)) is not None:
            findings.append(finding)

    return forgive


def _without_numbers(cfg: DictConfig, parts: Parts) -> Parts:
    parts.model._apply(lambda tensor: simulated(tensor, parts.device))
    if parts.average is None:
        return parts
    return replace(parts, average=AveragedWeights(parts.model, decay=cfg.train.ema_decay))


@contextmanager
def _phases(costs: Costs, parts: Parts) -> Iterator[None]:

    def begin(phase: str, part: str) -> None:
        costs.phase, costs.part = phase, part

    hooks = [register_optimizer_step_pre_hook(lambda *_: begin("optimizer", "optimizer"))]
    hooks += [
        parameter.register_post_accumulate_grad_hook(lambda found: costs.belongs([found.grad], "gradients"))
        for parameter in parts.model.parameters()
        if parameter.requires_grad
    ]
    begin("forward", "activations")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _all(group: Sequence[Any]) -> list[Tensor]:
    return [tensor for batch in group for tensor in tensors(batch)]
