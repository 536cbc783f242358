"""Runs the peers side by side, in turns, and prints one table: `python tests/bench/table.py --repeats 5`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
#: name in the table, file, its own words; the textbook's loop stores 130 steps a second, so it stops early
PEERS = (
    ("hand-written limit, nothing tracked", "limit.py", ()),
    ("runner, every step tracked", "ours.py", ()),
    ("runner, tracking off", "ours.py", ("--variant", "untracked")),
    ("runner, tracking off, guard off", "ours.py", ("--variant", "unguarded")),
    ("textbook: DataLoader, item(), log_metrics", "textbook.py", ("--most-steps", "300")),
)


def measure(file: str, words: tuple[str, ...], *, epochs: int, threads: int) -> dict[str, float]:
    """One run of one peer in a process of its own, with a store of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE / file), "--store", f"{folder}/mlflow.db", "--epochs", str(epochs)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*command, "--threads", str(threads), *words],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{file} failed:\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name, _, _ in PEERS}
    for _ in range(given.repeats):
        for name, file, words in PEERS:
            result = measure(file, words, epochs=given.epochs, threads=given.threads)
            rates[name].append(result["num_steps"] / result["seconds"])
    print(header(given.repeats, given.threads))
    limit = rates[PEERS[0][0]]
    print("| loop | steps/s, median | lowest to highest | of the limit, median of the turns |")
    print("|---|---|---|---|")
    for name, found in rates.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(found, limit, strict=True))
        print(f"| {name} | {statistics.median(found):,.0f} | {min(found):,.0f} to {max(found):,.0f} | {ratio:.2f} |")


def header(repeats: int, threads: int) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "mlflow", "numpy"))
    machine = f"{platform.machine()}, {os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}"
    return f"{machine}; {versions}; {threads} thread(s); n = {repeats}, in turns\n"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
