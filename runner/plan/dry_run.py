"""Builds a run's own parts on a simulated device and has some of its steps counted and watched. In the process of worker.py."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from types import FrameType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner.data.loading.loaders import Batches
from runner.data.loading.served import Served
from runner.data.loading.shard import Shard, Share
from runner.device.placement import map_tensors, num_rows, tensors
from runner.device.precision import make_precision
from runner.errors import first_line, in_words
from runner.experiment.build import prepare_training
from runner.experiment.build_data import prepare_data
from runner.inspection import call_site
from runner.inspection.costs import Costs, Moment, Speeds
from runner.inspection.device_mismatch import Meetings
from runner.inspection.findings import CERTAIN, LIKELY, Finding
from runner.inspection.guard import Slow, of_read
from runner.inspection.host_reads import HostRead, HostReads, OperationObserver
from runner.inspection.tensor_names import Names
from runner.plan.simulator import pretence, shapes
from runner.plan.simulator.shapes import NotSimulated
from runner.plan.simulator.tensor import simulated
from runner.plan.simulator.values import asking
from runner.tasks.metric_names import asked_metrics
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import AveragedWeights
from runner.training.parts import Parts
from runner.training.step.train_step import Step, make_step

NUM_STEPS = 3  # the first makes the optimizer's state; from the second on they are alike
#: reads whose value may decide something, out of sight
UNFOLLOWED = ("float(tensor)", "tensor.tolist()", "tensor.numpy()", "tensor.cpu()", "numpy.asarray(tensor)")
#: cuBLAS's workspace for a thread and a stream (CUBLAS_WORKSPACE_CONFIG=:4096:8). Two threads use it, forward and backward;
#: a graph's steps before the capture use a second stream
CUBLAS_BYTES = 8 * 4096 * 2**10
MOST_TURNS = 256  # that a line may go by values in a step: `while tensor > 1` would never end


@dataclass
class Trial:
    """A run on a device without numbers. findings: what was seen so far."""

    cfg: DictConfig
    device: torch.device
    parts: Parts
    group: tuple[Any, ...]  # the batches of one step
    buffer: MetricBuffer
    names: Names
    meetings: Meetings
    slow: Slow
    costs: Costs
    findings: list[Finding]
    reads: list[HostRead]
    #: where the run goes one way or another by values that only the device has, and how often in this step
    turns: Counter[str]
    num_processes: int = 1
    in_parts: bool = False

    @property
    def unknown(self) -> str:
        """Why nobody can follow the run; empty where everybody can."""
        return f"it goes by values: {next(iter(self.turns))}" if self.turns else ""

    def step(self, *, precision: str | None = None) -> Step:
        """The run's own step, in this precision or in the run's."""
        parts = self.parts
        return make_step(
            parts.model,
            parts.task,
            optimizer=parts.optimizer,
            precision=make_precision(precision, device=self.device) if precision else parts.precision,
            clip_grad_norm=self.cfg.train.clip_grad_norm,
            average=parts.average,
        )

    def take_steps(self, num: int = NUM_STEPS) -> None:
        """Takes `num` steps, at least two, with all checks; `costs` has the last one's work, and the peak of all but the first."""
        step, costs = self.step(), self.costs
        ahead = self._ahead(self.group)
        costs.belongs(_all(ahead), "batch")
        peaks: list[tuple[Moment, list[Moment]]] = []  # from the second step to the last but one, with the timelines
        for number in range(num):
            if number == 1:
                for part, num_bytes in _exchange(self.parts, self.num_processes, in_parts=self.in_parts).items():
                    costs.hold(part, num_bytes)
            if number > 1:
                peaks.append((costs.peak, list(costs.timeline)))
            costs.forget_work()
            self._count_anew()
            with self._watching(self.meetings, self.slow, costs):
                self.buffer.write(step(self.group))
                _go_on(self.parts, number)
            _own_state(costs, self.parts)
        for peak, timeline in peaks:
            _keep_higher(costs, peak, timeline)

    def evaluate_once(self) -> None:
        """One batch as it is evaluated."""
        parts = self.parts
        if parts.val is None and parts.test is None:
            return
        parts.kept_model.eval()
        self._count_anew()
        enabled = torch.set_grad_enabled(getattr(parts.task, "needs_grad", False))
        with enabled, self._watching(self.meetings, self.slow), parts.precision.autocast():
            parts.task(parts.kept_model, self.group[0])
        parts.model.train()

    @property
    def rows_trained(self) -> int:
        """Of a batch, this process's."""
        return _rows_of_one(self.parts.train, self.num_processes)

    @property
    def rows_evaluated(self) -> int:
        """Of the largest batch that is evaluated, this process's; 0 where none is. Metrics over a whole split want all."""
        num = 1 if asked_metrics(self.cfg.task) else self.num_processes
        splits = (self.parts.val, self.parts.test)
        return max((min(_rows_of_one(each, num), each.num_rows) for each in splits if each is not None), default=0)

    def count_evaluation(self) -> int | None:
        """Returns the peak memory of an evaluation, in bytes; if it is above the step's, `costs` keeps it. Call it after let_go().

        None: there is no evaluation, or the model takes no batches of that size. It discards the work counted so far.
        """
        if not self.rows_evaluated:
            return None
        costs, found = self.costs, None
        peak, timeline = costs.peak, list(costs.timeline)
        try:
            found = self.evaluation_bytes(self.rows_evaluated)
        except Exception:  # the step's own batch has shown the error
            costs.peak = Moment(costs.phase, {})
        _keep_higher(costs, peak, timeline)
        return found

    def let_go(self) -> None:
        """Keeps of the batches their shapes alone, so that steps of other sizes do not have them beside theirs."""
        self.group = tuple(map_tensors(batch, shapes.of) for batch in self.group)
        self.names.forget()

    def peak_bytes(self, batch_size: int, *, precision: str) -> int:
        """Returns the peak memory of a step with batches of another size, in bytes."""
        self._count_anew()
        group = tuple(self._of_size(batch, batch_size) for batch in self.group)
        step = self.step(precision=precision)
        with HostReads(self.device, observers=(self.costs,)), _phases(self.costs, self.parts):
            ahead = self._ahead(group)
            self.costs.belongs(_all((*group, *ahead)), "batch")
            self.costs.forget_work()
            step(group)
        return self.costs.peak.num_bytes

    def evaluation_bytes(self, batch_size: int) -> int:
        """Returns the peak memory of an evaluation with batches of this size, in bytes."""
        parts = self.parts
        self._count_anew()
        batch = self._of_size(self.group[0], batch_size)
        parts.kept_model.eval()
        try:
            with HostReads(self.device, observers=(self.costs,)), _phases(self.costs, parts):
                self.costs.phase = "evaluation"
                ahead = self._ahead((batch,))
                self.costs.belongs(_all((batch, *ahead)), "batch")
                self.costs.forget_work()
                enabled = torch.set_grad_enabled(getattr(parts.task, "needs_grad", False))
                with enabled, parts.precision.autocast():
                    parts.task(parts.kept_model, batch)
        finally:
            parts.kept_model.train()
        return self.costs.peak.num_bytes

    def _of_size(self, batch: Any, batch_size: int) -> Any:
        size = max(1, num_rows(self.group[0]))
        return map_tensors(batch, lambda tensor: _resized(tensor, size, batch_size, self.device))

    def _ahead(self, group: Sequence[Any]) -> list[Any]:
        if self.device.type != "cuda" or self.parts.train.device_bytes:
            return []
        sizes = [tensor.untyped_storage().nbytes() for tensor in _all(group[:1])]
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]

    @contextmanager
    def _watching(self, *observers: OperationObserver) -> Iterator[None]:
        reads = HostReads(self.device, observers=observers)
        try:
            with reads, _phases(self.costs, self.parts):
                yield
        finally:
            self.reads += reads.found
            self.findings += [of_read(read) for read in reads.found]

    def _count_anew(self) -> None:
        for place in self.turns:
            self.turns[place] = 0


