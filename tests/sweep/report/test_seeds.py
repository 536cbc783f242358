import math
import statistics

import numpy as np
import pytest
from scipy import stats

from runner.sweep.report.comparisons import configurations, in_words, over_seeds
from runner.sweep.report.results import Goal, JobResult, as_fold, as_keys

GOAL = Goal("val/loss", "min")


def make(job, *overrides, state="finished", **metrics):
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    keys = as_keys(overrides)
    seed, fold = int(keys.get("seed", 0)), as_fold(keys.get("data.fold", ""), keys.get("data.num_folds", ""))
    return JobResult(job, " ".join(overrides), overrides, keys, state, str(job), seed, fold, metrics=named)


def test_jobs_that_differ_in_their_seed_alone_make_a_group():
    losses = {"cnn": (1.0, 2.0, 4.0), "mlp": (0.5, 0.7)}
    jobs = [(model, seed, value) for model, values in losses.items() for seed, value in enumerate(values)]
    results = [
        make(number, f"model={model}", f"seed={seed}", val_loss=value, test_loss=value + 1, train_loss=0.0)
        for number, (model, seed, value) in enumerate(jobs)
    ]
    results.append(make(9, "model=cnn", "seed=9", state="failed", val_loss=100.0))
    first, second = over_seeds(results, (GOAL,))
    assert (first.name, second.name, second.jobs) == ("model=mlp", "model=cnn", (0, 1, 2))
    mean = second.means["val/loss"]
    assert (mean.mean, mean.std, mean.n) == (pytest.approx(7 / 3), pytest.approx(statistics.stdev((1, 2, 4))), 3)
    assert list(second.means) == ["val/loss", "test/loss"] and second.means["test/loss"].mean == pytest.approx(10 / 3)


def test_a_group_of_one_has_no_deviation_and_a_value_that_is_missing_does_not_count():
    results = [
        make(0, "model=a", "seed=1", val_loss=1.0),
        make(1, "model=a", "seed=2"),
        make(2, "model=b", "seed=1", val_loss=2.0),
    ]
    first, second = over_seeds(results, (GOAL,))
    assert (first.means["val/loss"].n, first.means["val/loss"].std) == (1, None)
    assert second.jobs == (2,)


def test_where_more_is_better_the_highest_mean_is_first():
    accuracies = {"cnn": (0.9, 0.8), "linear": (0.5, 0.7), "mlp": (0.95, 0.9)}
    jobs = [(model, seed, value) for model, values in accuracies.items() for seed, value in enumerate(values)]
    results = [
        make(at, f"model={model}", f"seed={seed}", val_accuracy=one) for at, (model, seed, one) in enumerate(jobs)
    ]
    results += [make(9 + seed, "model=gru", f"seed={seed}", val_loss=1.0) for seed in (0, 1)]  # without a value: last
    found = over_seeds(results, (Goal("val/accuracy", "max"),))
    assert [group.name for group in found] == ["model=mlp", "model=cnn", "model=linear", "model=gru"]


@pytest.mark.parametrize(
    "results",
    [
        [],
        [make(0, "seed=1", val_loss=1.0)],
        [make(0, "lr=1", "seed=1"), make(1, "lr=2", "seed=2")],
        [make(0, "lr=1", val_loss=1.0), make(1, "lr=1", val_loss=1.0)],  # a search may choose the same values twice
    ],
)
def test_without_two_seeds_there_is_nothing_to_say(results):
    assert over_seeds(results, (GOAL,)) == []


def test_a_seed_alone_makes_one_group_and_what_is_not_finite_makes_no_mean():
    (group,) = over_seeds([make(0, "seed=1", val_loss=1.0), make(1, "seed=2", val_loss=math.inf)], (GOAL,))
    assert group.name == "all" and math.isnan(group.means["val/loss"].mean) and group.means["val/loss"].std is None


def bca(values):
    """Compute the interval with scipy, as a user would."""
    rng = np.random.default_rng(0)
    return stats.bootstrap((np.array(values),), np.mean, n_resamples=9999, rng=rng).confidence_interval


def test_jobs_that_differ_in_their_fold_make_a_group_with_an_interval():
    losses = {"cnn": (1.0, 2.0, 4.0, 3.5, 3.0), "mlp": (0.5, 0.7, 0.4, 0.6, 0.6)}
    jobs = [(model, fold, value) for model, values in losses.items() for fold, value in enumerate(values)]
    results = [
        make(at, f"model={model}", f"data.fold={fold}", val_loss=loss) for at, (model, fold, loss) in enumerate(jobs)
    ]
    found = over_seeds(results, (GOAL,))
    assert [(each.name, each.num_seeds, each.num_folds) for each in found] == [("model=mlp", 1, 5), ("model=cnn", 1, 5)]
    assert in_words(found) == "folds"
    for group, values in zip(found, (losses["mlp"], losses["cnn"]), strict=True):
        mean, expected = group.means["val/loss"], bca(values)
        assert (mean.mean, mean.n) == (pytest.approx(statistics.fmean(values)), 5)
        assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high))


def test_the_folds_of_a_seed_are_one_value_of_it():
    seeds = np.random.default_rng(1).normal(size=8).tolist()
    jobs = [(seed, fold, value + 0.01 * fold) for seed, value in enumerate(seeds) for fold in range(5)]
    results = [
        make(at, f"seed={seed}", f"data.fold={fold}", val_loss=loss) for at, (seed, fold, loss) in enumerate(jobs)
    ]
    (group,) = found = over_seeds(results, (GOAL,))
    assert (group.num_seeds, group.num_folds, in_words(found)) == (8, 5, "seeds and folds")
    expected, of_all = bca([value + 0.02 for value in seeds]), bca([value for _, _, value in jobs])
    mean = group.means["val/loss"]
    assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high), abs=0.01) and mean.n == 40
    assert mean.high - mean.low > 2 * (of_all.high - of_all.low)


def test_folds_of_other_numbers_and_none_are_other_configurations():
    words = ["data.fold=0/5", "data.fold=1/5", "data.fold=0/3", "data.fold=2/3", "data.fold=null", "data.fold=4"]
    results = [make(at, word, "seed=0", val_loss=1.0) for at, word in enumerate(words)]
    found = {name: [each.job for each in group] for name, group in configurations(results).items()}
    assert found == {"data.fold=K/5": [0, 1], "data.fold=K/3": [2, 3], "data.fold=null": [4], "data.fold=K": [5]}


@pytest.mark.parametrize("words", [(), ("data.fold=2",)])
def test_without_several_folds_there_is_no_interval(words):
    found = over_seeds([make(seed, f"seed={seed}", *words, val_loss=float(seed)) for seed in range(4)], (GOAL,))
    assert (found[0].means["val/loss"].low, in_words(found)) == (None, "seeds")
