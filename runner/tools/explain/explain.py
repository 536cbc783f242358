"""`explain`: replay a run up to the step that went wrong, and find the operation, the line and the examples that caused it.

The path: asked_for(), replay.py, look(), blame.py, rows.py, text.py. The run's directory is only read.
"""

from __future__ import annotations

import math
import shlex
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from runner.device import backends, probe
from runner.device.placement import num_rows
from runner.errors import RunnerError, at_once
from runner.experiment.check import check
from runner.experiment.directory import Run
from runner.experiment.provenance import versions
from runner.experiment.summary import Summary
from runner.experiment.terminal import say, short
from runner.inspection.operations import observe
from runner.inspection.tensor_names import TensorNames
from runner.models.preprocessing import Prepared
from runner.runs import find
from runner.runs.load import computing, configuration_of
from runner.tools.explain import text
from runner.tools.explain.blame import Blame, blame, losses
from runner.tools.explain.not_finite import LargestValue, NotFiniteObserver, NotFiniteOperation, is_finite
from runner.tools.explain.replay import LossNotFiniteError, Moment, Start, replay, start_before
from runner.tools.explain.rows import MAX_ROWS, placed
from runner.tools.explain.text import Case, advice
from runner.tracking.journal_reader import read_series
from runner.training.checkpoint import snapshot

NUM_LARGEST = 5


@dataclass(frozen=True)
class Look:
    """The values of a watched step."""

    origin: NotFiniteOperation | None  # the first operation with a non-finite output; None: everything stays finite
    loss: float
    norms: Mapping[str, float]  # of the gradients, by module
    largest: tuple[LargestValue, ...]  # values in the forward pass, one per line of code
    generators: Mapping[str, object]  # random states before the step


