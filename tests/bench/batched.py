"""The cost of many seeds compared with one run: python tests/bench/batched.py [--repeats 2] [--only NAME ...]

Measured from Enter to the prompt, each tracked in a separate sqlite store: one run, the seeds trained together, and the same
seeds in a process each (`sweep.batch=off`), in turns. The time of a member's step is the one that the sweep itself has
measured (console.log).
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from pathlib import Path

from harness import RUNNER, head, header, in_turns, parser, row, section, timed

#: by name: the overrides of a run, and those that are swept
SWEEPS = {
    "digits, MLP": (["model=mlp"], ["seed=range(16)"]),
    "digits, MLP, compiled": (["model=mlp", "train.compile=true"], ["seed=range(16)"]),
    "digits, MLP, 4 rates": (["model=mlp"], ["seed=range(16)", "optimizer.lr=3e-4,1e-3,3e-3,1e-2"]),
    "spiral": (["experiment=spiral"], ["seed=range(32)"]),
    "MNIST-1D, MLP": (["experiment=mnist1d_mlp"], ["seed=range(32)"]),
}


def main() -> None:
    options = parser(__doc__, repeats=1)
    options.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    options.add_argument("--words", nargs="*", default=[], help="more overrides for every run")
    given = options.parse_args()
    with section("batched.py", write=given.write):
        head("jobs", "how many", "one run, s", "together, s", "times one run", "each for itself, s", "times together",
             "jobs a minute, together", "each for itself", "a job's step, us, by how many compute together")  # fmt: skip
        for name in given.only:
            words, swept = SWEEPS[name]
            row(name, *_cells([*words, *given.words], swept, repeats=given.repeats))
        print(f"\n{header(given.repeats)}")


def _cells(words: list[str], swept: list[str], *, repeats: int) -> list[str]:
    sweep = [*RUNNER, "-m", *words, *swept]
    commands = {
        "one": [*RUNNER, *words],
        "together": [*sweep, "sweep.batch=auto", "hydra.sweep.dir=together"],
        "apart": [*sweep, "sweep.batch=off", "hydra.sweep.dir=apart"],
    }
    with tempfile.TemporaryDirectory() as place:

        def measure(way: str, turn: int) -> float:
            return timed(commands[way], Path(place) / str(turn), threads=None)[0]

        walls = in_turns(commands, repeats, measure)
        last = Path(place) / str(repeats - 1)
        states = [_states(last / way) for way in ("together", "apart")]
        found = re.search(r"a step of each: (.*?)[;)]", (last / "together/0/console.log").read_text())
    assert set(states[0] + states[1]) == {"finished"} and len(states[0]) == len(states[1]), states
    count = len(states[0])
    one, together, apart = (statistics.median(walls[way]) for way in commands)
    numbers = [f"{one:.1f}", f"{together:.1f}", f"{together / one:.2f}", f"{apart:.1f}", f"{apart / together:.2f}"]
    numbers += [f"{60 * count / wall:.0f}" for wall in (together, apart)]
    return [str(count), *numbers, found[1].replace(" us with", ":") if found else "one by one"]


def _states(sweep: Path) -> list[str]:
    return [json.loads(path.read_text())["status"] for path in sweep.glob("*/summary.json")]


main()
