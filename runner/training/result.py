"""What came of a training, however it ended: filled in by fit(), read by whoever tells of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from runner.inspection.findings import Finding
from runner.training.progress import Best
from runner.training.step.clock import StepTimes


@dataclass
class Result:
    """status: finished, pruned, killed or failed. ending: what ended the training (loop.train), or what of the machine did."""

    best: Best
    status: str = "failed"
    error: str | None = None
    ending: str = ""
    num_steps: int = 0
    num_epochs: int = 0
    num_samples: int = 0
    num_processes: int = 1  # that trained it together
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})
    #: of this part of the run: what its steps took, and what went on beside them, by name
    steps: StepTimes | None = None
    beside: dict[str, float] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)  # that some of it was done
    pulls: int = 0  # of metrics from the device
    peak_memory: tuple[int, str] | None = (
        None  # at the end of fit(), see backends.peak_memory(); None: it was not reached
    )
    findings: list[Finding] = field(default_factory=list)  # of the guard
