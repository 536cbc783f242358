"""How often `compare` names a winner between equals, and how many seeds it needs to find one: python tests/bench/decided.py

level, power: simulated values of two configurations by seed, with a standard deviation of 1 each; `shared` is the part of the
variance that is due to the seed, equal in both. For comparison, Welch's t-test of unpaired values. looks: sweeps with
sweep.until=decided, with all their looks. sweeps: the seed's part of the variance in sweeps of this project, which are trained
for it (--folder keeps them). One process, about 20 minutes, and the same time again for the sweeps.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from harness import ROOT, RUNNER, head, parser, row, section, timed
from numpy.typing import NDArray
from scipy import stats

from runner.sweep.report.report import against_best, looks
from runner.sweep.report.results import Goal, JobResult
from runner.sweep.report.significance import ALPHA, POWER, Difference, difference

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
#: by name: values with a mean of 0 and a standard deviation of 1
VALUES: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "skewed (exponential)": lambda rng, n: rng.exponential(size=n) - 1,
    "heavy tails (t, 3)": lambda rng, n: rng.standard_t(3, size=n) / 3**0.5,
}
SHARED = (0.0, 0.5, 0.6, 0.7, 0.9)
MAX_SEEDS = 64
#: by name: the overrides of a sweep of two configurations, with 24 seeds each
SWEEPS = {
    "digits, MLP: two rates": ["model=mlp", "optimizer.lr=1e-3,3e-3"],
    "digits, MLP: two widths": ["model=mlp", "model.hidden_sizes=[32],[128]"],
    "digits, CNN: two rates": ["model=cnn", "optimizer.lr=1e-3,3e-3"],
    "spiral, MLP: two rates": ["experiment=spiral", "optimizer.lr=3e-3,1e-2"],
    "MNIST-1D, MLP: two rates": ["experiment=mnist1d_mlp", "optimizer.lr=1e-3,3e-3"],
}


def main() -> None:
    tables = {"level": _level, "looks": _looks, "power": _power}
    options = parser(__doc__)
    options.add_argument("--num", type=int, default=10_000, help="comparisons of each kind")
    options.add_argument("--only", nargs="+", choices=(*tables, "sweeps"), default=[*tables, "sweeps"])
    options.add_argument("--folder", type=Path, help="of the sweeps; those that are there are not run again")
    given = options.parse_args()
    for name in given.only:
        with section(f"decided.py {name}", write=given.write), tempfile.TemporaryDirectory() as made:
            _sweeps(given.folder or Path(made)) if name == "sweeps" else tables[name](given.num)


def _level(num: int) -> None:
    seeds = (6, 8, 12, 24)
    print(f"Winners named between two configurations that are alike ({ALPHA:.0%} is the most allowed):\n")
    head("values", "comparisons", "chance's share of these (95 %)", *(f"{n} seeds" for n in seeds))
    for kind, (name, draw) in enumerate(VALUES.items()):
        for is_paired, count in ((True, num), (False, num // 10)):  # scipy's permutations take 30 ms
            found = []
            for n in seeds:
                # separate for each cell, so that not all cells are high or low together
                rng = np.random.default_rng([kind, n, is_paired])
                found.append(sum(_compared(rng, n, draw, is_paired=is_paired).is_decided for _ in range(count)) / count)
            how = "by seed" if is_paired else "of other seeds"
            row(f"{name}, {how}", f"{count:,}", _chance(count), *(f"{share:.1%}" for share in found))


def _looks(num: int) -> None:
    """Count sweeps, a fifth of `num`: each has four looks."""
    num //= 5
    sizes = looks(MAX_SEEDS)
    print(f"Sweeps with sweep.until=decided, sweep.max_seeds={MAX_SEEDS}, in which none is better than each other one,")
    print("normal values:\n")
    by = (f"by {size} seeds" for size in sizes)
    head("configurations", "sweeps", f"chance's share of {ALPHA:.0%} (95 %)", "with a winner, of all looks", *by)
    for count, num_worse in ((2, 0), (4, 0), (4, 2)):
        rng = np.random.default_rng([count, num_worse])
        worse = 2.0 * (np.arange(count) >= count - num_worse)[:, None]
        ends = [_decided_at(rng.normal(size=(count, MAX_SEEDS)) + worse) for _ in range(num)]
        shares = [sum(end is not None and end <= size for end in ends) / num for size in sizes]
        kinds = f"{count} alike" if not num_worse else f"{count - num_worse} alike, {num_worse} clearly worse"
        row(kinds, f"{num:,}", _chance(num), *(f"{share:.1%}" for share in (shares[-1], *shares)))


def _decided_at(values: NDArray[np.float64]) -> int | None:
    """Return the number of seeds at which the sweep ends with a winner, or None. values: (configurations, seeds)."""
    sizes, goal = looks(values.shape[1]), Goal("val/loss", "min")
    for size in sizes:
        groups = {
            str(name): [
                JobResult(at, "", (), {}, "finished", "", at, None, metrics={goal.metric: float(value)})
                for at, value in enumerate(row[:size])
            ]
            for name, row in enumerate(values)
        }
        if all(each.difference.is_decided for each in against_best(groups, goal, num_looks=len(sizes))):
            return size
    return None


def _chance(num: int) -> str:
    low, high = (float(stats.binom.ppf(at, num, ALPHA)) / num for at in (0.025, 0.975))
    return f"{low:.1%} to {high:.1%}"


def _power(num: int) -> None:
    num //= 4
    print(
        f"Seeds that find a true difference of one standard deviation in {POWER:.0%} of {num:,} sweeps; normal values:\n"
    )
    head("of the variance the seed's", "paired by seed", "of the unpaired t-test's")
    row("any, unpaired", _fewest_unpaired(), "100%")
    for shared in SHARED:
        fewest, ratio = _fewest(shared, num)
        row(f"{shared:.0%}", fewest, f"{ratio:.0%}")


def _sweeps(folder: Path) -> None:
    """Compare the values that `compare` uses: those of the sweep's goal."""
    print("What the seed does to both of two configurations of this project, with 24 seeds of each:\n")
    head("sweep", "metric", "correlation (95 %)", "of the variance the seed's", "seeds, of the unpaired t-test's")
    rest = ["seed=range(24)", "tracking.enabled=false", "task.plots=false", "device=cpu"]
    for name, words in SWEEPS.items():
        own = folder.resolve() / name.replace(":", "").replace(", ", "_").replace(" ", "_")
        if not (own / "report.json").exists():
            timed([*RUNNER, "-m", *words, *rest, f"hydra.sweep.dir={own}"], ROOT, threads=None)
        metric, a, b = _values(json.loads((own / "report.json").read_text()))
        correlation = stats.pearsonr(a, b)
        low, high = correlation.confidence_interval()
        shared = 1 - np.var(a - b, ddof=1) / (np.var(a, ddof=1) + np.var(b, ddof=1))
        _, ratio = _fewest(max(0.0, round(float(shared), 2)), 2500)
        between = f"{correlation.statistic:.2f} ({low:.2f} to {high:.2f})"
        row(name, metric, between, f"{shared:.0%}", f"{ratio:.0%}")


