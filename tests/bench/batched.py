"""The cost of many seeds compared with one run: python tests/bench/batched.py [--repeats 2] [--only NAME ...]

Measured from Enter to the prompt, each tracked in a separate sqlite store: one run, the seeds trained together, and the same
seeds in a process each (`sweep.batch=off`), in turns. The time of a member's step is the one that the sweep itself has
measured (console.log).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

from page import add_write, section
from sweep import _machine, _timed

#: by name: the overrides of a run, and those that are swept
SWEEPS = {
    "digits, MLP": (["model=mlp"], ["seed=range(16)"]),
    "digits, MLP, compiled": (["model=mlp", "train.compile=true"], ["seed=range(16)"]),
    "digits, MLP, 4 rates": (["model=mlp"], ["seed=range(16)", "optimizer.lr=3e-4,1e-3,3e-3,1e-2"]),
    "spiral": (["experiment=spiral"], ["seed=range(32)"]),
    "MNIST-1D, MLP": (["experiment=mnist1d_mlp"], ["seed=range(32)"]),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    add_write(parser)
    given = parser.parse_args()
    rows = [_row(name, *SWEEPS[name], repeats=given.repeats) for name in given.only]
    with section("batched.py", write=given.write):
        print(
            "| jobs | how many | one run, s | together, s | times one run | each for itself, s | times together | "
            "jobs a minute, together | each for itself | a job's step, us, by how many compute together |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for row in rows:
            print("| " + " | ".join(row) + " |")
        print(f"\n{_machine()}; medians of {given.repeats}, in turns.")


def _row(name: str, words: list[str], swept: list[str], *, repeats: int) -> list[str]:
    run = [sys.executable, "-m", "runner"]
    walls: dict[str, list[float]] = {"one": [], "together": [], "apart": []}
    told, count = "", 0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            commands = {
                "one": [*run, *words],
                "together": [*run, "-m", *words, *swept, "sweep.batch=auto", "hydra.sweep.dir=together"],
                "apart": [*run, "-m", *words, *swept, "sweep.batch=off", "hydra.sweep.dir=apart"],
            }
            for way, command in commands.items():
                walls[way].append(_timed(folder, command))
            states = [_state(folder / way) for way in ("together", "apart")]
            count = len(states[0])
            assert set(states[0] + states[1]) == {"finished"} and len(states[1]) == count, states
            found = re.search(r"a step of each: (.*?)[;)]", (folder / "together/0/console.log").read_text())
            told = found[1].replace(" us with", ":") if found else "one by one"
    one, together, apart = (statistics.median(walls[way]) for way in ("one", "together", "apart"))
    numbers = [f"{one:.1f}", f"{together:.1f}", f"{together / one:.2f}", f"{apart:.1f}", f"{apart / together:.2f}"]
    return [name, str(count), *numbers, *(f"{60 * count / wall:.0f}" for wall in (together, apart)), told]


def _state(sweep: Path) -> list[str]:
    return [json.loads(path.read_text())["status"] for path in sweep.glob("*/summary.json")]


if __name__ == "__main__":
    main()
