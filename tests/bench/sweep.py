"""The cost of a sweep in addition to its jobs' training: python tests/bench/sweep.py [--jobs 8] [--slots 2] [--epochs 8]

Three ways, one after the other, with the same jobs (digits-sized MLPs on 60,000 synthetic rows, tracked in one sqlite store):
`run([...])` in one process, `python -m runner -m` with slots, and a `python -m runner` for each job. Each run measures the
seconds of its training; the rest is the cost of the way.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from harness import RUNNER, head, header, parser, row, section, timed

JOB = ["data=synthetic", "data.num_rows=60000", "model=mlp", "model.hidden_sizes=[256,256]", "train.batch_size=256"]
IN_PROCESS = """
import sys
from runner import run
for seed in range(int(sys.argv[1])):
    run([*sys.argv[2:], f"seed={seed}"], folder=f"bare/{seed}")
"""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=8)
    options.add_argument("--slots", type=int, default=2)
    options.add_argument("--epochs", type=int, default=8)
    given = options.parse_args()
    words = [*JOB, "device=cpu", f"train.num_epochs={given.epochs}"]
    # batched.py measures jobs that are trained together
    sweep = [*RUNNER, "-m", *words, f"seed=range({given.jobs})", "sweep.batch=off"]
    several = f"a sweep, {given.slots} slots"
    ways = {  # the commands, and the folders of their runs
        several: ([[*sweep, f"sweep.slots.cpu={given.slots}"]], "multirun/*/*/*"),
        "a sweep, 1 slot": ([[*sweep, "hydra.sweep.dir=one"]], "one/*"),
        "`run([...])` in one process": ([[sys.executable, "-c", IN_PROCESS, str(given.jobs), *words]], "bare/*"),
        "a process each": (
            [[*RUNNER, *words, f"seed={seed}", f"hydra.run.dir=each/{seed}"] for seed in range(given.jobs)],
            "each/*",
        ),
    }
    with tempfile.TemporaryDirectory() as folder, section("sweep.py", write=given.write):
        head("way", "training, sum of the jobs", "wall", "ideal (training / slots)", "wall / ideal",
             "outside training, per job", "jobs a minute")  # fmt: skip
        for name, (commands, places) in ways.items():
            wall = sum(timed(command, Path(folder), threads=None)[0] for command in commands)
            count, training = _training(Path(folder), places)
            assert count == given.jobs, f"{name}: {count} of {given.jobs} jobs finished with all their points in MLflow"
            slots = given.slots if name == several else 1
            ideal = training / slots
            seconds = (f"{training:.1f} s", f"{wall:.1f} s", f"{ideal:.1f} s", f"{wall / ideal:.2f}")
            row(name, *seconds, f"{(wall - ideal) * slots / given.jobs:.2f} s", f"{60 * given.jobs / wall:.1f}")
        print(f"\n{given.jobs} jobs of {given.epochs} epochs; {header(1)}")


def _training(folder: Path, places: str) -> tuple[int, float]:
    found = [json.loads(path.read_text()) for path in folder.glob(f"{places}/summary.json")]
    whole = [run for run in found if run["status"] == "finished" and run["tracker"]["points_pending"] == 0]
    return len(whole), sum(run["seconds"]["train"] + run["seconds"]["evaluate"] for run in whole)


main()
