"""Divides the time that a run took among what it was for: seconds by name that add up to the whole. Called by session.py.

A name is what a person can do something about. advice.py says what.
"""

from __future__ import annotations

from collections.abc import Mapping

from runner.device.placement import num_bytes, num_rows
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.step.clock import StepTimes
from runner.training.step.costs import StepCosts

#: in the order of a run, with what they are for a person
NAMES = {
    "start-up": "imports, data, model",
    "warm-up": "the first steps, beyond what others take: kernels, memory, compiling",
    "data": "waiting for the next batch",
    "copies": "to the device, that nothing hides",
    "launch": "the host's calls of kernels, that nothing hides, and Python",
    "compute": "the device at work",
    "metrics": "rows of values, and their copies",
    "validation": "",
    "test": "",
    "hooks": "functions of yours",
    "checkpoints": "snapshots, and what waits for the disk in them",
    "disk": "waiting for journal and checkpoints at the end",
    "tracker": "waiting for MLflow",
    "finish": "the model for MLflow, pictures, summary",
    "other": "",
}
#: of an update, that go through memory for a weight: Adam reads four numbers and writes three
UPDATE_BYTES, BYTES_PER_SECOND = 28, 1e10


def of_training(parts: Parts, result: Result, costs: StepCosts, *, copy_speed: float | None) -> dict[str, float]:
    """What fit() took, by name. copy_speed: bytes a second to the device, where it was measured (None: it was not)."""
    steps = result.steps
    if steps is None:
        return dict(result.beside)
    found = {"warm-up": steps.warm_seconds, **_of_steps(parts, steps, costs)}
    if copy_speed and steps.kept and parts.device.type != "cpu" and parts.train.indexed() is None:
        rows, count = steps.kept
        copies = num_bytes(rows) * count / max(1, num_rows(rows)) / copy_speed * steps.num_steps
        found["copies"] = min(copies, found["data"])
        found["data"] -= found["copies"]
    return {name: value for name, value in found.items() if value} | result.beside


def whole(training: Mapping[str, float], *, total: float, around: Mapping[str, float]) -> dict[str, float]:
    """All names that took any time, in their order; what is known of no name is `other`. around: before and after fit()."""
    known = {**training, **around}
    known["other"] = max(0.0, total - sum(known.values()))
    return {name: known[name] for name in NAMES if known.get(name)}


def _of_steps(parts: Parts, steps: StepTimes, costs: StepCosts) -> dict[str, float]:
    host = dict(steps.parts)
    data, metrics = host.pop("data", 0.0), host.pop("metrics", 0.0)
    queued = sum(host.values())
    seconds = data + queued + metrics
    if steps.device_seconds is not None:  # the host's part is what goes beyond the device's
        compute = min(seconds, steps.device_seconds)
        left = (seconds - compute) / seconds if seconds else 0.0
        return {"data": data * left, "launch": queued * left, "compute": compute, "metrics": metrics * left}
    launch = _launch(parts, steps, costs) if parts.device.type == "cpu" else 0.0
    return {"data": data, "launch": min(launch, queued), "compute": queued - min(launch, queued), "metrics": metrics}


def _launch(parts: Parts, steps: StepTimes, costs: StepCosts) -> float:
    """Of a CPU, which computes as it is called: what calls would take without their work."""
    if costs.launch_seconds is None:
        return 0.0
    learning = steps.parts.get("forward", 0.0) + steps.parts.get("backward", 0.0)
    own = costs.own.share * learning if costs.own else 0.0
    work = parts.num_parameters * UPDATE_BYTES / BYTES_PER_SECOND * steps.num_steps
    return max(costs.launch_seconds * steps.num_steps, own) + max(0.0, steps.parts.get("update", 0.0) - work)
