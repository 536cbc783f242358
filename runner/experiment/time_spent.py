"""Divides the time of a run among its causes, in seconds that add up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from runner.training.result import Result
from runner.training.step.clock import StepTimes

log = logging.getLogger("runner")

#: in the order of a run, with explanations
NAMES = {
    "start-up": "imports, data, model",
    "warm-up": "what first steps take beyond others",
    "data": "waiting for the next batch",
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


def of_training(result: Result) -> dict[str, Any]:
    """Return what summary.json says of a training's time: `time`, the seconds of fit() by name, and `step`, one step."""
    steps = result.steps
    if steps is None or not steps.num_steps:
        return {"time": {**result.other_seconds, "warm-up": steps.warm_seconds if steps else 0.0}}
    spent = {"warm-up": steps.warm_seconds, **_of_steps(steps), **result.other_seconds}
    step = {
        "clocked": steps.num_clocked,
        "seconds": sum(steps.parts.values()) / steps.num_steps,
        "parts": {name: value / steps.num_steps for name, value in steps.parts.items()},
        "device_seconds": steps.device_seconds and steps.device_seconds / steps.num_steps,
    }
    return {"time": {name: value for name, value in spent.items() if value}, "step": step}


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


def _of_steps(steps: StepTimes) -> dict[str, float]:
    host = dict(steps.parts)
    data, metrics = host.pop("data", 0.0), host.pop("metrics", 0.0)
    queued = sum(host.values())
    seconds = data + queued + metrics
    if steps.device_seconds is None:  # a CPU computes while it is called
        return {"data": data, "compute": queued, "metrics": metrics}
    compute = min(seconds, steps.device_seconds)
    left = (seconds - compute) / seconds if seconds else 0.0
    return {"data": data * left, "launch": queued * left, "compute": compute, "metrics": metrics * left}
