"""Install sbatch, srun, sacct, scancel and scontrol in a directory; they run arrays of jobs as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

from forked_programs import DOOR, Forked

ENDS = {0: "COMPLETED", -signal.SIGKILL: "OUT_OF_MEMORY"}


def install(folder: Path) -> str:
    """Install the commands; return the PATH with which they are found."""
    folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel", "scontrol"):
        script = folder / name
        script.write_text(
            f'#!/bin/sh\nunset PYTHONSAFEPATH\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} {folder} "$@"\n'
        )
        script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def batches(folder: Path) -> list[str]:
    """Return the submitted scripts."""
    return [path.read_text() for path in sorted(folder.glob("*.sh"))]


def sbatch(folder: Path, script: str) -> None:
    """Start a watching process for each job of the array, which outlives this command."""
    text = Path(script).read_text()
    number = 100 + len(batches(folder))
    (folder / f"{number}.sh").write_text(text)
    array = re.search(r"--array=(\d+)-(\d+)", text)
    for index in range(int(array[1]), int(array[2]) + 1) if array else [None]:
        name = str(number) if index is None else f"{number}_{index}"
        variables = {"SLURM_JOB_ID": str(number), "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        variables |= {} if index is None else {"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(index)}
        note(folder, name, "PENDING")
        subprocess.Popen(
            [sys.executable, __file__, "watch", str(folder), name, text.strip().splitlines()[-1]],
            env={**os.environ, **variables, "SUBMITIT_EXECUTOR": "slurm"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    print(f"Submitted batch job {number}")


def watch(folder: Path, name: str, line: str) -> None:
    words = shlex.split(line)
    job, _, task = name.partition("_")
    log = (
        words[words.index("--output") + 1].replace("%A", job).replace("%a", task).replace("%j", job).replace("%t", "0")
    )
    command = words[words.index(sys.executable) + 1 :]
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    os.environ |= exported((folder / f"{job}.sh").read_text())
    again = folder / f"{name}.requeued"
    with Path(log).open("a") as output:
        while True:
            process = started(command, output)
            note(folder, name, "RUNNING", process.pid)
            code = process.wait()
            if not again.exists():
                break
            again.unlink()
    is_cancelled = (folder / f"{name}.cancelled").exists()
    note(folder, name, "CANCELLED by 0" if is_cancelled else ENDS.get(code, "FAILED"))


def exported(script: str) -> dict[str, str]:
    """Return the environment of a job after its script's export lines."""
    lines = [line for line in script.splitlines() if line.startswith("export ")]
    told = subprocess.check_output(["bash", "-c", "\n".join([*lines, "env -0"])], text=True)
    return dict(pair.split("=", 1) for pair in told.split("\0") if pair)


def started(words: list[str], output: IO[str]) -> Forked | subprocess.Popen[bytes]:
    """Start `python WORDS`, forked from a preloaded process if the tests request it."""
    if os.environ.get(DOOR):
        return Forked(words, streams=(0, output.fileno(), output.fileno()))
    return subprocess.Popen([sys.executable, *words], stdout=output, stderr=output)


def sacct(folder: Path, *words: str) -> None:
    print("JobID|State|NodeList")
    for path in folder.glob("*.json"):
        print(f"{path.stem}|{json.loads(path.read_text())['state']}|here")


def scancel(folder: Path, *words: str) -> None:
    for path in folder.glob("*.json"):
        if path.stem in words:
            (folder / f"{path.stem}.cancelled").touch()
            with suppress(ProcessLookupError):
                os.kill(json.loads(path.read_text())["pid"], signal.SIGTERM)


def scontrol(folder: Path, requeue: str, name: str) -> None:
    (folder / f"{name}.requeued").touch()


def note(folder: Path, name: str, state: str, pid: int | None = None) -> None:
    beside = folder / f"{name}.writing"
    beside.write_text(json.dumps({"state": state, "pid": pid}))
    beside.replace(folder / f"{name}.json")


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    globals()[command](Path(folder), *rest)
