"""Run a sweep as a user types it in a directory; return its exit code, its output and its directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
STARTED: type[subprocess.Popen[str]] = subprocess.Popen  # or the preloaded process's program()

#: the names of a job's process; a forked one has 15 characters for its name
JOBS = {name[:length] for name in ("runner.sweep.launchers.worker", "submitit.core._submit") for length in (15, None)}

#: a model that dies on request while it is built
DYING = """
import os, signal
import psutil
from torch import nn


class Dying(nn.Sequential):
    def __init__(self, how: str, inputs: int, outputs: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(inputs, outputs))
        print("sees", repr(os.environ.get("CUDA_VISIBLE_DEVICES")), "in", os.getcwd(), flush=True)
        if how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[how])
        if how == "exit":
            os._exit(7)
        if how == "site":  # the process of Ray's that the job is a child of
            psutil.Process().parent().parent().kill()
"""
DYING_YAML = "_target_: dying.Dying\nhow: fine\ninputs: ${facts.in_features}\noutputs: ${facts.out_features}\n"


def person(folder: Path) -> Path:
    """Create a user's directory with a custom model."""
    (folder / "conf/model").mkdir(parents=True)
    (folder / "dying.py").write_text(DYING)
    (folder / "conf/model/dying.yaml").write_text(DYING_YAML)
    return folder


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `python -m runner -m WORDS` in the folder, in a separate session, like a shell."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "runner", "-m", "hydra.sweep.dir=swept", *words]
    place = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": path, **environment}, "start_new_session": True}
    return STARTED(command, **place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    with process:
        assert process.stdout is not None
        text = process.stdout.read()
    return process.returncode, text


def sweep(folder: Path, *words: str, **environment: str) -> tuple[int, str]:
    return finish(start(folder, *words, **environment))


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C: the terminal sends it to the whole group."""
    os.killpg(process.pid, signal.SIGINT)


def read_until(process: subprocess.Popen[str], word: str, times: int = 1) -> str:
    """Read the output until the word has appeared that many times, and return it."""
    text = ""
    assert process.stdout is not None
    while text.count(word) < times:
        line = process.stdout.readline()
        assert line, f"it ended without {word!r}:\n{text}"
        text += line
    return text


def states(folder: Path) -> dict[str, tuple[str, str | None, str | None]]:
    """Return the last state, device and error in the ledger, by the job's name."""
    lines = [json.loads(line) for line in (folder / "swept/ledger.jsonl").read_text().splitlines()]
    names = {line["job"]: line["name"] for line in lines if line["kind"] == "job"}
    states = [line for line in lines if line["kind"] == "state"]
    return {names[line["job"]]: (line["state"], line["device"], line["error"]) for line in states}


def jobs_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in this folder, whatever their current parent is."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if Path(one.cwd()) == folder and JOBS & {*one.cmdline(), one.name()[:15]}:
                found.append(one)
    return found


def summary(folder: Path, number: int) -> dict:
    return json.loads((folder / f"swept/{number}/summary.json").read_text())
