"""Several processes that train one run: which of them this is, their devices, how they meet, and what all but the first do.

Unless torchrun or srun has started them, this process starts them by torch's launcher, passes signals on to them, and
sums up how they ended. It trains nothing itself then; each process that it starts runs rank.py.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from runner.config import validate
from runner.config.secrets import lacking
from runner.config.settings import Settings
from runner.data.loading.order import mixed
from runner.device import Choice, parse
from runner.device.backends import seed_everything
from runner.device.choose import backend_of, device_of_process, devices_of_processes
from runner.distributed import messages
from runner.distributed.environment import RankInfo, rank_here
from runner.distributed.group import Alone, Ranks
from runner.distributed.group import join as join_group
from runner.errors import RunnerError
from runner.experiment import rules
from runner.experiment.build import prepare
from runner.experiment.check import check_here
from runner.experiment.console import Screen
from runner.experiment.context import Checked, RunContext
from runner.experiment.session import rerun_text
from runner.experiment.summary import FILE, Summary
from runner.training import signals
from runner.training.fit import fit
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.version import PACKAGES

MEMBER = "runner.experiment.rank"  # the module that each process is
ELASTIC = "torch.distributed.elastic"


def run_in_processes(cfg: DictConfig, directory: Path, choices: Sequence[Choice], context: RunContext) -> Summary:
    """Run in one new process for each device, and return the summary that they leave.

    Raises:
        RunnerError: For errors that they find before the training.
    """
    member, repetition = context.member, context.repetition
    if repetition is not None:
        repetition.check(prepare(copy.deepcopy(cfg), torch.device("cpu")))
    handover = messages.Handover(
        parent=os.getpid(),
        choices=[vars(choice) for choice in choices],
        path=[path or str(Path.cwd()) for path in sys.path],
        member=vars(member) if member else None,
        reproduces=repetition.of if repetition else None,
    )
    messages.give(directory, rerun := rerun_text(cfg), handover)
    (directory / FILE).unlink(missing_ok=True)  # of a part before
    environment = {messages.LACKING: json.dumps(lacking(cfg, rerun))}
    max_restarts = cfg.train.max_restarts
    stop, failure = launch(directory, num=len(choices), max_restarts=max_restarts, environment=environment)
    if problems := messages.problems_of(directory):
        shutil.rmtree(directory / messages.FOLDER)
        raise RunnerError(*problems)
    left = Summary.read(directory)
    if failure is None and left.status:
        return left
    words = messages.first_failure(directory, of=max_restarts if failure else 0)
    has_reason = words is not None and words.text != messages.LOST
    error = words.text if words is not None and has_reason else failure or "its processes left no word"
    code = 0 if stop is None else 128 + (signal.SIGINT if stop == signal.SIGINT else signal.SIGTERM)
    summary = replace(left, status="killed" if code else "failed", error=error, exit_code=code)
    if summary.error != left.error:
        Screen().say(f"✗ {summary.status}   {summary.error}")
    summary.write(directory)
    return summary


def launch(
    folder: Path, *, num: int, max_restarts: int, environment: Mapping[str, str]
) -> tuple[signal.Signals | None, str | None]:
    """Start `python -m runner.experiment.rank FOLDER` `num` times, wait until all have ended, and pass signals on to them.

    When one dies, the others are ended, and all are started again at most `max_restarts` times. Outside the main thread
    Python receives no signals.

    Returns:
        The first signal to stop; and which process died, and how (None: all ended normally).
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    stop: signal.Signals | None = None
    sent: list[set[int]] = []  # for each signal, who has it
    _silence_launcher()
    with (
        _environment(environment),
        signals.collected() as heard,
        futures.ThreadPoolExecutor(1, "runner-ranks") as pool,
    ):
        end = pool.submit(_agent, folder, num, max_restarts)
        try:
            while not end.done():
                futures.wait([end], 0.05)
                while len(sent) < len(heard):
                    stop = stop or heard[len(sent)]
                    (folder / messages.FOLDER / messages.STOPPING).touch()
                    sent.append(set())
                for number, those in zip(heard, sent, strict=True):
                    _pass_on(folder, number, those)
        except BaseException:  # nothing waits for them any more
            _pass_on(folder, signal.SIGKILL, set())
            raise
    try:
        end.result()
    except ChildFailedError as error:
        # a process that was killed before one that says that it misses it
        rank, code = min(((rank, each.exitcode) for rank, each in error.failures.items()), key=lambda it: it[1] > 0)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return stop, f"process {rank} {how}"
    return stop, None


def _agent(folder: Path, num: int, max_restarts: int) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num,
            run_id=f"runner-{os.getpid()}-{time.time_ns()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        # -P: a directory `runner` of the user must not be imported instead of this package
        elastic_launch(config, sys.executable)("-P", "-m", MEMBER, str(folder))


def _pass_on(folder: Path, number: signal.Signals, sent: set[int]) -> None:
    for file in (folder / messages.FOLDER).glob("*.pid"):
        with suppress(OSError, ValueError):  # it is just being written, or over
            pid = int(file.read_text())
            if pid not in sent:
                sent.add(pid)
                os.kill(pid, number)


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    paths = [str(PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    if sys.platform == "darwin":  # gloo looks for the machine's name, which a Mac's network often does not know
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
    os.environ.update({"PYTHONPATH": os.pathsep.join(paths), **more})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _silence_launcher() -> None:
    from torch.distributed import launcher  # noqa: F401  # makes its loggers

    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith((ELASTIC, "torch.distributed.launch")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def find_rank(cfg: DictConfig) -> RankInfo | None:
    """Return this process's rank, if torchrun, srun or this program has started it as one of several.

    Raises:
        RunnerError: If `train.num_processes` is another number.
    """
    rank = rank_here(os.environ)
    count = validate.value(cfg, "train.num_processes")
    if rank is not None and count not in ("auto", rank.num):
        problem = f"{rank.by} has started {rank.num} processes"
        ways = ["train.num_processes=auto", f"train.num_processes={rank.num}"]
        raise RunnerError.suggest(f"train.num_processes={count}", problem, ways)
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
    """Send the run's directory to the other processes. is_launched: run_in_processes() has prepared it."""
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
        with signals.listening(
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
