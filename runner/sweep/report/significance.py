"""Compare the values of two configurations by seed and fold: the difference, its significance, and how many more seeds it takes.

An infinite value outweighs all finite ones and has no interval. Imports scipy, half a second, when it is called.
"""

from __future__ import annotations

import itertools
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SeedAndFold = tuple[int, str]  # a seed, and a fold or ""
Limits = tuple[float | None, float | None]

ALPHA = 0.05  # how often a winner may be named by chance
POWER = 0.8  # how often a difference of the size seen is found with the seeds that are advised
DRAWS, MAX_DRAWS = 9999, 100_000  # of the bootstrap and of a permutation test; of one at a lower level
STEPS = 2**16  # in the sum of all pairs' sizes, to which a sign-flip test rounds each
FEW = 16  # maximum pairs for which all signs are tried
ROUNDING, TIED = 1e-9, 1e-12  # of values that differ in the last bits; of sums
TOO_MANY = 10_000  # seeds: the difference does not matter


@dataclass(frozen=True)
class Difference:
    """The difference of two configurations."""

    n: int  # pairs of equal seeds; unpaired, the values of the smaller side
    is_paired: bool
    test: str  # that gave the p-value
    mean: float  # of A - B
    low: float | None  # of the mean, at 95 %
    high: float | None
    p_value: float  # how often chance gives as much
    is_decided: bool
    more_seeds: int | None  # about how many would decide it; None if it is decided, or no number is worth it

    def verdict(self, mode: str) -> str:
        """Return whether A is better, worse or undecided, where less (min) or more (max) is better."""
        if not self.is_decided:
            return "undecided"
        return "better" if (self.mean < 0) == (mode == "min") else "worse"


def independent(values: Mapping[SeedAndFold, float], *, by_seed: bool) -> dict[Any, float]:
    """Return the values by seed, each the mean over its folds, which share initial weights and most rows. Otherwise by fold."""
    if not by_seed:
        return {fold: value for (_, fold), value in values.items()}
    seeds = dict.fromkeys(seed for seed, _ in values)
    return {seed: statistics.fmean(value for (own, _), value in values.items() if own == seed) for seed in seeds}


def difference(
    a: Mapping[Any, float], b: Mapping[Any, float], *, num_comparisons: int = 1, are_folds: bool = False
) -> Difference | None:
    """Compare values by seed, or by the fold of one seed; None if a side is empty.

    Shared seeds are paired, which removes their effect on both sides (arXiv 2103.03098). It is decided if an exact sign-flip
    test (unpaired: a permutation test) and the BCa bootstrap's interval (Efron 1987) agree at 95 %. Fewer seeds than these
    tests can decide are compared by a paired or Welch's t-test, which assumes values that are roughly normal.

    Args:
        num_comparisons: The level is divided by this number (Bonferroni).
        are_folds: Folds of one seed share most training rows, for which a t-test finds differences too often.
    """
    shared = sorted(a.keys() & b.keys())
    if not (a and b):
        return None
    sides = tuple(tuple(side[seed] for seed in shared or side) for side in (a, b))
    resolution = None if are_folds else _smallest_gap(sides[0] + sides[1])
    if shared:
        sides = (tuple(0.0 if of_a == of_b else of_a - of_b for of_a, of_b in zip(*sides, strict=True)),)
    return _difference(sides, ALPHA / num_comparisons, resolution)


def _smallest_gap(values: Sequence[float]) -> float:
    ordered = sorted(filter(math.isfinite, values))
    return min((after - before for before, after in itertools.pairwise(ordered) if after > before), default=0.0)


@lru_cache(1000)
def interval(values: tuple[float, ...]) -> Limits:
    """Return the mean's interval at 95 % by the BCa bootstrap; None for fewer than two values."""
    return _interval((np.array(values),), ALPHA)


@lru_cache(1000)  # a sweep's report is written twice, and 16 pairs take 50 ms
def _difference(values: tuple[tuple[float, ...], ...], alpha: float, resolution: float | None) -> Difference:
    is_paired = len(values) == 1  # the differences of pairs, else the two sides
    samples, is_bounded = _bounded(*map(np.array, values))
    n, mean = min(map(len, samples)), float(_mean(*samples))
    least = _least(alpha, is_paired=is_paired)
    takes_t = resolution is not None and is_bounded and n < least
    by_t, by_orders = ("a paired t-test", "a sign-flip test") if is_paired else ("Welch's t-test", "a permutation test")
    p_value, low, high = 1.0, None, None
    if takes_t and n > 1:
        p_value, low, high = _t_test(samples, alpha, resolution or 0.0)
    elif not takes_t:
        low, high = _interval(samples, alpha) if is_bounded else (None, None)
        if n > 1 and mean:
            p_value = _sign_flip(*samples) if is_paired else _permutation(samples, alpha)
    is_apart = low is not None and high is not None and not low <= 0 <= high
    is_decided = p_value <= alpha and (not is_bounded or is_apart)
    deviation = math.hypot(*(float(sample.std(ddof=1)) for sample in samples)) if n > 1 else math.nan
    is_worth_it = not is_decided and (is_paired or _num_orders(alpha) * alpha >= 2)
    more = _more(mean, deviation, n, alpha, least=3 if takes_t else least) if is_worth_it else None
    if not is_bounded and mean:
        mean = math.copysign(math.inf, mean)
    return Difference(n, is_paired, by_t if takes_t else by_orders, mean, low, high, p_value, is_decided, more)


