"""What a bad MLflow server costs a run: the same run beside four servers, in turns: `python tests/bench/faults.py --repeats 3`.

A healthy `mlflow server`, one whose answers take a second each, one that answers 500 to everything, and one that is down.
What is compared is the training's own speed, as summary.json has it; the end of a run, with its grace, is a column beside.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from fault_proxy import Proxy, Server, always, passing  # noqa: E402

HEALTHY = "healthy"
#: name in the table, what each request meets (None: connections are refused)
SERVERS = (
    (HEALTHY, passing),
    ("slow: each answer takes 1 s", always("delay")),
    ("answers 500 always", always("500")),
    ("down", None),
)


def measure(folder: Path, uri: str, data: Path, *, epochs: int, threads: int) -> dict[str, float]:
    """One run in a process of its own. Its steps a second, and its seconds from start to end."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
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
