"""Runs experiments over seeds, one process a run, and prints one table: `python tests/bench/recipes.py mnist1d_cnn spiral`.

The settings behind the names go to each run, and have a separate table: `python tests/bench/recipes.py gpt_characters --seeds 3
optimizer=muon`.
"""

from __future__ import annotations

import statistics

from harness import head, header, parser, row, section, spread, summary_of


def run(name: str, seed: int, words: list[str]) -> tuple[float, float, float]:
    """Return a run's test accuracy with the weights chosen by validation, their validation value, and its seconds."""
    found = summary_of([f"experiment={name}", f"seed={seed}", *words], threads=None)
    return found["metrics"]["test/accuracy"], found["best"]["value"], found["seconds"]["total"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("words", nargs="+", help="experiments, and KEY=VALUE for all of them")
    options.add_argument("--seeds", type=int, default=5, help="as many runs of each: seed=0, 1, ...")
    given = options.parse_intermixed_args()
    words = [word for word in given.words if "=" in word]
    with section(" ".join(["recipes.py", *words]), write=given.write):
        print(header(given.seeds, packages=("torch",)))
        head("experiment", "n", "test accuracy, median", "lowest to highest", "best validation value, median",
             "seconds, median")  # fmt: skip
        for name in (word for word in given.words if "=" not in word):
            runs = [run(name, seed, words) for seed in range(given.seeds)]
            tests, values, seconds = zip(*runs, strict=True)
            middle = f"{statistics.median(values):.3f}", f"{statistics.median(seconds):.1f}"
            row(name, given.seeds, spread(tests, ".3f"), *middle)


main()
