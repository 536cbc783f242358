"""Divides the time of a run among its causes, in seconds that add up, and advises the change that would save most."""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from runner.config.settings import Settings
from runner.data.loading.loaders import automatic_workers
from runner.data.own_loader import OwnLoader
from runner.device.benchmark.cache import MeasuredDevice
from runner.device.hardware import num_usable_cpus
from runner.experiment import rules
from runner.training.optimizer import Turns
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.step.clock import StepTimes

log = logging.getLogger("runner")

#: in the order of a run, with explanations
NAMES = {
    "start-up": "imports, data, model",
    "warm-up": "what first steps take beyond others",
    "data": "waiting for the next batch",
    "copies": "to the device, not hidden by other work",
    "launch": "the host's calls beyond the device's work",
    "compute": "the device at work",
    "metrics": "rows of values, and their copies",
    "steps": "all of them: none was clocked",
    "validation": "",
    "test": "",
    "hooks": "functions of yours",
    "checkpoints": "snapshots",
    "disk": "waiting for it at the end",
    "tracker": "waiting for MLflow",
    "finish": "the model for MLflow, pictures",
    "other": "",
}
#: outside of the training
AROUND = ("start-up", "tracker", "finish", "other")
LEAST_SHOWN = 0.01


def of_training(parts: Parts, settings: Settings, result: Result, *, speeds: MeasuredDevice | None) -> dict[str, Any]:
    """Return what summary.json says of a training's time.

    Args:
        speeds: the figures of `devices --bench`, if this device has any.

    Returns:
        `time`, the seconds of fit() by name; `step`, one step; `advice`, the change that would save most.
    """
    steps = result.steps
    if steps is None or not steps.num_steps:
        return {"time": {**result.other_seconds, "warm-up": steps.warm_seconds if steps else 0.0}}
    of_steps = _of_steps(parts, steps, speeds, settings.train.accumulate_steps)
    spent = {"warm-up": steps.warm_seconds, **of_steps, **result.other_seconds}
    trained = Trained(parts, settings, result, {name: value for name, value in spent.items() if value})
    try:
        found = best(trained) if steps.num_clocked else None
    except Exception as error:  # of a custom Dataset, whose rows the advice reads
        log.info("no advice: %s", error)
        found = None
    advice = found and {
        "kind": found.kind,
        "why": found.why,
        "write": found.write,
        "saves": found.seconds / trained.seconds,
        "words": found.in_words(trained.seconds),
    }
    step = {
        "clocked": steps.num_clocked,
        "seconds": sum(steps.parts.values()) / steps.num_steps,
        "parts": {name: value / steps.num_steps for name, value in steps.parts.items()},
        "device_seconds": steps.device_seconds and steps.device_seconds / steps.num_steps,
    }
    return {"time": dict(trained.spent), "step": step, "advice": advice}


def in_words(time: Mapping[str, float]) -> str:
    """Return the shares of the whole run in one line, in the order of a run."""
    total, around = sum(time.values()), {name: time.get(name, 0.0) for name in AROUND}
    parts = {"startup": around["start-up"], "training": total - sum(around.values())}
    parts |= {"plots and model logging": around["finish"], "tracking": around["tracker"], "other": around["other"]}
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value >= LEAST_SHOWN * total)


def whole(training: Mapping[str, float], *, total: float, around: Mapping[str, float]) -> dict[str, float]:
    """All names that took any time, in their order; what is known of no name is `other`. around: before and after fit()."""
    known = {**training, **around}
    known["other"] = max(0.0, total - sum(known.values()))
    return {name: known[name] for name in NAMES if known.get(name)}


def _of_steps(parts: Parts, steps: StepTimes, speeds: MeasuredDevice | None, accumulate_steps: int) -> dict[str, float]:
    host = dict(steps.parts)
    data, metrics = host.pop("data", 0.0), host.pop("metrics", 0.0)
    queued = sum(host.values())
    seconds = data + queued + metrics
    if steps.device_seconds is None:  # a CPU computes while it is called
        return {"data": data, "compute": queued, "metrics": metrics}
    compute = min(seconds, steps.device_seconds)
    left = (seconds - compute) / seconds if seconds else 0.0
    copies = 0.0
    if speeds is not None and steps.batch_bytes is not None and parts.train.indexed() is None:
        num_bytes = steps.batch_bytes * accumulate_steps * steps.num_steps
        copies = min(data, num_bytes / speeds.copy_bytes_per_second) * left
    return {
        "data": data * left - copies,
        "copies": copies,
        "launch": queued * left,
        "compute": compute,
        "metrics": metrics * left,
    }


