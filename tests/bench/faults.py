"""What a bad MLflow server costs a run: the same run beside four servers, in turns: `python tests/bench/faults.py --repeats 3`.

A healthy `mlflow server`, one whose answers take a second each, one that answers 500 to everything, and one that is down.
What is compared is the training's own speed, as summary.json has it; the end of a run, with its grace, is a separate column.

`--sweep 100` measures a sweep of short jobs whose server takes a second per call instead: how long after the last job each run
is FINISHED with its metrics, the calls for each run, and how long Ctrl-C takes during the wait for the files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from page import add_write, section
from work import BATCH_SIZE, HIDDEN, LEARNING_RATE, SEED, arrays

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "support"))
from fault_proxy import Proxy, Request, Server, always, passing  # noqa: E402

HEALTHY = "healthy"
#: name in the table, what each request meets (None: connections are refused)
SERVERS = (
    (HEALTHY, passing),
    ("slow: each answer takes 1 s", always("delay")),
    ("answers 500 always", always("500")),
    ("down", None),
)


def measure(folder: Path, uri: str, data: Path, *, epochs: int, threads: int) -> dict[str, float]:
    """Run once in a separate process. Returns the steps per second, and the seconds from start to end."""
    words = [
        "data=arrays",
        "model=mlp",
        f"data.path={data}",
        "data.val_fraction=0",
        "data.test_fraction=0",
        f"model.hidden_sizes=[{HIDDEN}]",
        "optimizer=adam",
        f"optimizer.lr={LEARNING_RATE}",
        "scheduler=constant",
        f"train.batch_size={BATCH_SIZE}",
        f"train.num_epochs={epochs}",
        f"backends.cpu.num_threads={threads}",
        f"seed={SEED}",
        "device=cpu",
        f"tracking.uri={uri}",
        "tracking.grace_seconds=2",
        f"hydra.run.dir={folder}/run",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parents[1])}
    environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "runner", *words]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {"rate": summary["steps_per_second"], "seconds": seconds}


def measure_sweep(place: Path, server: Server, num_jobs: int) -> None:
    """Run a sweep through a proxy that answers a second late, and print the result."""
    lines: list[str] = []

    def note(request: Request) -> str:
        lines.append(request.line)
        return choice

    choice = "delay"
    words = ["model=linear", "data=synthetic", "device=cpu", "train.num_steps=20", f"seed=range({num_jobs})"]
    words += ["sweep.batch=off", "sweep.slots.cpu=2", "hydra.sweep.dir=swept"]
    path = {"PYTHONPATH": str(HERE.parents[1])}
    with Proxy(server.port, note, delay_seconds=1.0) as proxy:
        command = [sys.executable, "-m", "runner", "-m", *words, f"tracking.uri={proxy.uri}"]
        begun = time.monotonic()
        sweep = subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, text=True, env={**os.environ, **path})
        assert sweep.stdout is not None
        ended = begun
        for line in sweep.stdout:
            if re.match(r"job \d+ finished", line):
                ended = time.monotonic()
            if line.startswith("report "):
                break
        print(f"jobs:                 {num_jobs} in {ended - begun:.0f} s")
        print(f"table:                {time.monotonic() - ended:.1f} s after the last job")
        while num_left(server, num_jobs) and sweep.poll() is None:
            time.sleep(0.5)
        print(
            f"all FINISHED, metrics: {time.monotonic() - ended:.0f} s after the last job, {num_left(server, num_jobs)} left"
        )
        few = [
            line for line in lines if "artifacts" not in line and "logged-models" not in line and "/outputs" not in line
        ]
        print(f"calls:                {len(few) / (num_jobs + 1):.1f} per run without files and models")
        signalled = time.monotonic()
        sweep.send_signal(signal.SIGINT)
        rest = sweep.communicate()[0]
        print(
            f"Ctrl-C:               {time.monotonic() - signalled:.1f} s, exit code {sweep.returncode}\n{rest.strip()}"
        )
        choice = "pass"
        command = [sys.executable, "-m", "runner", "sync", "swept", f"tracking.uri={proxy.uri}"]
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, env={**os.environ, **path}, check=False
        )
        print(f"sync:                 exit code {done.returncode}, {done.stdout.strip().splitlines()[-1]}")
        print(f"calls in all:         {len(lines) / (num_jobs + 1):.1f} per run")


def num_left(server: Server, num_jobs: int) -> int:
    """Return the number of runs, including the sweep's, that the store does not have as FINISHED with metrics."""
    with sqlite3.connect(f"file:{server.folder}/mlflow.db?mode=ro", uri=True, timeout=30) as database:
        query = (
            "select count(*) from runs where status = 'FINISHED' and run_uuid in (select run_uuid from latest_metrics)"
        )
        return num_jobs + 1 - int(database.execute(query).fetchone()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sweep", type=int, metavar="JOBS", help="measure a sweep of JOBS jobs instead")
    add_write(parser)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _ in SERVERS}
    with tempfile.TemporaryDirectory() as place:
        data, store = Path(place) / "digits60k.npz", Path(place) / "server"
        inputs, targets = arrays()
        np.savez(data, x=inputs, y=targets)
        store.mkdir()
        server = Server(store)
        server.start()
        try:
            if given.sweep:
                measure_sweep(Path(place), server, given.sweep)
                return
            for turn in range(given.repeats):
                for number, (name, choose) in enumerate(SERVERS):
                    folder = Path(place) / f"{turn}-{number}"
                    folder.mkdir()
                    with Proxy(server.port, choose or passing, delay_seconds=1.0) as proxy:
                        if choose is None:
                            proxy.go_down()
                        found[name].append(measure(folder, proxy.uri, data, epochs=given.epochs, threads=given.threads))
        finally:
            server.kill()
    show(found, given)


def show(found: dict[str, list[dict[str, float]]], given: argparse.Namespace) -> None:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "mlflow", "numpy"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    with section("faults.py", write=given.write):
        print(
            f"{machine}; {versions}; {given.threads} thread(s), {given.epochs} epochs; n = {given.repeats}, in turns\n"
        )
        print(
            "| MLflow server | steps/s, median | lowest to highest | of a healthy one, median of the turns | whole run |"
        )
        print("|---|---|---|---|---|")
        healthy = [run["rate"] for run in found[HEALTHY]]
        for name, runs in found.items():
            rates = [run["rate"] for run in runs]
            ratio = statistics.median(mine / theirs for mine, theirs in zip(rates, healthy, strict=True))
            whole = statistics.median(run["seconds"] for run in runs)
            spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
            print(f"| {name} | {statistics.median(rates):,.0f} | {spread} | {ratio:.2f} | {whole:.0f} s |")


main()
