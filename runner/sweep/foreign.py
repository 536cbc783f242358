"""A launcher of somebody else's goes in; one comes out that a sweep can hand jobs to, a batch at a time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from hydra.core.utils import JobStatus
from omegaconf import DictConfig, OmegaConf

from runner.device import Hardware
from runner.sweep.job import VARIABLE, Assignment
from runner.sweep.jobs import Prepared
from runner.sweep.nursery import Ended, Nursery

#: launchers whose jobs run on other machines
ELSEWHERE = ("SlurmLauncher", "RayAWSLauncher", "RQLauncher")


class Foreign:
    """Hydra's launchers take all jobs at once and answer when the last one has ended; so does this.

    submitit makes a Slurm array of them, which is what a cluster wants.
    """

    def __init__(self, launcher: Any, config: DictConfig) -> None:
        self._launcher, self._folder = launcher, Path(config.hydra.sweep.dir)
        target = str(config.hydra.launcher._target_)
        self.is_here = not target.endswith(ELSEWHERE)
        self._name = target.rsplit(".", 1)[-1]
        self._batch: list[tuple[Prepared, Assignment]] = []
        self._nursery: Nursery | None = None

    def nursery(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery({}, preload=("torch",))
        return self._nursery

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        return f"as {self._name} has them"

    def start(self, prepared: Prepared, assigned: Assignment) -> str | None:
        self._batch.append((prepared, assigned))
        return str(OmegaConf.select(prepared.config, "device"))

    def ended(self, seconds: float) -> list[Ended]:
        """Runs what has been handed over, and waits for all of it."""
        batch, self._batch = self._batch, []
        if not batch:
            return []
        # for launchers that start processes here; others get it among the overrides
        os.environ.pop(VARIABLE, None)
        overrides = [
            [
                *prepared.job.overrides,
                f"hydra.sweep.dir={self._folder}",
                f"hydra.sweep.subdir={prepared.job.folder_name}",
                f"+hydra.job.env_set.{VARIABLE}={assigned.as_text()}",
            ]
            for prepared, assigned in batch
        ]
        numbers = [prepared.job.number for prepared, _ in batch]
        try:
            returned = self._launcher.launch(overrides, initial_job_idx=min(numbers))
        except Exception as error:  # submitit raises when one of its jobs died
            print(f"{self._name}: {type(error).__name__}: {error}")
            return [Ended(number, 1) for number in numbers]
        return [
            Ended(number, 0 if found.status == JobStatus.COMPLETED else 1)
            for number, found in zip(numbers, returned, strict=True)
        ]

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        """The jobs are the launcher's: a Ctrl-C has reached them, or their scheduler, already."""

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
