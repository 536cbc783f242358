"""The better configuration, and how often the test decides for one when both are equal."""

import itertools

import numpy as np
import pytest
from scipy import stats

from runner.sweep.report import significance
from runner.sweep.report.report import Configuration, against_best, compared, words_of
from runner.sweep.report.results import Goal, JobResult
from runner.sweep.report.significance import difference


def of(*values):
    return dict(enumerate(values))


def simulated(rng, n, *, shift=0.0, shared=0.7):
    """Return the values of two configurations with a standard deviation of 1, of which the seed explains the part `shared`."""
    seeds = rng.normal(size=n) * shared**0.5
    a, b = (seeds + rng.normal(size=n) * (1 - shared) ** 0.5 for _ in range(2))
    return of(*(a + shift)), of(*b)


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr(significance, "DRAWS", 400)


def test_difference_of_equals_seldom_decides(few_draws):
    rng = np.random.default_rng(0)
    for n, num in ((6, 200), (8, 250), (12, 200)):
        wins = sum(difference(*simulated(rng, n)).is_decided for _ in range(num))
        assert wins <= limit(num), (n, wins)


def configuration(name, values):
    """Return a configuration's results. values: By seed and fold."""
    results = [
        JobResult(
            at, "", (), {}, "finished", "", seed, None if fold is None else f"{fold}/5", metrics={"val/loss": value}
        )
        for at, ((seed, fold), value) in enumerate(values.items())
    ]
    return Configuration(name, tuple(results), ())


def apart(a, b):
    return compared(configuration("a", a), configuration("b", b), Goal("val/loss", "min"), ("a", "b"))


def limit(num):
    """Return how many of N comparisons of equals may name a winner: 5 %, and two standard deviations of chance."""
    return num * 0.05 + 2 * (num * 0.05 * 0.95) ** 0.5


def test_folds_make_no_seeds(few_draws):
    """A seed has the same effect in all folds of a configuration: 8 seeds of 5 folds are 8 pairs, not 40."""
    rng, wins = np.random.default_rng(0), 0
    for _ in range(200):
        sides = [{(seed, fold): own + 0.1 * rng.normal() for seed, own in enumerate(rng.normal(size=8)) for fold in range(5)} for _ in "ab"]  # fmt: skip
        found = apart(*sides)
        assert (found.difference.n, found.difference.is_paired, found.unit) == (8, True, "seeds")
        wins += found.difference.is_decided
    assert wins <= limit(200)


def test_values_are_paired_by_seed_and_fold():
    a, b = {(0, k): 1.0 + k for k in range(4)}, {(0, k): 1.5 + k for k in range(1, 9)}
    found = apart(a, b)
    assert (found.difference.mean, found.difference.n, found.unit) == (-0.5, 3, "folds")
    assert "more folds" in words_of(apart(a, {place: value + place[1] ** 2 for place, value in a.items()}))
    seeds = {(seed, k): seed + k for seed in (1, 2) for k in range(3)}
    lacking = {place: value + 1 for place, value in seeds.items() if place != (1, 0)}
    found = apart(seeds, lacking)
    assert (found.difference.mean, found.difference.n, found.unit) == (-1, 2, "seeds")  # without what one side lacks
    assert apart({(3, None): 1.0}, {(4, None): 2.0}).difference.is_paired is False
    other = apart({(0, 0): 1.0}, {(0, 1): 2.0})
    assert (other.difference.is_paired, other.unit) == (False, "folds")


def test_difference_numbers_match_both_tests():
    a, b = of(0.9, 0.8, 0.85, 0.95, 0.7, 0.88), of(0.5, 0.45, 0.6, 0.55, 0.4, 0.5)
    found = difference(a, b)
    assert found.p_value == pytest.approx(2 / 2**6)
    assert found.mean == pytest.approx(np.mean(list(a.values())) - np.mean(list(b.values())))
    assert found.low < found.mean < found.high and found.low > 0
    assert (found.n, found.is_paired, found.more_seeds) == (6, True, None)
    assert (found.verdict("max"), found.verdict("min")) == ("better", "worse")
    back = difference(b, a)
    assert (back.mean, back.verdict("max")) == (-found.mean, "worse")


