"""Decides how many processes train a run and on what, and finds this one's place among them; starts them where need be.

Called by run.py, and by other_ranks.py in the processes beside the first. What several can't do is refused here.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from runner.config import validate
from runner.config.secrets import lacking
from runner.data.loading.order import mixed
from runner.device import Choice, parse
from runner.device.backends import seed_everything
from runner.device.per_process import backend_of, device_of_process, devices_of_processes
from runner.distributed import messages
from runner.distributed.environment import RankInfo, rank_here
from runner.distributed.group import Alone, Ranks, join
from runner.errors import Problem, RunnerError
from runner.experiment import rules
from runner.experiment.build import prepare
from runner.experiment.console import Screen
from runner.experiment.given import Checked, Given
from runner.experiment.launch import Outcome, launch
from runner.experiment.session import rerun_text
from runner.experiment.summary import FILE, read_summary, write_summary
from runner.training.parts import Parts


def place_here(cfg: DictConfig) -> RankInfo | None:
    """Where torchrun, srun or our own launcher has put this process; None: it is alone. Raises: RunnerError."""
    place = rank_here(os.environ)
    count = validate.value(cfg, "train.num_processes")
    if place is not None and count not in ("auto", place.num):
        problem = f"{place.by} has started {place.num} processes"
        fix = f"train.num_processes=auto, or train.num_processes={place.num}"
        raise RunnerError(Problem(f"train.num_processes={count}", problem, fix))
    return place


def devices_here(cfg: DictConfig, checked: Checked, place: RankInfo | None, *, given: Given) -> tuple[Choice, ...]:
    """The device of each process that this one is to start; of one that is a member already, its own.

    Raises: RunnerError for what several processes can't do, and for devices that are not there.
    """
    hardware, choice = checked
    policy, count = _policy(cfg), cfg.train.num_processes
    slot = choice.device if given.choice is not None else None
    devices: tuple[Choice, ...]
    if place is not None:
        devices = (choice if slot else device_of_process(policy, place.local_rank, place.local_num, hardware),)
    elif slot and slot != "cpu":
        num = len(devices_of_processes(policy, "auto", hardware)) if policy == ("all",) and count == "auto" else count
        rules.check(cfg, rules.Situation(slot=slot, num_processes=num if num != "auto" else 1))
        return (choice,)
    else:
        devices = devices_of_processes(policy, count, hardware, choice=choice)
    num = place.num if place is not None else len(devices)
    rules.check(cfg, rules.Situation(device=choice.device, num_processes=num, has_pruner=given.trial is not None))
    return devices


def joined(place: RankInfo | None, choice: Choice) -> Ranks:
    """This process among the others; it waits until all are there."""
    if place is None:
        return Alone()
    return join(place, backend=backend_of(choice.here), device=torch.device(choice.here))


def give_folder(ranks: Ranks, folder: Path, *, is_launched: bool) -> None:
    """Tells the others where the run lies. is_launched: by our own launcher, which has made the folder ready."""
    if ranks.num > 1 and not is_launched:
        messages.forget(folder)  # nobody else knows the folder yet: all words in it are of a part of the run before
    ranks.broadcast_object(str(folder.absolute()))


def prepare_in_turn(
    cfg: DictConfig, ranks: Ranks, device: torch.device, *, folder: Path, place: RankInfo | None
) -> Parts:
    """build.prepare(); the first process goes first, so that what is fetched or made ready once lies there for the others.

    Each draws numbers of its own from then on, the first one those of a run alone.
    """
    divide = None
    if cfg.placement.strategy == "fsdp" and ranks.num > 1:
        from runner.distributed.sharding import dividing  # it imports for a second

        divide = dividing(device, ranks.num)
    if not ranks.is_first:
        ranks.broadcast_object(None)
    goes_on = any((folder / "checkpoints").glob("last*.pt"))
    num_here = place.local_num if place else 1
    parts = prepare(cfg, device, goes_on=goes_on, num_processes=num_here, divide=divide, num_ranks=ranks.num)
    if ranks.is_first:
        ranks.broadcast_object(None)
    else:
        seed_everything(mixed(cfg.seed, ranks.rank))
    return parts


def run_in_several(
    cfg: DictConfig,
    folder: Path,
    choices: tuple[Choice, ...],
    *,
    given: Given,
) -> dict[str, Any]:
    """Runs it in processes of their own, one for each choice, and returns the summary that they left.

    Raises: RunnerError for what they found wrong with it.
    """
    member, repetition = given.member, given.repetition
    if repetition is not None:
        repetition.check(prepare(copy.deepcopy(cfg), torch.device("cpu")))
    handover = messages.Handover(
        parent=os.getpid(),
        choices=[vars(choice) for choice in choices],
        path=[path or str(Path.cwd()) for path in sys.path],
        member=vars(member) if member else None,
        reproduces=repetition.of if repetition else None,
    )
    messages.give(folder, rerun := rerun_text(cfg), handover)
    (folder / FILE).unlink(missing_ok=True)  # of the time before
    outcome = launch(
        folder,
        num=len(choices),
        max_restarts=cfg.train.max_restarts,
        environment={messages.LACKING: json.dumps(lacking(cfg, rerun))},
    )
    if problems := messages.problems_of(folder):
        shutil.rmtree(folder / messages.FOLDER)
        raise RunnerError(*problems)
    summary = read_summary(folder)
    if outcome.failure is not None or not summary:
        shown = summary.get("error")
        summary = _of_a_death(folder, summary, outcome)
        if summary["error"] != shown:
            Screen().say(f"✗ {summary['status']}   {summary['error']}")
        write_summary(folder, summary)
    return summary


def _of_a_death(folder: Path, summary: dict[str, Any], outcome: Outcome) -> dict[str, Any]:
    words = messages.first_failure(folder, of=outcome.attempt)
    has_more = words is not None and words.text != messages.LOST
    error = words.text if has_more and words is not None else outcome.failure or "its processes left no word"
    code = 0 if outcome.asked is None else 128 + (signal.SIGINT if outcome.asked == signal.SIGINT else signal.SIGTERM)
    more = {"status": "killed" if code else "failed", "error": error, "exit_code": code}
    return {"ending": "", "run_id": None, "metrics": {}, **summary, **more}


def _policy(cfg: DictConfig) -> tuple[str, ...]:
    return parse(validate.value(cfg, "device"))
