"""`python -m runner.experiment.rank FOLDER`: one of the processes that train a run, as processes.py starts them.

It reads its configuration and its context from stdin, and calls run.py.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from runner.distributed import messages
from runner.errors import RunnerError, traceback_of

#: a process that is ended after another one has died says so later than that one
SECONDS_BEHIND = 5.0
GRACE_SECONDS = 30.0  # to save, once the process that started this one is gone


def main(folder: Path) -> int:
    """Be one process of the run; the environment says which. Returns its exit code."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # until the run listens to signals
    rank = int(os.environ["RANK"])
    head, _, pickled = sys.stdin.buffer.read().partition(b"\n")
    parent, sys.path[:] = json.loads(head)
    _end_with(parent)
    try:
        return _train(folder, rank, pickled)
    except RunnerError as error:
        messages.record(folder, rank, str(error), problems=error.problems)
    except BaseException as error:
        from runner.distributed.group import is_lost

        print(traceback_of(error), file=sys.stderr)
        messages.record(folder, rank, messages.LOST if is_lost(error) else f"{type(error).__name__}: {error}")
    return 1


def _train(folder: Path, rank: int, pickled: bytes) -> int:
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import setup_globals

    from runner.config.importing import logging_to
    from runner.config.secrets import note_secrets_of
    from runner.config.trust import trusting
    from runner.experiment import run  # torch

    with trusting(), nullcontext() if rank else logging_to(folder):
        setup_globals()
        cfg, HydraConfig.instance().cfg, context = pickle.loads(pickled)  # from the process that started this one
        note_secrets_of(cfg)
        return int(run.run(cfg, folder, context=context).status == "failed")


def _end_with(parent: int) -> None:
    """End this process once its parent is gone, also by SIGKILL: a SIGTERM, then time to save."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(143)

    threading.Thread(target=watch, name="runner-parent", daemon=True).start()


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    failure = messages.first_failure(Path(sys.argv[1])) if code else None
    if failure is not None and failure.text == messages.LOST:
        time.sleep(SECONDS_BEHIND)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: what joins the processes may wait for one that is dead
