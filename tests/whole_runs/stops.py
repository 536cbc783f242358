"""Kill a run repeatedly, in processes forked from this one: python stops.py FOLDER each|NUM_KILLS [WORD ...]

each: for every step of the run, a run that is killed after it and resumed to its end, in FOLDER/NUMBER.
NUM_KILLS: runs in FOLDER/run0, run1, ..., killed at random moments until each has ended.
FOLDER/whole is the uninterrupted run.
"""

from __future__ import annotations

import functools
import importlib
import os
import random
import signal
import sys
import time
import traceback
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path

import torch

from runner.config.compose import composed_with, composer
from runner.experiment import run, session
from runner.training.stopping import OwnStopCondition

#: the uninterrupted run writes its imported modules to this file
MODULES = "modules.txt"


def forked(function) -> int:
    """Run a function in a fork. Returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(started(function), 0)[1])


def started(function) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        function()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def train(cfg, folder: Path, *, kill_after: int | None = None) -> None:
    original = OwnStopCondition.__call__

    def stop(condition, step, *, at_once=False):
        if step == kill_after and not at_once:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(condition, step, at_once=at_once)

    OwnStopCondition.__call__ = stop
    with redirect_stdout(StringIO()):
        assert run.run(cfg, folder).status == "finished"
    OwnStopCondition.__call__ = original


def kill_after_each_step(cfg, root: Path) -> None:
    num_steps = torch.load(root / "whole" / "checkpoints" / "last.pt", weights_only=True)["step"]
    for number in range(1, num_steps):  # after the last step, nothing remains to be done
        once = functools.partial(train, cfg, root / str(number))
        assert forked(functools.partial(once, kill_after=number)) == -signal.SIGKILL, number
        assert forked(once) == 0, number


def kill_at_random(cfg, root: Path, least: int) -> None:
    draw, num_kills, number = random.Random(0), 0, 0
    while num_kills < least:  # the number per run depends on the machine
        num_kills += kills_until_it_ends(cfg, root / f"run{number}", draw)
        number += 1


def kills_until_it_ends(cfg, folder: Path, draw: random.Random) -> int:
    num_kills = 0
    while True:
        process = started(lambda: train(cfg, folder))
        # increasing, so that the run also ends on a slow machine
        deadline = time.monotonic() + draw.expovariate(1 / 0.25) * (1 + num_kills / 4)
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.002)
        if ended[0]:
            assert os.waitstatus_to_exitcode(ended[1]) == 0
            return num_kills
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        num_kills += 1


def main() -> None:
    def undisturbed() -> None:
        train(cfg, root / "whole")
        (root / MODULES).write_text("\n".join(sys.modules))

    root, mode, *words = Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    torch.set_num_threads(1)  # a fork has no thread pool
    session.illustrate = lambda *_, **__: []  # takes half of the time of a short run, and is not compared
    cfg = composed_with(composer([]), words)
    # forked, as torch's CUDA build has no backward pass in a fork after one in its parent
    assert forked(undisturbed) == 0
    for name in (root / MODULES).read_text().split():  # imports for the forks
        with suppress(ImportError):  # some are not in a file
            importlib.import_module(name)
    kill_after_each_step(cfg, root) if mode == "each" else kill_at_random(cfg, root, int(mode))


if __name__ == "__main__":
    main()
