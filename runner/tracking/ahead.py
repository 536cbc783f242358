"""The publishing process, started while a run is still checked: what it imports takes as long as what the check imports.

Called by cli/train.py before torch is there, so it imports nothing itself, and by publisher.py for all others.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from runner.version import python_path


class Ahead:
    """The process, which imports MLflow and waits to be told for whom: 2.7 s of a core, beside what a run checks.

    Never raises: where no process can be had, there is none to take. close() ends one that nobody has taken.
    uri: the store's, unchecked; it says what is imported, and is no argument of the process.
    """

    def __init__(self, uri: str) -> None:
        kind = ["sqlite"] if uri.startswith("sqlite:") else []
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            # -P: a folder `runner` of the person's must not take this package's place; warnings are not for them
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "runner.tracking", *kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # it writes to its log once it knows where that is
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=_environment(),
                start_new_session=True,
            )

    def taken(self) -> subprocess.Popen[bytes] | None:
        """The process, once; whoever takes it sees to its end."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        if (process := self.taken()) is not None:
            end_untold(process)


def end_untold(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that was told nothing, so that it has nothing to send, and waits for it."""
    process.kill()
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {
        "PYTHONPATH": python_path(own=False),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
