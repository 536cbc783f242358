"""The values of two configurations by seed and fold go in; the difference, how sure it is, and how many more seeds it takes come out.

Pure, for the report and `runner compare`. Imports scipy, half a second, when it is asked. A value may be infinite, as a mean may:
it then outweighs all that are not, and there is no interval.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, str]  # a seed, and a fold; "" where there are none

#: how often a winner may be named where there is none
ALPHA = 0.05
#: how often a true difference of the size that was seen is to be found with the seeds that are advised
POWER = 0.8
#: draws of the bootstrap, and of a permutation test where there are more orders; the most where it must be surer
DRAWS, MOST_DRAWS = 9999, 100_000
#: steps in the sum of all pairs' sizes, to which a sign-flip test rounds each
STEPS = 2**16
#: pairs of which each choice of signs is added up
FEW = 16
#: of values that are the same but for the last bits; of sums
ROUNDING, TIED = 1e-9, 1e-12
#: seeds that nobody will run: the difference is none that matters
TOO_MANY = 10_000


@dataclass(frozen=True)
class Difference:
    """Of one configuration from another: the mean of A - B, its interval at 95 %, and how often chance alone gives as much.

    n: pairs of equal seeds, or, where no seeds are shared, the values of the smaller side. more_seeds: about so many more
    would decide it; None where it is decided, or no number of them is worth it.
    """

    n: int
    is_paired: bool
    mean: float
    low: float | None
    high: float | None
    p_value: float
    is_decided: bool
    more_seeds: int | None

    def verdict(self, mode: str) -> str:
        """better, worse or undecided: what A is, where less (min) or more (max) is better."""
        if not self.is_decided:
            return "undecided"
        return "better" if (self.mean < 0) == (mode == "min") else "worse"


def independent(values: Mapping[Place, float], *, by_seed: bool) -> dict[Any, float]:
    """The values by seed, each the mean over its folds: those have their initial weights and most of their rows in common,
    and five of them say no more of another seed than one. Without by_seed, which is for a single seed, by fold."""
    if not by_seed:
        return {fold: value for (_, fold), value in values.items()}
    seeds = dict.fromkeys(seed for seed, _ in values)
    return {seed: statistics.fmean(value for (own, _), value in values.items() if own == seed) for seed in seeds}


def difference(a: Mapping[Any, float], b: Mapping[Any, float], *, num_comparisons: int = 1) -> Difference | None:
    """Compares values by seed, or by the fold of one seed; None where a side has none.

    Seeds that both have are paired, which takes out what a seed does to both (arXiv 2103.03098). Decided is what both an
    exact sign-flip test and the BCa bootstrap's interval (Efron 1987) say at 95 %; of unpaired values a permutation test.
    The test alone keeps the level, the interval costs it 1 % of what it finds; so no verdict stands beside an interval that has 0.
    num_comparisons: among which a winner is looked for; each must be that much surer (Bonferroni).
    """
    shared = sorted(a.keys() & b.keys())
    alpha = ALPHA / num_comparisons
    if shared:
        return _of_pairs(tuple(0.0 if a[seed] == b[seed] else a[seed] - b[seed] for seed in shared), alpha)
    if not a or not b:
        return None
    return _of_two(tuple(a.values()), tuple(b.values()), alpha)


@lru_cache(1000)  # a sweep's report is written twice, and of 16 pairs this takes 50 ms
def _of_pairs(pairs: tuple[float, ...], alpha: float) -> Difference:
    (differences,), is_bounded = _bounded(np.array(pairs))
    n, mean = len(differences), float(differences.mean())
    limits = _interval((differences,), _mean, alpha) if is_bounded else None
    p_value = _sign_flip(differences) if n > 1 and differences.any() else 1.0
    deviation = float(differences.std(ddof=1)) if n > 1 else math.nan
    least = math.ceil(1 - math.log2(alpha))  # of n pairs, all signs alike come by chance in 2 of 2**n
    return _told(n, True, mean, limits, p_value, alpha=alpha, more=_more(mean, deviation, n, alpha, least=least))


@lru_cache(1000)
def interval(values: tuple[float, ...]) -> tuple[float | None, float | None]:
    """Of the mean, at 95 %, by the BCa bootstrap; None of fewer than two."""
    return _interval((np.array(values),), _mean, ALPHA)


@lru_cache(1000)
def _of_two(of_a: tuple[float, ...], of_b: tuple[float, ...], alpha: float) -> Difference:
    (a, b), is_bounded = _bounded(np.array(of_a), np.array(of_b))
    n, mean = min(len(a), len(b)), float(a.mean() - b.mean())
    limits = _interval((a, b), _mean_difference, alpha) if is_bounded else None
    p_value = 1.0
    if n > 1 and mean:
        p_value = _permutation(a, b, alpha)
    deviation = math.hypot(*(float(side.std(ddof=1)) for side in (a, b))) if n > 1 else math.nan
    # of n on each side, all of one above all of the other come by chance in 2 orders of (2n over n)
    least = next(size for size in itertools.count(2) if 2 / math.comb(2 * size, size) <= alpha)
    more = _more(mean, deviation, n, alpha, least=least) if _num_orders(alpha) * alpha >= 2 else None
    return _told(n, False, mean, limits, p_value, alpha=alpha, more=more)


def _bounded(*samples: NDArray[np.float64]) -> tuple[list[NDArray[np.float64]], bool]:
    """The samples with a number that outweighs all others in the place of an infinite one; and whether there was none.

    No sign and no label is asked for it, so that the tests stay exact.
    """
    values = np.concatenate(samples)
    is_finite = np.isfinite(values)
    if is_finite.all():
        return list(samples), True
    large = STEPS * (float(np.abs(values[is_finite]).max(initial=0.0)) or 1.0)
    return [np.where(np.isfinite(each), each, np.copysign(large, each)) for each in samples], False


def _told(
    n: int,
    is_paired: bool,
    mean: float,
    interval: tuple[float | None, float | None] | None,
    p: float,
    *,
    alpha: float,
    more: int | None,
) -> Difference:
    low, high = interval or (None, None)
    is_decided = p <= alpha and (interval is None or (low is not None and high is not None and not low <= 0 <= high))
    if interval is None and mean:
        mean = math.copysign(math.inf, mean)
    return Difference(n, is_paired, mean, low, high, p, is_decided, None if is_decided else more)


def _interval(samples: tuple[NDArray[np.float64], ...], of: Any, alpha: float) -> tuple[float | None, float | None]:
    from scipy.stats import bootstrap

    if min(map(len, samples)) < 2:
        return None, None
    if all(np.ptp(sample) <= ROUNDING * np.abs(sample).max() for sample in samples):
        value = float(of(*samples, axis=-1))
        return value, value
    for method in ("BCa", "percentile"):  # where BCa has no answer: of values that are nearly all alike
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = bootstrap(
                samples, of, method=method, confidence_level=1 - alpha, n_resamples=DRAWS, rng=np.random.default_rng(0)
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return float(found.low), float(found.high)
    return None, None


def _sign_flip(differences: NDArray[np.float64]) -> float:
    """How often a mean as far from 0 comes of all 2**n signs: each counted, of many pairs by the sums that flipped ones can have.

    Of drawn signs p is 2 / DRAWS at the least, at which nothing is decided among some twenty configurations. The test is
    exact for the rounded sizes, too: rounding does not see the sign. The mean says no less here than Student's t, which
    grows with it where only signs change.
    """
    if len(differences) <= FEW:
        return _by_all_signs(differences)
    steps = _in_steps(np.abs(differences))
    room = int(steps.sum() - abs(np.dot(np.sign(differences), steps))) // 2  # of the flipped, on one side
    chances = np.zeros(room + 1)  # of each sum of the flipped pairs
    chances[0] = 1
    for size in steps:
        flipped = np.zeros(room + 1)
        flipped[size:] = chances[: max(0, room + 1 - size)]
        chances = (chances + flipped) / 2
    return min(1.0, 2 * float(chances.sum()))


def _by_all_signs(differences: NDArray[np.float64]) -> float:
    ordered = differences[np.abs(differences).argsort()]
    *others, largest = ordered * np.copysign(1.0, ordered[-1])
    beside = float(np.abs(others).sum())
    size = min(largest, beside)  # beyond all others it says no more, and their digits would be lost
    sums = np.array([size])  # its sign stays: all of them turned round is the same mean
    for other in others:
        sums = np.concatenate([sums + other, sums - other])
    return float(np.mean(np.abs(sums) >= abs(size + sum(others)) - TIED * (size + beside)))


def _in_steps(sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    multiples = sizes / sizes[sizes > 0].min()
    whole: NDArray[np.float64] = np.rint(multiples)
    if not (whole.sum() <= STEPS and np.allclose(multiples, whole, rtol=ROUNDING, atol=0)):
        rounded = np.rint(sizes * (STEPS / sizes.sum()))
        whole = np.maximum(rounded, sizes > 0)  # none is lost beside a run that diverged
    return whole.astype(np.int64)


def _permutation(a: NDArray[np.float64], b: NDArray[np.float64], alpha: float) -> float:
    from scipy.stats import permutation_test

    draw, num = np.random.default_rng(0), _num_orders(alpha)
    found = permutation_test((a, b), _mean_difference, vectorized=True, n_resamples=num, batch=DRAWS, rng=draw)
    return float(found.pvalue)


def _num_orders(alpha: float) -> int:
    return min(max(DRAWS, math.ceil(20 / alpha)), MOST_DRAWS)


def _more(mean: float, deviation: float, n: int, alpha: float, *, least: int) -> int | None:
    if math.isnan(deviation):
        return max(1, least - n)
    if not mean:
        return None
    normal = statistics.NormalDist()
    sure = normal.inv_cdf(1 - alpha / 2)
    needed = ((sure + normal.inv_cdf(POWER)) * deviation / mean) ** 2 + sure**2 / 2
    if not needed <= TOO_MANY:  # nor where it is no number: of values that no float holds the squares of
        return None
    return max(1, max(least, math.ceil(needed)) - n)


def _mean(sample: NDArray[np.float64], axis: int = -1) -> Any:
    return np.mean(sample, axis=axis)


def _mean_difference(a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1) -> Any:
    return np.mean(a, axis=axis) - np.mean(b, axis=axis)