def build(
    cfg: DictConfig, device: torch.device, *, speeds: Speeds, num_processes: int = 1, in_parts: bool = False
) -> Trial:
    """The run's parts, as prepare() makes them, on a device that is simulated. Reads the data, and no more than that.

    num_processes: of which this is one. in_parts: whether each has a part of every weight, or all of them.
    """
    names, lines = Names(), call_site.Lines()
    meetings, slow = Meetings(device, names, lines), Slow(device, lines)
    costs = Costs(device, speeds=speeds, tf32=cfg.train.precision == "tf32")
    findings: list[Finding] = []
    turns: Counter[str] = Counter()
    pretence.forgives = _forgiving(meetings, findings, lines)
    asking.told = _counting(turns)
    data = prepare_data(cfg, device)
    pretence.big_is_shapes = True
    parts = prepare_training(cfg, device, data)
    if device.type == "cpu":
        parts = _without_numbers(cfg, parts)
    shard = Shard(0, num_processes) if _has_its_own_size(parts.train) else None
    group = tuple(islice(parts.train.epoch(0, shard=shard), int(cfg.train.accumulate_steps)))
    group = tuple(batch.batch if isinstance(batch, Share) else batch for batch in group)
    group = tuple(map_tensors(batch, lambda tensor: simulated(tensor, device)) for batch in group)
    parts.train.close()
    for tensor in _all(group):
        tensor.requires_grad_(False)
    names.model(parts.model)
    names.object(parts.task, "task")
    for batch in group:
        names.batch(batch)
    costs.hold("data set", sum(each.device_bytes for each in (parts.train, parts.val, parts.test) if each is not None))
    if device.type == "cuda":
        costs.hold("libraries", CUBLAS_BYTES * 2 * (2 if cfg.train.cuda_graph else 1))
    costs.belongs((*parts.model.parameters(), *parts.model.buffers()), "weights")
    if parts.average is not None:
        costs.belongs((*parts.average.model.parameters(), *parts.average.model.buffers()), "average")
    costs.belongs(_all(group), "batch")
    buffer = MetricBuffer(device, lambda window: None, background=Background(), pull_every=cfg.metrics.pull_every)
    parts.model.train()
    return Trial(
        cfg,
        device,
        parts,
        group,
        buffer,
        names,
        meetings,
        slow,
        costs,
        findings,
        [],
        turns,
        num_processes,
        in_parts,
    )


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
    # a block is gathered while the one before it is computed with; gradients are counted whole, as they are before they leave
    return {"gathered": rest + 2 * max(sizes, default=0), **{name: -(n - n // num) for name, n in others.items()}}


def of_error(error: BaseException) -> Finding:
    """A mistake that is none of placement: the run would end with it, too."""
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


def _counting(turns: Counter[str]) -> Callable[[str], None]:
    def count(what: str) -> None:
        stack = list(call_site.frames())
        place = str(HostRead(what, call_site.line(stack), call_site.module(stack)))
        turns[place] += 1
        if turns[place] > MOST_TURNS:
            raise NotSimulated(f"it goes by values, over and over: {what}")

    return count


def _without_numbers(cfg: DictConfig, parts: Parts) -> Parts:
    parts.model._apply(lambda tensor: simulated(tensor, parts.device))
    if parts.average is None:
        return parts
    return replace(parts, average=AveragedWeights(parts.model, decay=cfg.train.ema_decay))


@contextmanager
def _phases(costs: Costs, parts: Parts) -> Iterator[None]:

    def begin(phase: str, part: str) -> None:
        costs.phase, costs.part = phase, part

    def set_recurrent(is_recurrent: bool) -> Callable[..., None]:
        return lambda *_: setattr(costs, "is_recurrent", is_recurrent)

    hooks = [register_optimizer_step_pre_hook(lambda *_: begin("optimizer", "optimizer"))]
    for module in parts.model.modules():
        if isinstance(module, nn.RNNBase):
            hooks += [
                module.register_forward_pre_hook(set_recurrent(True)),
                module.register_forward_hook(set_recurrent(False), always_call=True),
            ]
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


def _keep_higher(costs: Costs, peak: Moment, timeline: list[Moment]) -> None:
    if peak.num_bytes > costs.peak.num_bytes:
        costs.peak, costs.timeline = peak, timeline


def _go_on(parts: Parts, number: int) -> None:
    if number < parts.limits.num_steps:
        parts.schedule.after_step()


def _own_state(costs: Costs, parts: Parts) -> None:
    states = parts.optimizer.state.values()
    costs.belongs((value for state in states for value in state.values() if isinstance(value, Tensor)), "optimizer")


def _resized(shape: Tensor, rows: int, wanted: int, device: torch.device) -> Tensor:
    whole = shape.shape if not shape.dim() or shape.shape[0] != rows else (wanted, *shape.shape[1:])
    return simulated(torch.empty(whole, dtype=shape.dtype, device="meta"), device)


def _all(group: Sequence[Any]) -> list[Tensor]:
    return [tensor for batch in group for tensor in tensors(batch)]