@pytest.mark.parametrize("apart", [[1e-12 * seed for seed in range(8)], [0, 0, 0, 0, 0, 0, 0, 1e-3], [0] * 8])
def test_difference_with_nearly_equal_pairs_decides(apart):
    found = difference(of(*(1.0 + np.array(apart))), of(*np.zeros(8)))
    assert found.is_decided and found.low <= found.mean <= found.high


def test_difference_pairs_shared_seeds_only():
    found = difference({3: 1.0, 1: 5.0, 9: 100.0}, {1: 4.0, 3: 0.5, 2: -100.0})
    assert (found.n, found.mean) == (2, 0.75)
    rng = np.random.default_rng(2)
    a, b = dict(enumerate(rng.normal(3.0, 1.0, 12))), dict(enumerate(rng.normal(0.0, 1.0, 15), 100))
    found = difference(a, b)
    assert (found.n, found.is_paired, found.verdict("min")) == (12, False, "worse")
    assert difference({}, b) is None


DRAWS_OF_VALUES = {
    "normal": lambda rng, n: rng.normal(size=n),
    "skewed": lambda rng, n: rng.exponential(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=n),
    "accuracy of 20 rows": lambda rng, n: rng.binomial(20, 0.9, size=n) / 20,
}


@pytest.mark.parametrize("first", [0, 100])
@pytest.mark.parametrize("kind", DRAWS_OF_VALUES)
def test_few_seeds_of_equals_seldom_differ(kind, first):
    """Paired (the same seeds) and unpaired; at most 5 %, and two standard deviations of chance."""
    draw, rng, num = DRAWS_OF_VALUES[kind], np.random.default_rng(first), 600
    for n in (2, 3, 5) if first == 0 else (2, 3):
        a, b = draw(rng, (num, n)), draw(rng, (num, n))
        found = [difference(of(*x), dict(enumerate(y, first))) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        assert "t-test" in found[0].test
        wins = sum(each.is_decided for each in found)
        assert wins <= limit(num), (n, wins)


def test_three_seeds_decide_a_plain_difference():
    cnn, mlp = (0.110, 0.143, 0.125), (0.485, 0.501, 0.493)
    found = difference(of(*cnn), of(*mlp))
    assert (found.verdict("min"), found.test, found.more_seeds) == ("better", "a paired t-test", None)
    assert found.low < np.mean(cnn) - np.mean(mlp) < found.high < 0
    expected = stats.ttest_rel(cnn, mlp)
    assert found.p_value == pytest.approx(expected.pvalue, rel=1) and found.p_value > expected.pvalue
    other = difference(of(*cnn), dict(enumerate(mlp, 100)))
    expected = stats.ttest_ind(cnn, mlp, equal_var=False)
    assert (other.verdict("min"), other.test) == ("better", "Welch's t-test")
    assert other.p_value == pytest.approx(expected.pvalue, rel=1)


def test_equal_gaps_of_few_rows_decide_nothing():
    """Each pair differs by one row of the validation split, which has no deviation, and no meaning."""
    before = np.array([0.90, 0.92, 0.91])
    assert not difference(of(*(before + 0.01)), of(*before)).is_decided
    assert difference(of(*(before + 0.20)), of(*before)).is_decided


@pytest.mark.parametrize(
    ("a", "b", "more"),
    [
        (of(1.0), of(2.0), 2),  # no deviation is known
        (of(1.0, 1.0), of(2.0, 2.0), 1),
        (of(1.0, 2.0), of(1.0, 2.0), None),  # no difference
        (of(0.0, 1.0, 0.0, 1.0), of(1.0, 0.0, 1e-3, 1.0), None),  # a thousandth of the random variation
    ],
)
def test_how_many_seeds_more(a, b, more):
    found = difference(a, b)
    assert (found.is_decided, found.more_seeds) == (False, more)


@pytest.mark.parametrize("num_comparisons", [1, 10, 300])
def test_more_folds_decide_a_plain_difference(num_comparisons):
    """The smallest number at which a sign-flip test can decide."""

    def found(n):
        sides = of(*(10 + 1e-3 * np.arange(n))), of(*(1e-3 * np.arange(n) ** 2))
        return difference(*sides, num_comparisons=num_comparisons, are_folds=True)

    n = 3 + found(3).more_seeds
    assert found(n).is_decided and not found(n - 1).is_decided


def test_num_orders_follows_the_level():
    rng = np.random.default_rng(5)
    a, b = of(*rng.normal(20.0, 1.0, 16)), dict(enumerate(rng.normal(0.0, 1.0, 16), 100))
    assert difference(a, b, num_comparisons=300).is_decided
    found = difference(a, b, num_comparisons=10**6)  # more comparisons than draws: no number of seeds is enough
    assert (found.test, found.is_decided, found.more_seeds) == ("a permutation test", False, None)


def test_more_seeds_usually_suffice(few_draws):
    """A true difference of a known size, with the number of seeds that is advised for it."""
    rng = np.random.default_rng(3)
    first = difference(of(0.0, 2.0, 0.0, 2.0, 0.0, 2.0), of(0, 0, 0, 0, 0, 0))  # mean 1, deviation 1.1
    n = first.n + (first.more_seeds or 0)
    hits = [difference(of(*rng.normal(1.0, 1.1, n)), of(*np.zeros(n))).is_decided for _ in range(100)]
    assert 0.65 < np.mean(hits) < 0.97


def test_among_many_configurations_each_must_be_surer():
    a, b = of(*np.linspace(1, 2, 6)), of(*np.zeros(6))
    assert difference(a, b, are_folds=True).is_decided
    found = difference(a, b, num_comparisons=3, are_folds=True)
    assert (found.is_decided, found.more_seeds) == (False, 1)


@pytest.mark.parametrize(("n", "shift"), [(6, 0.5), (9, 0.0), (12, 3.0)])
def test_sign_flip_equals_scipys(n, shift):
    values = np.random.default_rng(n).exponential(size=n) - 1 + shift
    values[n // 2] = 0.0
    found = difference(of(*values), of(*np.zeros(n))).p_value
    settings = {"permutation_type": "samples", "vectorized": True, "n_resamples": np.inf}
    expected = stats.permutation_test((values,), np.mean, **settings)
    assert found == pytest.approx(expected.pvalue, rel=1e-9)


def by_all_signs(differences):
    """Compute the p-value with integers."""
    sums = [np.dot(signs, differences) for signs in itertools.product((-1, 1), repeat=len(differences))]
    return np.mean(np.abs(sums) >= abs(sum(differences)))


@pytest.mark.parametrize("unit", [1.0, 1 / 360, 1e-4])
@pytest.mark.parametrize("counts", [(1, 1, -1), (1, 1, -1, 1, 1, -1, 1), (2, 1, 1, -3, 4, 1, 5), (3, 3, 3, 2, 2, -5)])
def test_sign_flip_counts_ties_twice(unit, counts):
    accuracies = 0.9 + unit * np.cumsum(counts)
    before = 0.9 + unit * np.cumsum([0, *counts[:-1]])
    assert difference(of(*accuracies), of(*before), are_folds=True).p_value == pytest.approx(
        by_all_signs(counts), rel=1e-9
    )


def test_sums_of_many_pairs_tie_too():
    counts = (1, 1, -1) * 7
    found = difference(of(*(np.array(counts) / 360)), of(*np.zeros(21))).p_value
    assert found == pytest.approx(stats.binomtest(7, 21).pvalue, rel=1e-9)


@pytest.mark.parametrize("size", [1e9, 1e15])
def test_sign_flip_with_diverged_keeps_signs(size):
    found = difference(of(size, 0.2, 0.1, 0.3, 0.1, -0.1, 0.2), of(*np.zeros(7)))
    assert found.p_value == pytest.approx(by_all_signs((100, 2, 1, 3, 1, -1, 2)))


def test_sign_flip_of_many_pairs_is_exact(few_draws):
    """With twenty configurations, each p-value must be below 1 in 3,800, for which 9,999 random signs are too few."""
    rng = np.random.default_rng(4)
    a, b = of(*rng.normal(3.0, 1.0, 40)), of(*np.zeros(40))
    assert difference(a, b).p_value == pytest.approx(2 / 2**40)
    diverged = {seed: value if seed else 1e12 for seed, value in a.items()}  # the diverged value dominates the mean
    assert difference(diverged, b).p_value == pytest.approx(2 / 2**40)


def test_winner_among_many_is_corrected():
    """Six seeds of one sign occur by chance in 2 of 64: enough for the best of three, but not for one of three pairs."""
    best, near, far = ({(seed, None): value for seed in range(6)} for value in (0.0, 1.0, 2.0))
    goal = Goal("val/loss", "min")

    def verdicts(other, **more):
        groups = {name: configuration(name, side).results for name, side in (("a", best), ("b", other), ("c", far))}
        return [each.verdict for each in against_best(groups, goal, **more)]

    assert verdicts(near) == ["better", "better"]
    assert verdicts(near, num_looks=2) == ["undecided", "undecided"]
    assert verdicts({**near, (0, None): -1.0}) == ["undecided", "undecided"]


INF = float("inf")


@pytest.mark.parametrize("other", [of(*[1.0] * 8), dict.fromkeys(range(100, 108), 1.0)])
def test_diverging_configuration_is_worse(other):
    found = difference(of(*[INF] * 8), other)
    assert found.verdict("min") == "worse" and difference(other, of(*[INF] * 8)).verdict("min") == "better"
    assert (found.mean, found.low, found.high) == (INF, None, None) and found.p_value < 0.05


@pytest.mark.parametrize(("num", "verdict"), [(0, "better"), (1, "undecided"), (5, "undecided"), (7, "worse")])
def test_diverged_value_outweighs_finite_ones(num, verdict):
    found = difference(of(*[INF] * num, *[0.5] * (16 - num)), of(*np.linspace(0.9, 1.1, 16)))
    assert found.verdict("min") == verdict
    assert found.p_value == pytest.approx(2 / 2 ** (num or 16), abs=1e-4) or num == 1


def test_equal_and_huge_values_decide_nothing():
    found = difference(of(INF, INF, *[1.0] * 8), of(INF, INF, *[2.0] * 8))
    assert found.verdict("min") == "better" and found.mean == -0.8
    assert difference(of(INF, INF), of(INF, INF)).p_value == 1.0
    with np.errstate(all="ignore"):  # squares that no float holds
        assert not difference(of(1e300, 3e300), of(1.0, 2.0)).is_decided


def results(values, **more):
    return [JobResult(seed, "", (), {}, "finished", "", seed, metrics={"val/loss": value}, **more) for seed, value in values.items()]  # fmt: skip


def test_reached_of_diverged_training_is_worst():
    safe, bold = of(*np.linspace(0.9, 1.1, 16)), of(*np.linspace(0.4, 0.6, 16))
    gone = results({seed: bold[seed] for seed in range(8)}, diverged=True) + results({s: bold[s] for s in range(8, 16)})
    for result in gone[:8]:
        result.state = "failed"
    groups = {"bold": gone, "safe": results(safe)}
    (found,) = against_best(groups, Goal("val/loss", "min"))
    assert (found.a, found.verdict, found.mean_b) == ("safe", "better", INF)
    groups["bold"][:8] = results(dict.fromkeys(range(8), float("nan")))  # finished runs without a finite value
    assert against_best(groups, Goal("val/loss", "min"))[0].a == "safe"
    assert (
        JobResult(0, "", (), {}, "finished", "", metrics={"val/accuracy": INF}).reached("val/accuracy", "max") == -INF
    )
    assert JobResult(0, "", (), {}, "finished", "").reached("val/loss", "min") is None


def test_best_is_worse_than_none():
    """The one with the better mean also has the easy seeds, and is worse for each common seed."""
    easy, hard = dict.fromkeys(range(8), 0.1), dict.fromkeys(range(8, 16), 2.0)
    groups = {"a": results(easy | hard), "b": results(dict.fromkeys(hard, 1.5))}
    (found,) = against_best(groups, Goal("val/loss", "min"))
    assert (found.a, found.b, found.verdict) == ("b", "a", "better")
