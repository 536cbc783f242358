"""The cost of a sweep in addition to its jobs' training: python tests/bench/sweep.py [--jobs 8] [--slots 2] [--epochs 8]

Three ways, one after the other, with the same jobs (digits-sized MLPs on 60,000 synthetic rows, tracked in one sqlite store):
`run([...])` in one process, `python -m runner -m` with slots, and a `python -m runner` for each job. Each run measures the
seconds of its training; the rest is the cost of the way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from page import add_write, section

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = ["data=synthetic", "data.num_rows=60000", "model=mlp", "model.hidden_sizes=[256,256]", "train.batch_size=256"]
IN_PROCESS = """
import sys
from runner import run
for seed in range(int(sys.argv[1])):
    run([*sys.argv[2:], f"seed={seed}"], folder=f"bare/{seed}")
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    add_write(parser)
    given = parser.parse_args()
    words = [*JOB, "device=cpu", f"train.num_epochs={given.epochs}"]
    off = "sweep.batch=off"  # batched.py measures jobs that are trained together
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = [sys.executable, "-m", "runner"]
        seeds = "seed=" + ",".join(map(str, range(given.jobs)))
        rows = [
            (
                f"a sweep, {given.slots} slots",
                _timed(folder, [*run, "-m", *words, seeds, off, f"sweep.slots.cpu={given.slots}"]),
                given.slots,
            ),
            ("a sweep, 1 slot", _timed(folder, [*run, "-m", *words, seeds, off, "hydra.sweep.dir=one"]), 1),
            (
                "`run([...])` in one process",
                _timed(folder, [sys.executable, "-c", IN_PROCESS, str(given.jobs), *words]),
                1,
            ),
            ("a process each", _each(folder, given.jobs, [*run, *words]), 1),
        ]
        places = ["multirun/*/*/*", "one/*", "bare/*", "each/*"]
        found = [_training(folder, place) for place in places]
    with section("sweep.py", write=given.write):
        print(
            "| way | training, sum of the jobs | wall | ideal (training / slots) | wall / ideal | outside training, per job | jobs a minute |"
        )
        print("|---|---|---|---|---|---|---|")
        for (title, wall, slots), (count, training) in zip(rows, found, strict=True):
            assert count == given.jobs, (
                f"{title}: {count} of {given.jobs} jobs finished with all their points in MLflow"
            )
            ideal = training / slots
            per_job = (wall - ideal) * slots / given.jobs
            print(
                f"| {title} | {training:.1f} s | {wall:.1f} s | {ideal:.1f} s | {wall / ideal:.2f} | {per_job:.2f} s | {60 * given.jobs / wall:.1f} |"
            )
        print(f"\n{given.jobs} jobs of {given.epochs} epochs; {_machine()}.")


def _timed(folder: Path, command: list[str]) -> float:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLFLOW_DISABLE_TELEMETRY": "true"}
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def _each(folder: Path, jobs: int, command: list[str]) -> float:
    return sum(_timed(folder, [*command, f"seed={seed}", f"hydra.run.dir=each/{seed}"]) for seed in range(jobs))


def _training(folder: Path, places: str) -> tuple[int, float]:
    found = [json.loads(path.read_text()) for path in folder.glob(f"{places}/summary.json")]
    whole = [run for run in found if run["status"] == "finished" and run["tracker"]["points_pending"] == 0]
    return len(whole), sum(run["seconds"]["train"] + run["seconds"]["evaluate"] for run in whole)


def _machine() -> str:
    import torch

    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
