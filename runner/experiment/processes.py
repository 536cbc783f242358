"""Trains one run in several processes: starts them, joins them to a group, and does the work of all ranks but the first.

If torchrun or srun has not started them, this process starts them (rank.py), passes signals on, and reports how they ended. It
does not train itself then.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from runner.config.settings import Settings
from runner.data.loading.order import mixed
from runner.device import Choice
from runner.device.backends import seed_everything
from runner.device.choose import backend_of
from runner.distributed import messages
from runner.distributed.environment import RankInfo
from runner.distributed.group import Alone, Ranks, distributed
from runner.distributed.group import join as join_group
from runner.errors import RunnerError
from runner.experiment.build import prepare
from runner.experiment.console import Screen
from runner.experiment.context import Repetition, RunContext
from runner.experiment.directory import Run
from runner.experiment.summary import FILE, Summary
from runner.training import signals
from runner.training.fit import fit
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.version import python_path

MEMBER = "runner.experiment.rank"  # the module that each process is
GRACE_SECONDS = 30.0  # for processes whose run has failed


def run_in_processes(cfg: DictConfig, directory: Path, choices: Sequence[Choice], context: RunContext) -> Summary:
    """Train in one new process per device, and return the summary that rank 0 writes.

    After a failure all are started again, at most `train.max_restarts` times. Signals are passed on to them; outside the
    main thread Python receives none.

    Raises:
        RunnerError: Errors that a process finds before the training.
    """
    if context.repetition is not None and context.repetition.check is not None:
        context.repetition.check(prepare(copy.deepcopy(cfg), torch.device("cpu")))
        context = replace(context, repetition=Repetition(context.repetition.of))
    contexts = [
        replace(context, checked=None, device=choice, owns_process=True, is_launched=True) for choice in choices
    ]
    path = [each or str(Path.cwd()) for each in sys.path]
    head = json.dumps([os.getpid(), path]).encode()  # to be read before the rest can be imported
    handovers = [head + b"\n" + pickle.dumps((cfg, HydraConfig.instance().cfg, each)) for each in contexts]
    (directory / FILE).unlink(missing_ok=True)  # of a part before
    shutil.rmtree(directory / messages.FOLDER, ignore_errors=True)
    with signals.collected() as received:
        for attempt in range(cfg.train.max_restarts + 1):
            failure = _launch(directory, handovers, attempt, received)
            problems = messages.problems_of(directory)
            if failure is None or received or problems:
                break
    if problems:
        shutil.rmtree(directory / messages.FOLDER)
        raise RunnerError(*problems)
    left = Summary.read(directory)
    if failure is None and left.status:
        return left
    reported = messages.first_failure(directory, of=attempt)
    has_reason = reported is not None and reported.text != messages.LOST
    error = reported.text if reported is not None and has_reason else failure or "its processes left no summary"
    code = 128 + (signal.SIGINT if received[0] == signal.SIGINT else signal.SIGTERM) if received else 0
    summary = replace(left, status="killed" if code else "failed", error=error, exit_code=code or 1)
    if summary.error != left.error:
        Screen().say(f"✗ {summary.status}   {summary.error}")
    summary.write(directory)
    return summary


def _launch(
    directory: Path, handovers: Sequence[bytes], attempt: int, received: Sequence[signal.Signals]
) -> str | None:
    """Run `python -m runner.experiment.rank DIRECTORY` once for each rank, and pass received signals on.

    When one fails, end the others and return which failed, and how; None: all ended normally.
    """
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    common |= {"WORLD_SIZE": len(handovers), "LOCAL_WORLD_SIZE": len(handovers), messages.RESTARTS: attempt}
    logs = directory / messages.FOLDER
    logs.mkdir(exist_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    num_passed = 0
    try:
        for number, handover in enumerate(handovers):
            environment = _environment({**common, "RANK": number, "LOCAL_RANK": number})
            with (logs / f"{number}.log").open("ab") as log:
                ranks.append(_start(directory, handover, environment, log=log if number else None))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
            for signal_number in received[num_passed:]:
                num_passed += 1
                for rank in ranks:
                    rank.send_signal(signal_number)
            time.sleep(0.05)
        failed = {number: rank.returncode for number, rank in enumerate(ranks) if rank.poll()}
        for rank in ranks:
            rank.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for empty in (log for log in logs.glob("*.log") if not log.stat().st_size):
            empty.unlink()
        with suppress(OSError):  # there are others
            logs.rmdir()
    if not failed:
        return None
    # a process that was killed before one that misses it
    number, code = min(failed.items(), key=lambda item: item[1] > 0)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"process {number} {how}"


def _start(directory: Path, handover: bytes, environment: Mapping[str, str], *, log: Any) -> subprocess.Popen[bytes]:
    # -P: a directory `runner` of the user must not be imported instead of this package
    command = [sys.executable, "-P", "-m", MEMBER, str(directory)]
    rank = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    assert rank.stdin is not None
    with suppress(BrokenPipeError), rank.stdin:  # it has ended already
        rank.stdin.write(handover)
    return rank


def _environment(more: Mapping[str, Any]) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": python_path(own=False)}
    environment |= {name: str(value) for name, value in more.items()}
    if sys.platform == "darwin":  # gloo looks for the machine's name, which a Mac's network often does not know
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    return environment


def join(rank: RankInfo | None, choice: Choice) -> Ranks:
    """Wait for the other processes of the run, if there are any."""
    if rank is None:
        return Alone()
    return join_group(rank, backend=backend_of(choice.here), device=torch.device(choice.here))


def share_directory(ranks: Ranks, directory: Path, *, is_launched: bool) -> None:
    """Send the run's directory to the other processes. is_launched: Whether run_in_processes() started this one."""
    if ranks.num > 1 and not is_launched:
        messages.forget(directory)  # of a part before: the others do not know the directory yet
    ranks.broadcast_object(str(directory.absolute()))


