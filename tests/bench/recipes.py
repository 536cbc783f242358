"""Runs experiments over seeds, one process a run, and prints one table: `python tests/bench/recipes.py mnist1d_cnn spiral`.

The settings behind the names go to each run, and have a separate table: `python tests/bench/recipes.py gpt_characters --seeds 3
optimizer=muon`.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from page import ROOT, add_write, section


def summary_of(*words: str) -> dict[str, Any]:
    """Return summary.json of an untracked run with these overrides, in a temporary directory and a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(ROOT / "tests")  # an experiment reads a text there
        command = [sys.executable, "-m", "runner", *words, "tracking.enabled=false", "hydra.run.dir=run"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd=folder, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return found


def run(name: str, seed: int, words: list[str]) -> dict[str, float]:
    """Return a run's results with the weights chosen by validation, and the seconds from its start to its end."""
    found = summary_of(f"experiment={name}", f"seed={seed}", *words)
    return {
        "test": found["metrics"]["test/accuracy"],
        "val": found["best"]["value"],
        "seconds": found["seconds"]["total"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="+", help="experiments, and KEY=VALUE for all of them")
    parser.add_argument("--seeds", type=int, default=5, help="as many runs of each: seed=0, 1, ...")
    add_write(parser)
    given = parser.parse_intermixed_args()
    names = [word for word in given.words if "=" not in word]
    words = [word for word in given.words if "=" in word]
    with section(" ".join(["recipes.py", *words]), write=given.write):
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {version('torch')}"
        )
        print(
            "\n| experiment | n | test accuracy, median | lowest to highest | best validation value, median | seconds, median |"
        )
        print("|---|---|---|---|---|---|", flush=True)
        for name in names:
            runs = [run(name, seed, words) for seed in range(given.seeds)]
            tests, values, seconds = ([found[key] for found in runs] for key in ("test", "val", "seconds"))
            spread = f"{min(tests):.3f} to {max(tests):.3f}"
            middle = f"{statistics.median(values):.3f} | {statistics.median(seconds):.1f}"
            print(f"| {name} | {len(runs)} | {statistics.median(tests):.3f} | {spread} | {middle} |", flush=True)


if __name__ == "__main__":
    main()
