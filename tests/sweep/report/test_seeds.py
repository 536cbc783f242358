import math
import statistics

import pytest

from runner.sweep.report.ranking import Goal
from runner.sweep.report.results import Result, as_keys
from runner.sweep.report.seeds import over_seeds

GOAL = Goal("val/loss", "min")


def make(job, *overrides, state="finished", **metrics):
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    return Result(job, " ".join(overrides), overrides, as_keys(overrides), state, str(job), metrics=named)


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
        [make(0, "lr=1", val_loss=1.0), make(1, "lr=1", val_loss=1.0)],  # a search may ask for the same twice
    ],
)
def test_without_two_seeds_there_is_nothing_to_say(results):
    assert over_seeds(results, (GOAL,)) == []


def test_a_seed_alone_makes_one_group_and_what_is_not_finite_makes_no_mean():
    (group,) = over_seeds([make(0, "seed=1", val_loss=1.0), make(1, "seed=2", val_loss=math.inf)], (GOAL,))
    assert group.name == "all" and math.isnan(group.means["val/loss"].mean) and group.means["val/loss"].std is None