def prepare_in_turn(
    cfg: DictConfig, ranks: Ranks, device: torch.device, *, directory: Path, rank: RankInfo | None
) -> Parts:
    """Build the parts, rank 0 before the others, so that only one process downloads and prepares files.

    Afterwards each process draws its own random numbers; rank 0 draws those of a run with one process.
    """
    divide = None
    if cfg.placement.strategy == "fsdp" and ranks.num > 1:
        from runner.distributed.sharding import dividing  # it imports for a second

        divide = dividing(device, ranks.num)
    if not ranks.is_first:
        ranks.broadcast_object(None)
    num_here, is_resumed = rank.local_num if rank else 1, Run(directory).is_resumable
    parts = prepare(cfg, device, is_resumed=is_resumed, num_processes=num_here, divide=divide, num_ranks=ranks.num)
    if ranks.is_first:
        ranks.broadcast_object(None)
    else:
        seed_everything(mixed(cfg.seed, ranks.rank))
    return parts


def follow(cfg: DictConfig, rank: RankInfo, choice: Choice) -> Summary:
    """Train as a rank other than the first, which tracks and prints nothing.

    Raises:
        RunnerError: Errors in the data and the model, as in the first process.
    """
    ranks = join(rank, choice)
    directory = Path(ranks.broadcast_object(""))
    settings = Settings.of(cfg)
    try:
        parts = prepare_in_turn(cfg, ranks, torch.device(choice.here), directory=directory, rank=rank)
    except RunnerError as error:
        messages.record(directory, rank.rank, str(error), problems=error.problems)
        raise
    with signals.listening(
        grace_seconds=settings.train.grace_seconds, end_now=lambda stop, _: os._exit(stop.exit_code)
    ) as stop:
        result = fit(parts, settings, directory, observer=Observer(), stop=stop, ranks=ranks)
    if result.status != "failed":
        ranks.leave()
    return Summary(result.status, result.error, ending=result.ending, exit_code=stop.exit_code)
