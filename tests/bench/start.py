"""From Enter to the prompt: a short run of ours, a bare script and only the imports: `python tests/bench/start.py`."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from page import add_write, section
from table import HERE, environment, header, orders
from work import HIDDEN, arrays

BARE = "bare script: torch, mlflow, the same steps, logged once"
IMPORTS = 'python -c "import torch, hydra, mlflow"'
RUNNER = [sys.executable, "-m", "runner", "data=arrays", "model=mlp", f"model.hidden_sizes=[{HIDDEN}]", "device=cpu"]
OFF = ["tracking.log_model=false", "task.plots=false"]


def commands(*, steps: int, threads: int) -> dict[str, list[str]]:
    """Return the commands, by their names in the table; each runs in a separate directory next to rows.npz."""
    data, store = "../rows.npz", "mlflow.db"
    ours = [*RUNNER, f"data.path={data}", f"tracking.uri=sqlite:///{store}", f"backends.cpu.num_threads={threads}"]
    bare = ["--data", data, "--store", store, "--steps", str(steps), "--threads", str(threads)]
    return {
        BARE: [sys.executable, str(HERE / "bare.py"), *bare],
        IMPORTS: [sys.executable, "-c", "import torch, hydra, mlflow"],
        f"runner, {steps} steps, as it is": [*ours, f"train.num_steps={steps}"],
        f"runner, {steps} steps, no model logged, no pictures of predictions": [
            *ours,
            f"train.num_steps={steps}",
            *OFF,
        ],
        "runner, 1 step, as it is": [*ours, "train.num_steps=1"],
        "runner, 1 step, no model logged, no pictures of predictions": [*ours, "train.num_steps=1", *OFF],
    }


def timed(command: list[str], folder: Path, *, threads: int) -> float:
    """Return the seconds until the command has ended."""
    folder.mkdir()
    environs = environment(threads) | {"PYTHONPATH": str(HERE.parents[1])}
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environs, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1)
    add_write(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        inputs, targets = arrays()
        np.savez(Path(place) / "rows.npz", x=inputs, y=targets)
        typed = commands(steps=given.steps, threads=given.threads)
        found: dict[str, list[float]] = {name: [] for name in typed}
        for turn, order in enumerate(orders(typed, given.repeats)):
            for number, name in enumerate(order):
                folder = Path(place) / f"{turn}-{number}"
                found[name].append(timed(typed[name], folder, threads=given.threads))
    with section("start.py", write=given.write):
        print(header(given.repeats, given.threads, packages=("torch", "mlflow", "hydra-core")))
        print(
            "| from Enter to the prompt | s, median | lowest to highest |"
            " times the bare script, median of the turns | times the imports |"
        )
        print("|---|---|---|---|---|")
        for name, seconds in found.items():
            ratios = " | ".join(
                f"{statistics.median(mine / theirs for mine, theirs in zip(seconds, found[other], strict=True)):.2f}"
                for other in (BARE, IMPORTS)
            )
            spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
            print(f"| {name} | {statistics.median(seconds):.1f} | {spread} | {ratios} |")


main()