#: of the training: less is not worth a word
LEAST, LEAST_SECONDS = 0.05, 1.0
#: of the host's part of a step that a compiled one does without, at least
COMPILED_SAVES, GRAPH_SAVES = 0.6, 0.9
#: rows a step that are few, and as many as are proposed
TINY_BATCH, USUAL_BATCH = 16, 64
#: of the training, that measuring and saving may take
ENOUGH = 0.03
MINUTE = 60
READ_ROWS = 8
#: of what readers would save if a batch cost nothing on its way from them
READERS_SAVE = 0.85


@dataclass(frozen=True)
class Advice:
    """kind: what the training is bound by, and why: where that is seen. write: what to change. seconds: that it would save.

    but: what else it changes.
    """

    kind: str
    write: str
    seconds: float
    why: str = ""
    but: str = ""

    def in_words(self, of_seconds: float) -> str:
        """of_seconds: of the training without its first steps, see Trained.seconds."""
        kind = f"{self.kind} ({self.why})" if self.why else self.kind
        saves = f"{kind}: {self.write} would save about {self.seconds / of_seconds:.0%} of the training after its first steps"
        return f"{saves}; {self.but}" if self.but else saves


@dataclass(frozen=True)
class Trained:
    """A training that is over. spent: seconds by name (time_spent.py)."""

    parts: Parts
    settings: Settings
    result: Result
    spent: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """Without what the first steps took beyond others: a longer run has it once."""
        return sum(self.spent.values()) - self.spent.get("warm-up", 0.0)

    @property
    def num_steps(self) -> int:
        return self.result.steps.num_steps if self.result.steps else 0


def best(run: Trained) -> Advice | None:
    """The advice that saves most; None where none saves much, or the training took no time."""
    if run.seconds < LEAST_SECONDS:
        return None
    found = [rule(run) for rule in (_read, _host_read, _compile, _batch, _validate, _save)]
    worth = [advice for advice in found if advice is not None and advice.seconds >= LEAST * run.seconds]
    return max(worth, key=lambda advice: advice.seconds, default=None)


def _read(run: Trained) -> Advice | None:
    rows, waited = run.parts.splits.train, run.spent.get("data", 0.0)
    if waited < LEAST * run.seconds:
        return None
    if isinstance(rows, OwnLoader):
        write = "a loader that reads ahead (DataLoader(..., num_workers=...))"
        return Advice("data-bound", write, waited, but="at most that, where it keeps up")
    if not isinstance(rows, Dataset):
        return None
    num_steps, num_rows = run.num_steps, run.parts.train.batch_size * run.settings.train.accumulate_steps
    step = sum(run.spent.get(name, 0.0) for name in ("launch", "compute", "metrics", "copies")) / num_steps
    asked, cpus = run.settings.experiment.get("data.num_workers"), num_usable_cpus()
    now = automatic_workers(rows) if asked is None else int(asked)
    batch = (waited / num_steps + step) * now if now else waited / num_steps
    on_cpu = _share_on_cpu(rows)

    def waits(readers: int) -> float:
        """For the data of all steps; the CPUs are shared with them."""
        return max(0.0, batch / readers - step, (on_cpu * batch + step) / cpus - step) * num_steps

    more = list(range(now + 1, cpus + 1))  # torch warns of more
    why = f"a row takes {batch / num_rows * 1000:.3g} ms"
    if more:
        readers = next(count for count in more if waits(count) <= min(map(waits, more)) + LEAST * run.seconds)
        if (saves := READERS_SAVE * (waited - waits(readers))) > waited / 4:
            return Advice("data-bound", f"data.num_workers={readers}", saves, why)
    epochs = num_steps * run.settings.train.accumulate_steps / run.parts.train.num_batches
    write = "all rows as tensors, read once by your function,"
    return Advice("data-bound", write, waited * max(0.0, 1 - 1 / max(epochs, 1.0)), why)


