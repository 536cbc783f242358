"""Divides the time that a run took among what it was for: seconds by name that add up to the whole. Called by session.py.

A name is what a person can do something about. advice.py says what.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from runner.config.settings import Settings
from runner.device.benchmark.cache import MeasuredDevice
from runner.device.placement import num_bytes, num_rows
from runner.experiment.advice import Trained, best
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.step.clock import STEP, StepTimes
from runner.training.step.costs import StepCosts, look

log = logging.getLogger("runner")

#: in the order of a run, with what they are for a person
NAMES = {
    "start-up": "imports, data, model",
    "warm-up": "what first steps take beyond others",
    "data": "waiting for the next batch",
    "copies": "to the device, with nothing beside",
    "launch": "the host's calls, and Python",
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
#: what is no part of the training
AROUND = ("start-up", "tracker", "finish", "other")
LEAST_SHOWN = 0.01
UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))
#: of an update, that go through memory for a weight: Adam reads four numbers and writes three
UPDATE_BYTES, BYTES_PER_SECOND = 28, 1e10


def of_training(
    parts: Parts, settings: Settings, result: Result, *, speeds: MeasuredDevice | None, within: float | None
) -> dict[str, Any]:
    """Of summary.json: `time`, what fit() took by name; `step`, what a step is; `advice`, what would save most.

    speeds: what `devices --bench` found. within: seconds for looking at the step once more (None: it is not looked at).
    """
    steps = result.steps
    if steps is None or not steps.num_steps:
        return {"time": {**result.beside, "warm-up": steps.warm_seconds if steps else 0.0}}
    costs, found = StepCosts(), None
    trained = _trained(parts, settings, result, costs, speeds)
    try:
        if within is not None and not steps.is_shared and parts.shards is None:
            costs = look(parts, steps, accumulate_steps=settings.train.accumulate_steps, within=within)
            trained = _trained(parts, settings, result, costs, speeds)
        found = best(trained) if steps.num_clocked else None
    except Exception as error:  # of a model, a task or a Dataset that nobody foresaw
        log.info("the step could not be looked at once more: %s", error)
    advice = found and {
        "kind": found.kind,
        "why": found.why,
        "write": found.write,
        "saves": found.seconds / trained.seconds,
        "words": found.in_words(trained.seconds),
    }
    step = _of_one_step(steps, costs, settings.train.precision, speeds)
    return {"time": dict(trained.spent), "step": step, "advice": advice}


def _trained(
    parts: Parts, settings: Settings, result: Result, costs: StepCosts, speeds: MeasuredDevice | None
) -> Trained:
    assert result.steps is not None
    of_steps = _of_steps(parts, result.steps, costs, speeds, settings.train.accumulate_steps)
    spent = {"warm-up": result.steps.warm_seconds, **of_steps, **result.beside}
    return Trained(parts, settings, result, costs, {name: value for name, value in spent.items() if value})


def in_words(time: Mapping[str, float]) -> str:
    """Return the shares of the whole run in one line, in the order of a run."""
    total, around = sum(time.values()), {name: time.get(name, 0.0) for name in AROUND}
    parts = {"startup": around["start-up"], "training": total - sum(around.values())}
    parts |= {"plots and model logging": around["finish"], "tracking": around["tracker"], "other": around["other"]}
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value >= LEAST_SHOWN * total)


def rates_in_words(step: Mapping[str, Any]) -> str:
    """What the steps compute, and how much that is of the device, as far as both are known."""
    if not step["flops_per_second"]:
        return ""
    words = f"; {_flops(step['flops_per_second'])}FLOP/s"
    return words + (f", {step['of_device']:.1%} of this device's {step['precision']}" if step["of_device"] else "")


def _flops(count: float) -> str:
    unit, name = next((one for one in UNITS if count >= one[0]), UNITS[-1])
    return f"{count / unit:.3g} {name}"


def _of_one_step(steps: StepTimes, costs: StepCosts, precision: str, speeds: MeasuredDevice | None) -> dict[str, Any]:
    seconds = sum(steps.parts.values()) / steps.num_steps
    per_second = costs.flops / seconds if costs.flops and seconds else None
    most = speeds.flops_per_second.get(precision) if speeds else None
    return {
        "clocked": steps.num_clocked,
        "seconds": seconds,
        "parts": {name: value / steps.num_steps for name, value in steps.parts.items()},
        "device_seconds": steps.device_seconds and steps.device_seconds / steps.num_steps,
        "flops": costs.flops,
        "flops_per_second": per_second,
        "precision": precision,
        "of_device": per_second / most if per_second and most else None,
    }


def whole(training: Mapping[str, float], *, total: float, around: Mapping[str, float]) -> dict[str, float]:
    """All names that took any time, in their order; what is known of no name is `other`. around: before and after fit()."""
    known = {**training, **around}
    known["other"] = max(0.0, total - sum(known.values()))
    return {name: known[name] for name in NAMES if known.get(name)}


def _of_steps(
    parts: Parts, steps: StepTimes, costs: StepCosts, speeds: MeasuredDevice | None, accumulate_steps: int
) -> dict[str, float]:
    host = dict(steps.parts)
    data, metrics = host.pop("data", 0.0), host.pop("metrics", 0.0)
    queued = sum(host.values())
    seconds = data + queued + metrics
    if steps.device_seconds is not None:  # the host's part is what goes beyond the device's
        compute = min(seconds, steps.device_seconds)
        left = (seconds - compute) / seconds if seconds else 0.0
        copies = min(data, _copy_seconds(parts, steps, speeds, accumulate_steps)) * left
        return {
            "data": data * left - copies,
            "copies": copies,
            "launch": queued * left,
            "compute": compute,
            "metrics": metrics * left,
        }
    launch = min(queued, _launch(parts, steps, costs))
    return {"data": data, "launch": launch, "compute": queued - launch, "metrics": metrics}


def _copy_seconds(parts: Parts, steps: StepTimes, speeds: MeasuredDevice | None, accumulate_steps: int) -> float:
    if speeds is None or steps.kept is None or parts.train.indexed() is not None:
        return 0.0
    rows, count = steps.kept
    num_bytes_a_row = num_bytes(rows) / max(1, num_rows(rows))
    return num_bytes_a_row * count * accumulate_steps * steps.num_steps / speeds.copy_bytes_per_second


def _launch(parts: Parts, steps: StepTimes, costs: StepCosts) -> float:
    """Of a CPU, which computes as it is called: what calls would take without their work."""
    if (costs.launch is None and costs.own is None) or STEP in steps.parts:  # which is compiled
        return 0.0
    learning = steps.parts.get("forward", 0.0) + steps.parts.get("backward", 0.0)
    share = max(costs.launch or 0.0, costs.own.share if costs.own else 0.0)
    work = parts.num_parameters * UPDATE_BYTES / BYTES_PER_SECOND * steps.num_steps
    return share * learning + max(0.0, steps.parts.get("update", 0.0) - work)
