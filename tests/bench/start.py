"""From Enter to the prompt: a short run of ours, a bare script and only the imports: `python tests/bench/start.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import PEERS, RUNNER, head, header, in_turns, median_ratio, parser, row, section, spread, timed
from sklearn.datasets import load_digits

BARE = "bare script: torch, mlflow, the same steps, logged once"
IMPORTS = 'python -c "import torch, hydra, mlflow"'


def commands(*, steps: int, threads: int) -> dict[str, list[str]]:
    """Return the commands, by their names in the table; each runs in a separate directory next to rows.npz."""
    ours = [*RUNNER, "data=arrays", "data.path=../rows.npz", "model=mlp", "model.hidden_sizes=[128]", "device=cpu"]
    ours += ["tracking.uri=sqlite:///mlflow.db", f"backends.cpu.num_threads={threads}"]
    bare = ["--data=../rows.npz", "--store=mlflow.db", f"--steps={steps}", f"--threads={threads}"]
    found = {
        BARE: [sys.executable, str(PEERS / "bare.py"), *bare],
        IMPORTS: [sys.executable, "-c", "import torch, hydra, mlflow"],
    }
    for count, text in ((steps, f"{steps} steps"), (1, "1 step")):
        run = [*ours, f"train.num_steps={count}"]
        found[f"runner, {text}, as it is"] = run
        off = ["tracking.log_model=false", "task.plots=false"]
        found[f"runner, {text}, no model logged, no pictures of predictions"] = [*run, *off]
    return found


def main() -> None:
    options = parser(__doc__, repeats=5)
    options.add_argument("--steps", type=int, default=500)
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        digits, rows = load_digits(), np.arange(60_000) % 1797
        np.savez(Path(place) / "rows.npz", x=(digits.data / 16).astype(np.float32)[rows], y=digits.target[rows])
        each = commands(steps=given.steps, threads=given.threads)

        def measure(name: str, turn: int) -> float:
            folder = Path(place) / f"{turn}-{list(each).index(name)}"
            return timed(each[name], folder, threads=given.threads)[0]

        found = in_turns(each, given.repeats, measure)
    with section("start.py", write=given.write):
        print(header(given.repeats, given.threads, packages=("torch", "mlflow", "hydra-core")))
        times = ("times the bare script, median of the turns", "times the imports")
        head("from Enter to the prompt", "s, median", "lowest to highest", *times)
        for name, seconds in found.items():
            row(name, spread(seconds), *(f"{median_ratio(seconds, found[other]):.2f}" for other in (BARE, IMPORTS)))


main()