def look(moment: Moment) -> Look:
    """Take the step and watch its operations. Ten times slower than a step: waits for the device at each operation."""
    parts, task = moment.parts, moment.task
    take = moment.reached.take
    assert take is not None
    model, names, norms = parts.model, _names(moment), dict[str, Tensor]()
    before = snapshot(model.state_dict())
    generators = backends.generator_states(parts.device)
    sound = [weight for weight in (*model.parameters(), *model.buffers()) if is_finite(weight)]
    hooks = [
        parameter.register_post_accumulate_grad_hook(_keeping(norms, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    cause, loss = None, math.nan
    observer = task.observer = NotFiniteObserver(model, names, outermost=sys._getframe())
    try:
        with observe(observer):
            values = take(moment.reached.batches)
        loss = float(next(iter(values.values())))
        causes = (observer.cause_of(weight) for weight in sound)
        cause = next(filter(None, causes), None)
    except LossNotFiniteError as error:
        cause, loss = error.cause, error.value
    finally:
        task.observer = None
        for hook in hooks:
            hook.remove()
        model.load_state_dict(before)
        parts.optimizer.zero_grad()
    scale = parts.precision.scaler.get_scale()
    prefix = "model." if isinstance(model, Prepared) else ""
    by_module = _by_module({name.removeprefix(prefix): float(norm) / scale for name, norm in norms.items()})
    origin = cause.origin() if cause is not None else None
    return Look(origin, loss, by_module, _largest(observer.largest), generators)


def _names(moment: Moment) -> TensorNames:
    names, parts = TensorNames(), moment.parts
    names.model(parts.model)
    names.object(moment.task.task, "task")
    single = len(moment.reached.batches) == 1
    for index, batch in enumerate(moment.reached.batches):
        names.batch(batch, "batch" if single else f"batch {index + 1}")
    names.optimizer(parts.optimizer)
    return names


def _keeping(norms: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def keep(parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[name] = torch.linalg.vector_norm(parameter.grad.detach().float())

    return keep


def _by_module(norms: Mapping[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + norm**2
    return {name: math.sqrt(found) for name, found in sorted(squares.items(), key=lambda item: -item[1])}


def _largest(sizes: Sequence[LargestValue]) -> tuple[LargestValue, ...]:
    found: dict[tuple[str, str], LargestValue] = {}
    for size in sorted(sizes, key=lambda one: -one.value):
        found.setdefault((size.name, size.line), size)
    return tuple(found.values())[:NUM_LARGEST]


LOSS = "train/loss"
#: steps before and after a spike that are printed
NEIGHBOURS = 3


@dataclass(frozen=True)
class Wanted:
    """The step to explain."""

    folder: Path
    step: int  # requested, or the first with a loss that is not finite
    is_failure: bool  # its loss is not finite
    by_step: Mapping[int, float]  # the run's losses, in order
    every: int  # steps per point

    @property
    def in_words(self) -> str:
        """The loss that the run logged at the step, for the user."""
        if self.step in self.by_step:
            return f"{LOSS} is {self.by_step[self.step]:.4g} at step {self.step:,}"
        reason = f" (metrics.every={self.every})" if self.every > 1 else ""
        return f"no {LOSS} was logged at step {self.step:,}{reason}"

    def around(self, step: int) -> list[int]:
        """Return the step and its neighbors that have a loss."""
        steps = list(self.by_step)
        place = bisect_left(steps, step)
        return steps[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]


def asked_for(wanted: str, cfg: DictConfig, folder: Path, step: int | None) -> Wanted:
    """Find the step to explain.

    Args:
        wanted: The run, as the user named it.
        step: None: the first step with a loss that is not finite.

    Raises:
        RunnerError: If the run has no such step.
    """
    series = read_series(folder).get(LOSS)
    if series is None:
        error, _, fix = (Summary.read(folder).error or "").partition("; help: ")
        problem = f"the run failed in its first step: {error}" if error else "the run took no step"
        command = f"run `python -m runner resume {shlex.quote(wanted)}`"
        fix = fix or (f"correct this and train again, or {command}" if error else command)
        raise RunnerError.of(f"explain {wanted}", problem, fix)
    last = dict(zip(series[0].tolist(), series[2].tolist(), strict=True))  # a resumed run has some steps twice
    by_step = {number: last[number] for number in sorted(last)}
    newest = max(by_step)
    if step is None:
        spoilt = [number for number, loss in by_step.items() if not math.isfinite(loss)]
        if not spoilt:
            leap = _largest_leap(by_step)
            problem = f"all {len(last):,} losses are finite; the largest jump is at step {leap:,}"
            raise RunnerError.suggest(
                f"explain {wanted}", problem, [f"python -m runner explain {wanted} --step {leap}"]
            )
        step = spoilt[0]
    elif step > newest:
        raise RunnerError.suggest(f"--step {step}", f"the run took {newest:,} steps", [f"--step {newest}"])
    is_failure = not math.isfinite(by_step.get(step, 0.0))
    return Wanted(folder, step, is_failure, by_step, int(cfg.metrics.every))


def _largest_leap(by_step: Mapping[int, float]) -> int:
    leaps = {after: by_step[after] - by_step[before] for before, after in pairwise(by_step)}
    return max(leaps, key=leaps.__getitem__, default=next(iter(by_step)))


#: a longer replay is announced
LONG_SECONDS = 5.0
#: the first replay ends at the requested step, later ones at the step that caused it
MAX_REPLAYS = 6


def explain(wanted: str, overrides: list[str], *, step: int | None) -> dict[str, Any]:
    """Print the explanation of a step, and return it as plain values.

    Raises:
        RunnerError: If the run has no such step, or no step is named and every loss is finite.
    """
    where, _ = at_once(partial(find.find, wanted, verb="explain"), partial(computing, overrides))
    folder: Path = where.absolute()
    cfg = configuration_of(folder, overrides)
    asked = asked_for(wanted, cfg, folder, step)
    was_compiled = bool(cfg.train.compile or cfg.train.cuda_graph)
    cfg.train.cuda_graph = False  # the replay is eager
    choice = check(cfg, probe())
    say(f"run     {short(folder)}: {asked.in_words}")
    start, moment, seen = _replayed(asked, cfg, torch.device(choice.here))
    found = _found(asked, cfg, start, moment, seen)
    found["notes"] = _notes(asked, choice.device, moment, was_compiled=was_compiled)
    if found["replay"]["first_difference"] and not found["notes"]:
        found["notes"].append(
            "another number of threads rounds differently, and so do jobs of a sweep that are trained together"
        )
    for line in text.lines(found):
        say(line)
    return found


def _notes(asked: Wanted, device: str, moment: Moment, *, was_compiled: bool) -> list[str]:
    summary, found = Summary.read(asked.folder), []
    if (num := summary.num_processes) > 1:
        found.append(f"{num} processes trained it, and one replays it: sums are rounded differently")
    if was_compiled:
        found.append("its steps were compiled, and the replay is eager: results are rounded differently")
    if (then := summary.device) not in (None, device):
        found.append(f"it ran on {then}, and is replayed on {device}")
    if (then := summary.versions.get("torch")) not in (None, now := versions()["torch"]):
        found.append(f"it ran with torch {then}, and this is {now}")
    if Run(asked.folder).has_other_data(moment.parts.splits.fingerprint):
        found.append("the data changed since the run trained: its fingerprint differs")
    return found


def _replayed(asked: Wanted, cfg: DictConfig, device: torch.device) -> tuple[Start, Moment, Look]:
    start, until = start_before(asked.folder, asked.step - asked.every + 1), asked.step
    _say_how_long(asked, start)
    for _ in range(MAX_REPLAYS):
        moment = replay(cfg, device, start, until=until)
        if moment is None:
            break
        if moment.reached.take is not None:
            seen = look(moment)
            if seen.origin is not None or not asked.is_failure:
                return start, moment, seen
            if until != asked.step:
                break
            until = max(asked.by_step) + 1  # this machine rounds differently: perhaps a later step fails
        elif moment.reached.step <= start.step:  # the checkpoint is not finite
            start = start_before(asked.folder, start.step)
        else:
            until = moment.reached.step
    problem = "the replay stays finite: the cause is not in the configuration, the data or the last checkpoint"
    fix = "use the run's code, data, torch version and device"
    raise RunnerError.of(f"explain {short(asked.folder)}", problem, fix)


def _say_how_long(asked: Wanted, start: Start) -> None:
    rate = Summary.read(asked.folder).steps_per_second or math.inf
    if (seconds := (asked.step - start.step) / rate) > LONG_SECONDS:
        say(f"replay  {asked.step - start.step:,} steps, at least {seconds:,.0f} s")


def _found(asked: Wanted, cfg: DictConfig, start: Start, moment: Moment, seen: Look) -> dict[str, Any]:
    origin, parts = seen.origin, moment.parts
    blamed = blame(moment, origin, seen.generators, loss=seen.loss) if origin is not None else Blame(())
    picked = losses(moment) if origin is None else [(blamed.batch, row, None) for row in blamed.rows]
    rows = placed(moment, cfg, picked[:MAX_ROWS])
    known = {**asked.by_step, **moment.losses}
    recent = [known[number] for number in sorted(known) if number < moment.reached.step]
    sure = rows if blamed.is_sure else []
    return {
        "run": short(asked.folder),
        "asked_step": asked.step,
        "step": moment.reached.step,
        "epoch": moment.place[0] + 1,
        "loss": seen.loss,
        "is_finite": origin is None,
        "replay": _comparison(asked, start, moment, seen.loss),
        "losses": {number: asked.by_step[number] for number in asked.around(moment.reached.step)},
        "operation": None if origin is None else text.operation(origin),
        "rows": [asdict(row) for row in rows],
        "num_bad_rows": len(blamed.rows),
        "num_rows": sum(num_rows(batch) for batch in moment.reached.batches),
        "rows_are_sure": blamed.is_sure,
        "of_all_rows": blamed.of_all,
        "gradient_norms": dict(seen.norms),
        "largest": [one._asdict() for one in seen.largest],
        "try": "" if origin is None else advice(Case(origin, sure, recent, parts.optimizer.param_groups)),
    }


def _comparison(asked: Wanted, start: Start, moment: Moment, loss: float) -> dict[str, Any]:
    now = {**moment.losses, moment.reached.step: loss}
    both = [(step, asked.by_step[step], now[step]) for step in sorted(now.keys() & asked.by_step.keys())]
    differing = [(step, then, here) for step, then, here in both if not _same(then, here)]
    return {
        "checkpoint": None if start.file is None else f"checkpoints/{start.file.name}",
        "from_step": start.step,
        "steps": moment.reached.step - start.step - 1,
        "compared": len(both) if asked.every == 1 else 0,
        "first_difference": differing[0] if differing and asked.every == 1 else None,
    }


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
