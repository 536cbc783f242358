"""`serve`: run MLflow's scoring server with a run's model, in a child process, until Ctrl-C.

The model is exported to a temporary directory.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from runner.data.tables.encoder import columns_in
from runner.errors import RunnerError, at_once
from runner.experiment.terminal import say
from runner.runs.export import export_to
from runner.runs.find import find_trained
from runner.runs.load import open_on_cpu
from runner.tracking.mlflow_store import SETTINGS
from runner.training import signals

HOST = "127.0.0.1"
SECONDS_TO_START = 120.0
SECONDS_TO_END = 10.0


def serve(wanted: str, port: int, *, predictions: bool, ready: Callable[[dict[str, Any]], None]) -> int:
    """Start the server and wait until it ends. It answers after about 10 s.

    Args:
        predictions: Whether it returns the task's predictions (probabilities) instead of raw outputs.
        ready: Called with the model's description and the URL when the server answers.

    Returns:
        130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        RunnerError: If the port is in use, the run has no model, or the server exits.
    """
    run, _ = at_once(partial(find_trained, wanted, verb="serve"), partial(_check_port, port))
    trained = open_on_cpu(run)
    # the server ends before the directory is removed
    with signals.collected() as got, tempfile.TemporaryDirectory(prefix="runner-serve-") as place:
        model = Path(place) / "model"
        say(f"run     {trained.title}")
        about = export_to(trained, "mlflow", model, predictions=predictions)
        for note in trained.notes:
            say(f"note    {note}")
        # MLflow starts `uvicorn` by name: it is next to this Python, which may not be activated
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environment = {**os.environ, **SETTINGS, "PATH": path}
        words = ["models", "serve", "-m", str(model), "--env-manager", "local", "--host", HOST, "--port", str(port)]
        command = [sys.executable, "-W", "ignore", "-m", "mlflow", *words, "--workers", "1"]
        # a new session: Ctrl-C reaches only this process, which ends the server's processes
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            try:
                if _answers(process, port, got):
                    _say(about, port, has_columns=columns_in(trained.card.reader) is not None)
                    ready({**about, "url": f"http://{HOST}:{port}/invocations"})
                while process.poll() is None and not got:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
            finally:
                _end(process)
    if not got:
        problem = f"MLflow's server exited with {process.returncode}"
        raise RunnerError.of("serve", problem, "read what it printed above")
    return 128 + got[0]


def _check_port(port: int) -> None:
    with socket.socket() as tried, socket.socket() as other:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except OSError as error:
            other.bind((HOST, 0))
            problem, free = f"{HOST}:{port} can't be used: {error.strerror}", other.getsockname()[1]
            raise RunnerError.of(f"serve --port {port}", problem, f"use `--port {free}`, which is free") from None


def _answers(process: subprocess.Popen[bytes], port: int, got: list[signal.Signals]) -> bool:
    until = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < until and process.poll() is None and not got:
        with suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return True
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    return False


def _say(about: dict[str, Any], port: int, *, has_columns: bool) -> None:
    inputs = about["inputs"]
    say(f"serving http://{HOST}:{port}/invocations; Ctrl-C ends it")
    say(f"answers {about['meaning']}" + (f": {', '.join(about['classes'][:12])}" if about["classes"] else ""))
    ask = "ask     POST with the header Content-Type: application/json, "
    if has_columns:
        named = ", ".join(f"{json.dumps(column['name'])}: {column['dtype']}" for column in inputs[:12])
        more = ", ..." if len(inputs) > 12 else ""
        say(f'{ask}{{"dataframe_records": [{{{named}{more}}}, ...]}}')
    elif len(inputs) == 1:
        shape = [1 if size == "rows" else size for size in inputs[0]["shape"]]
        say(f'{ask}{{"inputs": an array of shape {json.dumps(shape)}}}')
    sys.stdout.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which are in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + SECONDS_TO_END
        with suppress(ProcessLookupError, PermissionError):  # all of them are gone
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                process.poll()  # else it stays in the session
                os.killpg(process.pid, 0)
                time.sleep(0.02)