def _host_read(run: Trained) -> Advice | None:
    launch = run.spent.get("launch", 0.0)
    reads = [found for found in run.result.findings if found.kind == "host read" and found.line]
    if not reads or run.parts.device.type == "cpu":
        return None
    return Advice("host read", "a step without it", 0.8 * launch, f"{reads[0].where} waits for the device")


def _compile(run: Trained) -> Advice | None:
    train, parts, launch = run.settings.train, run.parts, run.spent.get("launch", 0.0)
    if train.compile or train.cuda_graph or isinstance(parts.optimizer, Turns) or run.result.findings:
        return None
    if parts.device.type != "cuda":
        return None
    is_on_device = parts.train.indexed() is not None
    situation = rules.Situation("cuda", run.result.num_processes, is_on_device=is_on_device)
    if is_on_device:
        clash = rules.why_not(run.settings, {"train.cuda_graph": True}, situation)
        return None if clash else Advice("launch-bound", "train.cuda_graph=true", GRAPH_SAVES * launch)
    if rules.why_not(run.settings, {"train.compile": True}, situation) or not _has_compiler():
        return None
    but = "compiling takes some seconds, once" if launch < MINUTE else ""
    return Advice("launch-bound", "train.compile=true", COMPILED_SAVES * launch, but=but)


def _batch(run: Trained) -> Advice | None:
    train, num_rows = run.settings.train, run.parts.train.num_rows
    rows = train.batch_size
    larger = min(USUAL_BATCH, 2 ** int(math.log2(max(1, num_rows // 8))))
    if rows > TINY_BATCH or larger < 4 * rows or not run.result.steps:
        return None
    of_steps = sum(run.spent.get(name, 0.0) for name in ("launch", "metrics"))
    but = "it learns otherwise then, and wants another optimizer.lr"
    why = f"{rows} rows a step"
    return Advice("tiny batch", f"train.batch_size={larger}", (1 - rows / larger) * of_steps, why, but)


def _validate(run: Trained) -> Advice | None:
    spent, times = run.spent.get("validation", 0.0), run.result.times.get("validation", 0)
    limits, train = run.parts.limits, run.settings.train
    apart = math.ceil(spent / max(ENOUGH * (run.seconds - spent), 1e-9))
    left = math.ceil(times / apart) if apart else times
    if times < 2 or left == times:
        return None
    every = limits.evaluate_every_steps or -(-run.parts.train.num_batches // train.accumulate_steps)
    write = f"train.evaluate_every_steps={every * math.ceil(times / left)}"
    but = "the best weights are chosen from fewer then"
    return Advice("validation", write, spent * (1 - left / times), f"{times:,} times", but)


def _save(run: Trained) -> Advice | None:
    spent, times = run.spent.get("checkpoints", 0.0), run.result.times
    asked = [
        ("train.checkpoint_every_steps", run.parts.limits.save_every_steps),
        ("train.checkpoint_every_seconds", run.parts.limits.save_every_seconds),
    ]
    count = times.get("last", 0)
    apart = math.ceil(spent / max(ENOUGH * (run.seconds - spent), 1e-9))
    if count < 2 or apart < 2:
        return None
    key, every = asked[0] if asked[0][1] else asked[1]
    if every is None:
        return None
    of_these = spent * count / sum(times.get(name, 0) for name in ("last", "best", "measured"))
    write = f"{key}={every * apart:g}"
    return Advice("checkpoints", write, of_these * (1 - 1 / min(apart, count)), f"{count:,} of them")


def _share_on_cpu(rows: Any) -> float:
    began, computing = time.perf_counter(), time.thread_time()
    count = min(READ_ROWS, len(rows))
    for index in range(count):
        rows[index * (len(rows) // count)]
    return min(1.0, (time.thread_time() - computing) / max(time.perf_counter() - began, 1e-9))


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
