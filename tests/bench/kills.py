"""Kill runs of eleven configurations at random moments and resume each to its end: python tests/bench/kills.py [NAME ...] [--seed N]

Prints a line per configuration: the kills, and whether each run ends bitwise identical to an undisturbed one, with each
point in MLflow once. 60 kills or more in all. Exit code 1 for a difference. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "whole_runs")]

COMMON = [
    *("device=cpu", "tracking.enabled=false", "tracking.log_model=false", "tracking.points=all"),
    *("train.checkpoint_every_steps=7", "metrics.pull_every=10", "metrics.every=2", "train.batch_size=16"),
]
MLP = ["model=mlp", "model.hidden_sizes=[32]", "data=digits", "train.num_epochs=8"]
CONFIGURATIONS = {
    "mlp": MLP,
    "augmented": [
        "model=cnn",
        "data=digits",
        "data.limit=300",
        "data.augment={crop:2,mixup:0.2}",
        "train.num_epochs=4",
    ],
    "accumulation": [*MLP, "train.accumulate_steps=2", "train.clip_grad_norm=1.0", "scheduler=cosine"],
    "average": [*MLP, "train.ema_decay=0.9", "train.precision=bf16", "model.dropout=0.2"],
    "fold": [*MLP, "data.num_folds=3", "data.fold=1"],
    "turns": ["experiment=gan_rings", "data.num_rows=800", "train.num_epochs=8", "model.hidden_sizes=[16]"],
    "streamed": [*MLP, "data.residency=stream", "data.num_workers=2", "data.limit=600"],
    "gpt": [
        *("experiment=gpt_characters", f"data.path={TESTS}/support/language/sentences.txt", "data.context_length=32"),
        *("model.width=16", "model.depth=1", "model.num_heads=2", "data.limit=400", "train.num_epochs=4"),
    ],
    "carried": [
        *("model._target_=programs.Words", "data._target_=programs.words", "task=own"),
        *("task.function._target_=programs.next_word", "optimizer=sgd", "optimizer.lr=0.1"),
        *("train.num_epochs=60", "train.evaluate_every_steps=3"),
    ],
    "stopping": [*MLP, "optimizer=muon", "train.early_stopping.patience=2", "train.num_epochs=40"],
    "kept": [
        *MLP,
        "train.precision=fp16",
        "train.keep_checkpoints=best:2",
        "scheduler=plateau",
        "scheduler.patience=0",
    ],
}


def check(name: str, folder: Path) -> bool:
    """Compare the killed runs with the uninterrupted one, and print a line."""
    from test_stops import in_mlflow, outcome

    began = time.monotonic()
    command = [sys.executable, str(TESTS / "support" / "stops.py"), str(folder), "random", *COMMON]
    here = TESTS / "support" / "research"  # has programs.py
    how = {"cwd": here, "env": {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}}
    trained = subprocess.run([*command, *CONFIGURATIONS[name]], capture_output=True, text=True, **how)
    if trained.returncode:
        print(f"{name:13} failed\n{trained.stdout[-2000:]}{trained.stderr[-2000:]}", flush=True)
        return False
    whole, runs = folder / "whole", sorted(folder.glob("run*"))
    expected, found = outcome(whole), [outcome(run) for run in runs]
    keys = {key for one in found for key in expected.keys() | one.keys() if one.get(key) != expected.get(key)}
    stored = in_mlflow([whole, *runs], f"sqlite:///{folder}/store.db")
    lost = [run.name for run in runs if stored[run] != stored[whole]]
    kills, seconds = trained.stdout.split()[-1], time.monotonic() - began
    words = "identical" if not keys and not lost else f"DIFFERENT: {', '.join([*sorted(keys), *lost])}"
    print(f"{name:13} {kills:>3} kills, {len(runs):2} runs, {seconds:4.0f} s: {words}", flush=True)
    return not keys and not lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CONFIGURATIONS)} (default: all)")
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CONFIGURATIONS]:
        parser.error(f"no such configuration: {', '.join(unknown)}")
    os.environ["FUZZ_SEED"] = given.seed
    with tempfile.TemporaryDirectory() as root:
        results = [check(name, Path(root) / name) for name in given.names or CONFIGURATIONS]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
