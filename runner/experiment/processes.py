"""Several processes that train one run: which of them this is, their devices, how they meet, and what all but the first do.

launch.py starts them, unless torchrun or srun has.
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

from runner.config import validate
from runner.config.settings import Settings
from runner.data.loading.order import mixed
from runner.device import Choice, parse
from runner.device.backends import seed_everything
from runner.device.choose import backend_of, device_of_process, devices_of_processes
from runner.distributed import messages
from runner.distributed.environment import RankInfo, rank_here
from runner.distributed.group import Alone, Ranks
from runner.distributed.group import join as join_group
from runner.errors import Problem, RunnerError
from runner.experiment import rules
from runner.experiment.build import prepare
from runner.experiment.check import check_here
from runner.experiment.context import Checked, RunContext
from runner.experiment.summary import Summary
from runner.training.fit import fit
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.signals import listening


def find_rank(cfg: DictConfig) -> RankInfo | None:
    """Return this process's rank, if torchrun, srun or launch.py has started it as one of several.

    Raises:
        RunnerError: If `train.num_processes` is another number.
    """
    rank = rank_here(os.environ)
    count = validate.value(cfg, "train.num_processes")
    if rank is not None and count not in ("auto", rank.num):
        problem = f"{rank.by} has started {rank.num} processes"
        fix = f"train.num_processes=auto, or train.num_processes={rank.num}"
        raise RunnerError(Problem(f"train.num_processes={count}", problem, fix))
    return rank


def choose_devices(cfg: DictConfig, checked: Checked, rank: RankInfo | None, context: RunContext) -> tuple[Choice, ...]:
    """Return a device for each process to start, or this process's own if it has been started as one of several.

    Raises:
        RunnerError: For missing devices, and for settings that several processes exclude.
    """
    hardware, choice = checked
    policy, count = parse(validate.value(cfg, "device")), cfg.train.num_processes
    slot = choice.device if context.device is not None else None
    devices: tuple[Choice, ...]
    if rank is not None:
        devices = (choice if slot else device_of_process(policy, rank.local_rank, rank.local_num, hardware),)
    elif slot and slot != "cpu":
        num = len(devices_of_processes(policy, "auto", hardware)) if policy == ("all",) and count == "auto" else count
        rules.check(cfg, rules.Situation(slot=slot, num_processes=num if num != "auto" else 1))
        return (choice,)
    else:
        devices = devices_of_processes(policy, count, hardware, choice=choice)
    num = rank.num if rank is not None else len(devices)
    rules.check(cfg, rules.Situation(device=choice.device, num_processes=num, has_pruner=context.trial is not None))
    return devices


def join(rank: RankInfo | None, choice: Choice) -> Ranks:
    """Wait for the other processes of the run, if there are any."""
    if rank is None:
        return Alone()
    return join_group(rank, backend=backend_of(choice.here), device=torch.device(choice.here))


def share_directory(ranks: Ranks, directory: Path, *, is_launched: bool) -> None:
    """Send the run's directory to the other processes. is_launched: launch.py has prepared it."""
    if ranks.num > 1 and not is_launched:
        messages.forget(directory)  # of a part before: the others do not know the directory yet
    ranks.broadcast_object(str(directory.absolute()))


def prepare_in_turn(
    cfg: DictConfig, ranks: Ranks, device: torch.device, *, directory: Path, rank: RankInfo | None
) -> Parts:
    """Build the parts, the first process before the others, so that only one downloads and prepares files.

    From then on each process draws its own numbers, the first one those of a run with one process.
    """
    divide = None
    if cfg.placement.strategy == "fsdp" and ranks.num > 1:
        from runner.distributed.sharding import dividing  # it imports for a second

        divide = dividing(device, ranks.num)
    if not ranks.is_first:
        ranks.broadcast_object(None)
    resumes = any((directory / "checkpoints").glob("last*.pt"))
    num_here = rank.local_num if rank else 1
    parts = prepare(cfg, device, goes_on=resumes, num_processes=num_here, divide=divide, num_ranks=ranks.num)
    if ranks.is_first:
        ranks.broadcast_object(None)
    else:
        seed_everything(mixed(cfg.seed, ranks.rank))
    return parts


def follow(cfg: DictConfig, rank: RankInfo, context: RunContext = RunContext()) -> Summary:
    """Train in a process that is not the first: it tracks nothing, and what it prints is in ranks/RANK.log.

    Raises:
        RunnerError: For errors in the configuration, as in the first process.
    """
    (choice,) = choose_devices(cfg, check_here(cfg, choice=context.device), rank, context)
    ranks = join(rank, choice)
    directory = Path(ranks.broadcast_object(""))
    settings = Settings.of(cfg)
    with _printing_to(directory / messages.FOLDER / f"{rank.rank}.log"):
        try:
            parts = prepare_in_turn(cfg, ranks, torch.device(choice.here), directory=directory, rank=rank)
        except RunnerError as error:
            messages.tell(directory, rank.rank, str(error), problems=error.problems)
            raise
        with listening(
            grace_seconds=settings.train.grace_seconds, end_now=lambda stop, _: os._exit(stop.exit_code)
        ) as stop:
            result = fit(parts, settings, directory, observer=Observer(), stop=stop, ranks=ranks)
    if result.status != "failed":
        ranks.leave()
    return Summary(result.status, result.error, ending=result.ending, exit_code=stop.exit_code)


@contextmanager
def _printing_to(file: Path) -> Iterator[None]:
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
