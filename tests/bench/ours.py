"""This project, by its own command line, every step's loss and accuracy tracked.

--variant untracked: without MLflow; unguarded: without MLflow and without the guard on the first step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from work import BATCH_SIZE, HIDDEN, LEARNING_RATE, SEED, arguments, arrays, tell


def main() -> None:
    work = arguments()
    with tempfile.TemporaryDirectory() as folder:
        inputs, targets = arrays()
        np.savez(Path(folder) / "digits60k.npz", x=inputs, y=targets)
        words = [
            "data=arrays",
            "model=mlp",
            f"data.path={folder}/digits60k.npz",
            "data.val_fraction=0",
            "data.test_fraction=0",
            f"model.hidden_sizes=[{HIDDEN}]",
            "optimizer=adam",
            f"optimizer.lr={LEARNING_RATE}",
            "scheduler=constant",
            f"train.batch_size={BATCH_SIZE}",
            f"train.num_epochs={work.epochs}",
            f"backends.cpu.num_threads={work.threads}",
            f"seed={SEED}",
            "device=cpu",
            f"tracking.uri=sqlite:///{work.store}",
            f"tracking.enabled={str(not work.variant.startswith('un')).lower()}",
            f"placement.guard={'off' if work.variant == 'unguarded' else 'first_step'}",
            f"hydra.run.dir={folder}/run",
        ]
        done = subprocess.run([sys.executable, "-m", "runner", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    written = summary["tracker"]["points_written"]
    tell(
        num_steps=summary["num_steps"],
        seconds=summary["seconds"]["train"],
        points=written,
        loss=summary["metrics"]["train/loss"],
    )


main()
