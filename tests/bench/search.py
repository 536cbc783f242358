"""What a search is worth: python tests/bench/search.py [--trials 40] [--epochs 12] [--seeds 3] [--slots 2]

The same number of trials twice, on the digits with an MLP: Optuna's TPE with pruning, and random ones that all run to their
end. Each with several seeds of the sampler; the model's seed is the same. Best val/loss over the trials (a trial's is that
of its best epoch), epochs trained by all trials together, and the wall time of the whole command.
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
from statistics import median

from page import add_write, section

REPOSITORY = Path(__file__).resolve().parents[2]
WORDS = [
    "model=mlp",
    "optimizer.lr=tag(log,interval(1e-5,1))",
    "model.hidden_sizes=[8],[32],[128],[256]",
    "model.dropout=interval(0,0.8)",
    "optimizer=adamw",
    "optimizer.weight_decay=tag(log,interval(1e-5,10))",
    "train.batch_size=16,64,256",
    "device=cpu",
    "tracking.enabled=false",
]
WAYS = {
    "TPE, median pruner": ["hydra.sweeper.sampler=tpe"],
    "random, no pruner": ["hydra.sweeper.sampler=random", "hydra.sweeper.pruner=none"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2)
    add_write(parser)
    given = parser.parse_args()
    common = [f"hydra.sweeper.n_trials={given.trials}", f"train.num_epochs={given.epochs}"]
    found: dict[str, list[tuple[float, int, int, float]]] = {name: [] for name in WAYS}
    for seed in range(given.seeds):  # in turn, so that what else the machine does meets both
        for name, words in WAYS.items():
            settings = [*common, *words, f"hydra.sweeper.seed={1000 * seed}", f"sweep.slots.cpu={given.slots}"]
            found[name].append(_search(settings))
            print(f"# seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    load = f"load {os.getloadavg()[1]:.1f} at the end"
    with section("search.py", write=given.write):
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, {load}, {given.slots} slots, {time.strftime('%Y-%m-%d')};"
        )
        print(f"{given.trials} trials of at most {given.epochs} epochs, {given.seeds} seeds: median (least to most)\n")
        print("| search | best val/loss | epochs trained | pruned | wall, s |")
        print("|---|---|---|---|---|")
        for name, rows in found.items():
            columns = [
                _shown([row[index] for row in rows], form) for index, form in enumerate((".4f", ".0f", ".0f", ".0f"))
            ]
            print(f"| {name} | {' | '.join(columns)} |")


def _search(words: list[str]) -> tuple[float, int, int, float]:
    """(best value, epochs of all trials, pruned trials, seconds) of one search in a fresh folder."""
    command = [sys.executable, "-m", "runner", "-m", "hydra/sweeper=optuna", "hydra.sweep.dir=found", *WORDS, *words]
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - began
        summaries = [json.loads(path.read_text()) for path in Path(name).glob("found/*/summary.json")]
    if not summaries:
        raise SystemExit(done.stdout + done.stderr)
    whole = [summary["best"]["value"] for summary in summaries if summary["status"] == "finished"]
    num_epochs = sum(summary.get("num_epochs", 0) for summary in summaries)
    return min(whole), num_epochs, sum(summary["status"] == "pruned" for summary in summaries), seconds


def _shown(values: list[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    main()
