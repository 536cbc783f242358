"""Start the uploader while a run is still being checked, as it imports MLflow for 2.7 s.

cli/train.py uses it before torch is imported, so this module imports nothing slow.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from runner.version import python_path


class Ahead:
    """An uploader that imports MLflow and waits for its first line. Never raises; taken() returns None if it did not start.

    Args:
        uri: Of the store, unchecked: it decides what is imported.
        tracker: Another tracker, which is sent to instead of MLflow.
    """

    def __init__(self, uri: str, *, tracker: str = "") -> None:
        kind = ["tracker", tracker] if tracker else ["sqlite"] if uri.startswith("sqlite:") else []
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
        environment |= {"PYTHONPATH": python_path(own=False), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            # -P: a user's directory `runner` must not replace this package
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-W", "ignore", "-m", "runner.tracking", *kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # its first line names the log file
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=environment,
                start_new_session=True,
            )

    def taken(self) -> subprocess.Popen[bytes] | None:
        """Return the process, once; the caller ends it."""
        process, self._process = self._process, None
        return process

    def close(self) -> None:
        """Kill the process if it was not taken, and wait for it."""
        if (process := self.taken()) is not None:
            process.kill()
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
