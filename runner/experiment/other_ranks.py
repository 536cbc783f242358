"""A configuration and a place beside the first of several processes go in; the same training comes out, and nothing is written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig
from rich.console import Console

from runner.device import Choice, probe
from runner.distributed import messages
from runner.distributed.environment import Place
from runner.errors import RunnerError
from runner.experiment import processes
from runner.experiment.build import check
from runner.experiment.console import Screen
from runner.experiment.reporter import Unheard
from runner.experiment.run_record import Record
from runner.training.signals import Stop, listening
from runner.training.trainer import Training, train_and_test


def follow(cfg: DictConfig, place: Place, *, choice: Choice | None = None) -> dict[str, Any]:
    """Trains with the others and says nothing: what it prints lies in the run's ranks/RANK.log. Returns how it ended.

    choice: the device, where the process that launched this one has chosen it.
    Raises: RunnerError for what is wrong with the configuration, as the first one does.
    """
    hardware = probe()
    chosen = check(cfg, hardware, choice=choice)
    (own,) = processes.devices_here(cfg, hardware, chosen, place, is_given=choice is not None, has_trial=False)
    ranks = processes.joined(place, own)
    folder = Path(ranks.from_first(""))
    record = Record()
    with _log(folder / messages.FOLDER / f"{place.rank}.log"):
        try:
            parts = processes.prepare_in_turn(cfg, ranks, torch.device(own.here), folder=folder, place=place)
        except RunnerError as error:
            messages.tell(folder, place.rank, str(error), faults=error.faults)
            raise
        record.best = parts.best
        with listening(grace_seconds=cfg.train.grace_seconds, end_now=_end_now) as stop:
            screen = Screen(Console(file=StringIO()))
            reporter = Unheard()
            training = Training(
                cfg, parts, record, reporter=reporter, screen=screen, stop=stop, folder=folder, trial=None, ranks=ranks
            )
            train_and_test(training)
    if record.status != "failed":
        ranks.leave()
    return {"status": record.status, "error": record.error, "ending": record.ending, "exit_code": stop.exit_code}


def _end_now(stop: Stop, why: str) -> NoReturn:
    os._exit(stop.exit_code)


@contextmanager
def _log(file: Path) -> Iterator[None]:
    """What this process prints, and what is printed from C, goes there; an empty one is taken away."""
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