def _t_test(samples: Sequence[NDArray[np.float64]], alpha: float, resolution: float) -> tuple[float, float, float]:
    """Return p and the interval by a paired t-test (one sample) or Welch's.

    Few values can be equal by chance, e.g., accuracies over the same few rows: each variance counts as at least that of the
    smallest gap between two values.
    """
    from scipy.stats import t

    sizes = np.array([len(sample) for sample in samples])
    errors = np.array([sample.var(ddof=1) + resolution**2 for sample in samples]) / sizes
    mean, error = float(_mean(*samples)), math.sqrt(errors.sum())
    if not error or not math.isfinite(error):
        return (1.0, mean, mean) if not error else (1.0, -math.inf, math.inf)
    freedom = errors.sum() ** 2 / (errors**2 / (sizes - 1)).sum()  # Welch 1947; n - 1 for one sample
    half = float(t.ppf(1 - alpha / 2, freedom)) * error
    return float(2 * t.sf(abs(mean) / error, freedom)), mean - half, mean + half


def _least(alpha: float, *, is_paired: bool) -> int:
    if is_paired:  # all signs of n pairs are equal by chance in 2 of 2**n
        return math.ceil(1 - math.log2(alpha))
    # one side is all above the other by chance in 2 orders of (2n over n)
    return next(size for size in itertools.count(2) if 2 / math.comb(2 * size, size) <= alpha)


def _bounded(*samples: NDArray[np.float64]) -> tuple[list[NDArray[np.float64]], bool]:
    """Replace infinite values by ones that outweigh all others, whatever their signs: the tests stay exact."""
    values = np.concatenate(samples)
    is_finite = np.isfinite(values)
    if is_finite.all():
        return list(samples), True
    large = STEPS * (float(np.abs(values[is_finite]).max(initial=0.0)) or 1.0)
    return [np.where(np.isfinite(each), each, np.copysign(large, each)) for each in samples], False


def _interval(samples: Sequence[NDArray[np.float64]], alpha: float) -> Limits:
    from scipy.stats import bootstrap

    if min(map(len, samples)) < 2:
        return None, None
    if all(np.ptp(sample) <= ROUNDING * np.abs(sample).max() for sample in samples):
        value = float(_mean(*samples))
        return value, value
    for method in ("BCa", "percentile"):  # BCa has no answer for values that are nearly equal
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            settings: dict[str, Any] = {
                "confidence_level": 1 - alpha,
                "n_resamples": DRAWS,
                "rng": np.random.default_rng(0),
            }
            limits = bootstrap(samples, _mean, method=method, **settings).confidence_interval
        if math.isfinite(limits.low) and math.isfinite(limits.high):
            return float(limits.low), float(limits.high)
    return None, None


def _sign_flip(differences: NDArray[np.float64]) -> float:
    """Return how often random signs give a mean as far from 0: by all of them, of many pairs by the sums they can have.

    Drawn signs would not do: p is then 2 / DRAWS at least, which decides nothing among twenty configurations. The test is
    exact for the rounded sizes, too.
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
    others_sum = float(np.abs(others).sum())
    size = min(largest, others_sum)  # a larger one changes nothing, and the digits of the others would be lost
    sums = np.array([size])  # its sign stays: all signs reversed give the same mean
    for other in others:
        sums = np.concatenate([sums + other, sums - other])
    return float(np.mean(np.abs(sums) >= abs(size + sum(others)) - TIED * (size + others_sum)))


def _in_steps(sizes: NDArray[np.float64]) -> NDArray[np.int64]:
    multiples = sizes / sizes[sizes > 0].min()
    whole: NDArray[np.float64] = np.rint(multiples)
    if not (whole.sum() <= STEPS and np.allclose(multiples, whole, rtol=ROUNDING, atol=0)):
        rounded = np.rint(sizes * (STEPS / sizes.sum()))
        whole = np.maximum(rounded, sizes > 0)  # also next to a run that diverged
    return whole.astype(np.int64)


def _permutation(samples: Sequence[NDArray[np.float64]], alpha: float) -> float:
    from scipy.stats import permutation_test

    settings = {"vectorized": True, "n_resamples": _num_orders(alpha), "batch": DRAWS, "rng": np.random.default_rng(0)}
    return float(permutation_test(samples, _mean, **settings).pvalue)


def _num_orders(alpha: float) -> int:
    return min(max(DRAWS, math.ceil(20 / alpha)), MAX_DRAWS)


def _more(mean: float, deviation: float, n: int, alpha: float, *, least: int) -> int | None:
    if math.isnan(deviation):
        return max(1, least - n)
    if not mean:
        return None
    normal = statistics.NormalDist()
    sure = normal.inv_cdf(1 - alpha / 2)
    needed = ((sure + normal.inv_cdf(POWER)) * deviation / mean) ** 2 + sure**2 / 2
    if not needed <= TOO_MANY:  # or NaN: squares that no float holds
        return None
    return max(1, max(least, math.ceil(needed)) - n)


def _mean(sample: NDArray[np.float64], *other: NDArray[np.float64], axis: int = -1) -> Any:
    mean = np.mean(sample, axis=axis)
    return mean - np.mean(other[0], axis=axis) if other else mean