def _values(report: dict[str, object]) -> tuple[str, NDArray[np.float64], NDArray[np.float64]]:
    goal = report["goals"][0]["metric"]
    sides: dict[str, dict[int, float]] = {}
    for job in report["jobs"]:
        side = str({key: value for key, value in job["keys"].items() if key != "seed"})
        sides.setdefault(side, {})[job["seed"]] = (
            job["best"]["value"] if job["best"]["metric"] == goal else job["metrics"][goal]
        )
    a, b = sides.values()
    assert a.keys() == b.keys()
    return goal, *(np.array([side[seed] for seed in sorted(a)]) for side in (a, b))


def _compared(
    rng: np.random.Generator, n: int, draw: Draw, *, shared: float = 0.0, shift: float = 0.0, is_paired: bool = True
) -> Difference:
    seeds = draw(rng, n) * shared**0.5
    a, b = (seeds + draw(rng, n) * (1 - shared) ** 0.5 for _ in range(2))
    first = 0 if is_paired else n
    found = difference(dict(enumerate((a + shift).tolist())), dict(enumerate(b.tolist(), first)))
    assert found is not None
    return found


@cache
def _fewest(shared: float, num: int) -> tuple[int, float]:
    fewest = next(n for n in range(6, 100) if _found_paired(n, num, shared) >= POWER)
    return fewest, fewest / _fewest_unpaired()


@cache
def _fewest_unpaired() -> int:
    return next(n for n in range(6, 100) if _found_unpaired(n, 40_000) >= POWER)


def _found_paired(n: int, num: int, shared: float) -> float:
    rng = np.random.default_rng(n)
    each = (_compared(rng, n, VALUES["normal"], shared=shared, shift=1.0) for _ in range(num))
    return sum(one.is_decided and one.verdict("max") == "better" for one in each) / num


def _found_unpaired(n: int, num: int) -> float:
    rng = np.random.default_rng(n)
    a, b = rng.normal(1.0, size=(num, n)), rng.normal(size=(num, n))
    tested = stats.ttest_ind(a, b, axis=1, equal_var=False)
    return float(np.mean((tested.pvalue <= ALPHA) & (tested.statistic > 0)))


if __name__ == "__main__":
    main()
