"""Trains in each process beside the first of several: the same training, but nobody is told, and nothing written but a log.

Called by run.py where our launcher started the process, by cli/train.py where torchrun or srun did.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from runner.config.settings import Settings
from runner.device import Choice
from runner.distributed import messages
from runner.distributed.environment import RankInfo
from runner.errors import RunnerError
from runner.experiment import processes
from runner.experiment.check import check_here
from runner.experiment.given import Given
from runner.training.fit import fit
from runner.training.observer import SilentObserver
from runner.training.signals import listening


def follow(cfg: DictConfig, place: RankInfo, *, choice: Choice | None = None) -> dict[str, Any]:
    """Trains with the others and says nothing: what it prints lies in the run's ranks/RANK.log. Returns how it ended.

    choice: the device, where the process that launched this one has chosen it.
    Raises: RunnerError for what is wrong with the configuration, as the first one does.
    """
    checked = check_here(cfg, choice=choice)
    (own,) = processes.devices_here(cfg, checked, place, given=Given(choice=choice))
    ranks = processes.joined(place, own)
    folder = Path(ranks.broadcast_object(""))
    settings = Settings.of(cfg)
    with _log(folder / messages.FOLDER / f"{place.rank}.log"):
        try:
            parts = processes.prepare_in_turn(cfg, ranks, torch.device(own.here), folder=folder, place=place)
        except RunnerError as error:
            messages.tell(folder, place.rank, str(error), problems=error.problems)
            raise
        with listening(
            grace_seconds=settings.train.grace_seconds, end_now=lambda stop, _: os._exit(stop.exit_code)
        ) as stop:
            result = fit(parts, settings, folder, observer=SilentObserver(), stop=stop, ranks=ranks)
    if result.status != "failed":
        ranks.leave()
    return {"status": result.status, "error": result.error, "ending": result.ending, "exit_code": stop.exit_code}


@contextmanager
def _log(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log: Any = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not file.stat().st_size:
            file.unlink()
            with suppress(OSError):  # others are there
                file.parent.rmdir()
