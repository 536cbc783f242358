"""The summary of a run, in summary.json: how it ended, its last values, and where its time went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig

from runner.config import run_files

if TYPE_CHECKING:  # torch
    from runner.training.result import Result
    from runner.training.step.clock import StepTimes

FILE = "summary.json"

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
OUTSIDE = ("start-up", "tracker", "finish", "other")
MIN_SHOWN = 0.01


@dataclass(frozen=True)
class Summary:
    """A run's result. The fields are the keys of summary.json; the defaults are those of a run that never started."""

    status: str = ""  # finished, pruned, killed, failed or skipped; "" without a summary
    error: str | None = None
    run_id: str | None = None
    tracking_uri: str | None = None  # None: not tracked
    device: str | None = None
    device_reason: str | None = None
    num_epochs: int = 0
    num_steps: int = 0
    num_samples: int = 0
    num_parameters: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last value of each
    best: Mapping[str, Any] = field(default_factory=dict)  # metric, value, step and mode
    ending: str = ""  # what ended the training
    seconds: Mapping[str, float] = field(default_factory=dict)  # start, setup, train, evaluate, finish and total
    time: Mapping[str, float] = field(default_factory=dict)  # seconds by cause; they add up to the total
    step: Mapping[str, Any] | None = None  # what one step takes
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    peak_memory_bytes: int | None = None
    peak_memory_of: str = ""
    hints: Sequence[str] = ()
    host_reads: Mapping[str, int] = field(default_factory=dict)  # pulls, points and unexpected
    tracker: Mapping[str, int] = field(default_factory=dict)  # points_written and points_pending
    versions: Mapping[str, str] = field(default_factory=dict)
    num_processes: int = 1
    exit_code: int = 0  # of a command that made only this run

    @property
    def code(self) -> int:
        """The exit code; also for a summary of an earlier version, which has only those of signals."""
        return int(self.exit_code or self.status == "failed")

    @property
    def has_ended(self) -> bool:
        """Whether the training has ended: it was neither killed nor skipped."""
        return self.status in ("finished", "pruned", "failed")

    def is_over(self, changed: Sequence[str] = ()) -> bool:
        """Return whether a run is complete and the changed arguments do not make it longer."""
        is_at_end = self.status in ("finished", "pruned") and self.ending != "max_seconds"
        return is_at_end and not any(word.lstrip("+").startswith("train.") for word in changed)

    @classmethod
    def read(cls, directory: Path) -> Summary:
        """Return a directory's summary, an empty one without a readable file. Values of a wrong type are left out."""
        try:
            values = run_files.read_json(directory / FILE)
        except (OSError, ValueError):
            return cls()
        hints = get_type_hints(cls).items() if isinstance(values, dict) else ()
        return cls(**{name: values[name] for name, kind in hints if name in values and _has_type(values[name], kind)})

    def write(self, directory: Path) -> None:
        """Raise an OSError if the disk is full; the file is the old one then."""
        run_files.write_whole(directory / FILE, json.dumps(vars(self), indent=2) + "\n")

    @classmethod
    def note(cls, directory: Path, **known: Any) -> None:
        """Add what the run's process could not know: where MLflow has it, and how much of it."""
        before = cls.read(directory)
        if before.status and (after := replace(before, **known)) != before:
            after.write(directory)


def _has_type(value: Any, kind: Any) -> bool:
    kinds = [get_origin(each) or each for each in (get_args(kind) if isinstance(kind, UnionType) else (kind,))]
    return isinstance(value, tuple(kinds)) or (float in kinds and isinstance(value, int))


def length_key(cfg: DictConfig) -> str:
    """Return the key that decides how long a run is."""
    return "train.num_epochs" if cfg.train.num_steps is None else "train.num_steps"


def training_times(result: Result) -> tuple[dict[str, float], dict[str, Any] | None]:
    """Return the seconds of fit() by cause, and what one step takes, as far as it was timed."""
    steps = result.steps
    if steps is None or not steps.num_steps:
        return {**result.other_seconds, "warm-up": steps.warm_seconds if steps else 0.0}, None
    spent = {"warm-up": steps.warm_seconds, **_of_steps(steps), **result.other_seconds}
    step = {
        "clocked": steps.num_clocked,
        "seconds": sum(steps.parts.values()) / steps.num_steps,
        "parts": {name: value / steps.num_steps for name, value in steps.parts.items()},
        "device_seconds": steps.device_seconds and steps.device_seconds / steps.num_steps,
    }
    return spent, step


def time_in_words(time: Mapping[str, float]) -> str:
    """Return the shares of the whole run in one line, in the order of a run."""
    total, outside = sum(time.values()), {name: time.get(name, 0.0) for name in OUTSIDE}
    parts = {"startup": outside["start-up"], "training": total - sum(outside.values())}
    parts |= {"plots and model logging": outside["finish"], "tracking": outside["tracker"], "other": outside["other"]}
    return ", ".join(f"{name} {value / total:.0%}" for name, value in parts.items() if value >= MIN_SHOWN * total)


def whole_time(training: Mapping[str, float], *, total: float, outside: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of every cause that took any, in order; the rest is `other`. outside: before and after fit()."""
    known = {**training, **outside}
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
