"""`python -m runner.experiment.rank FOLDER`: one of the processes that train a run, as processes.py starts them.

It reads from FOLDER what the launching process left there (distributed/messages.py), and calls run.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from runner.config.compose import composed_with, composer
from runner.config.logs import logging_to
from runner.config.secrets import note_secrets_of
from runner.config.trust import trusting
from runner.distributed import messages
from runner.distributed.environment import RankInfo, rank_here
from runner.errors import RunnerError, traceback_of

#: a process that is ended after another one has died says so later than that one
SECONDS_BEHIND = 5.0


def main(folder: Path) -> int:
    """Is one process of the run, as the environment says which. Returns its exit code."""
    from runner.distributed.group import is_lost

    place = rank_here(os.environ)
    given = messages.handover_in(folder)
    assert place is not None
    (folder / messages.FOLDER / f"{place.rank}.pid").write_text(str(os.getpid()))
    sys.path[:] = [*dict.fromkeys([*given.path, *sys.path])]
    if messages.is_ending(folder):
        return 1
    _die_with(os.getppid(), grace_seconds=30.0, end=lambda: os._exit(143))
    if os.getppid() != given.parent:
        return 1
    try:
        return _train(folder, place, given)
    except RunnerError as error:
        messages.tell(folder, place.rank, str(error), problems=error.problems)
    except BaseException as error:
        print(traceback_of(error), file=sys.stderr)
        messages.tell(folder, place.rank, messages.LOST if is_lost(error) else f"{type(error).__name__}: {error}")
    return 1


def _train(folder: Path, place: RankInfo, given: messages.Handover) -> int:
    compose = composer(["-cd", str(folder / messages.FOLDER), "-cn", "rerun"])
    with trusting():  # the process that launched this one has written it
        cfg = composed_with(compose, [])
        cfg.merge_with(json.loads(os.environ.pop(messages.LACKING)))
        note_secrets_of(cfg)
        from runner.device import Choice
        from runner.experiment import run  # torch
        from runner.experiment.context import Membership, Repetition, RunContext

        with nullcontext() if place.rank else logging_to(folder):
            context = RunContext(
                device=Choice(**given.choices[place.local_rank]),
                member=Membership(**given.member) if given.member else None,
                repetition=Repetition(given.reproduces, lambda parts: None) if given.reproduces else None,
                owns_process=True,
                is_launched=True,
            )
            summary = run.run(cfg, folder, context=context)
    return int(summary.status == "failed")


def _die_with(parent: int, *, grace_seconds: float, end: Callable[[], None]) -> None:
    """Ends this process once the one that launched it is gone, also by SIGKILL: a SIGTERM, then time to save, then `end`."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        end()

    threading.Thread(target=watch, name="runner-parent", daemon=True).start()


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    failure = messages.first_failure(Path(sys.argv[1])) if code else None
    if failure is not None and failure.text == messages.LOST:
        time.sleep(SECONDS_BEHIND)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: what joins the processes may wait for one that is dead
