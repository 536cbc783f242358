"""A run's folder and a tracking URI go in; a process that copies the journal to MLflow beside training comes out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from runner.tracking.ack import Ack, read_ack
from runner.tracking.journal import journal_path

PACKAGES = Path(__file__).resolve().parents[2]


class Publisher:
    """The training side of the publishing process (runner.publish): starts it, wakes it, waits for it.

    A process, because storing points takes the interpreter's lock: 75 ms of it for 1,000 points, which a loop of 2,500
    steps a second makes in 0.2 s. It has a session of its own, so that Ctrl-C reaches the training alone; when the
    training dies, its pipe closes, and the process sends what the journal holds and ends.
    """

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._folder, self._process, self._log = folder, process, log
        assert process.stdin is not None
        self._pipe = process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    @classmethod
    def start(cls, folder: Path, uri: str, *, grace_seconds: float = 10) -> Publisher:
        """Starts the process; returns at once."""
        log_path = journal_path(folder).parent / "publish.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log = log_path.open("ab")
        process = subprocess.Popen(
            # -P: a folder `runner` of the person's must not take the place of this package
            [sys.executable, "-P", "-m", "runner.publish", str(folder.absolute())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_environment(uri, grace_seconds),
            start_new_session=True,
        )
        return cls(folder, process, log)

    def wake(self) -> None:
        """Says that there is something new. Never waits, never fails: the process looks by itself, too."""
        with contextlib.suppress(OSError):
            os.write(self._pipe.fileno(), b".")

    def finish(self) -> Ack:
        """Says that nothing more comes, and waits while the store takes it.

        A store that does not answer for the grace period ends that; the rest stays in the journal. Raises:
        KeyboardInterrupt at once; the process then finishes by itself.
        """
        self._close_pipe()
        self._process.wait()
        return read_ack(self._folder)

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """After finish() there is nothing left to do. Else the run failed before it began: the process is ended."""
        self._close_pipe()
        if self._process.poll() is None and not isinstance(error, KeyboardInterrupt):
            self._process.terminate()
            self._process.wait()
        self._log.close()
        if self._process.returncode is None:
            self._process.returncode = 0  # it goes on by itself; nobody here will wait for it

    def _close_pipe(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.close()


def _environment(uri: str, grace_seconds: float) -> dict[str, str]:
    """The URI travels here and not as an argument: it may hold a password, and arguments show in `ps`."""
    paths = [str(PACKAGES), str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MLFLOW_TRACKING_URI": uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # MLflow's own seven would block for four minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        "RUNNER_GRACE_SECONDS": str(grace_seconds),
        "CUDA_VISIBLE_DEVICES": "",  # it computes on the host; a context on the GPU would cost the training memory
        "PYTHONUNBUFFERED": "1",
    }
