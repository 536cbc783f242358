"""The objectives of a search: names, directions, and each job's values."""

import pytest
import torch
from omegaconf import OmegaConf

from runner.experiment.summary import Summary
from runner.sweep.search.job_source import values_of
from runner.sweep.search.sweeper import goal_problems, kept_by, read_goals
from runner.tasks.metric_names import REPORTED

LOSS = ({"metric": "val/loss", "direction": "minimize"},)
ACCURACY = ({"metric": "val/accuracy", "direction": "maximize"},)
#: best, the last values, the goals, and the job's values
SUMMARIES = [
    (("val/loss", 0.2), {"val/loss": 0.5}, LOSS, [0.2]),
    (("val/accuracy", 0.9), {"val/loss": 0.5}, LOSS, [0.5]),
    (("val/loss", None), {"val/loss": 0.5}, LOSS, [0.5]),
    (None, {"val/loss": 0.5}, LOSS, [0.5]),
    (("val/loss", 0.2), {"val/loss": 0.5, "val/accuracy": 0.8}, LOSS + ACCURACY, [0.2, 0.8]),
    (None, {"val/loss": 0, "train/loss": 0}, ACCURACY, "it has no metric val/accuracy; it has train/loss, val/loss"),
    (None, {}, LOSS, "it has no metric val/loss; it has none"),
    (("val/loss", None), {"val/loss": float("nan")}, LOSS, "its val/loss is nan"),
]


@pytest.mark.parametrize(("best", "metrics", "goals", "expected"), SUMMARIES)
def test_values_of_takes_best_epoch_first(best, metrics, goals, expected):
    summary = Summary(metrics=metrics, best={"metric": best[0], "value": best[1]} if best else {})
    values, reason = values_of(summary, goals)
    assert (reason if values is None else values) == expected


@pytest.mark.parametrize(
    ("metric", "direction", "expected"),
    [
        *((f"val/{name}", None, ["minimize"]) for name in ("loss", "f1_loss", "rmse", "calibration_error")),
        *((f"val/{name}", None, ["maximize"]) for name in ("accuracy", "AUROC", "f1_macro", "average_precision")),
        ("val/accuracy", "minimize", ["minimize"]),
        (["val/loss", "val/accuracy"], None, ["minimize", "maximize"]),
        (["val/mae", "speed/samples_per_second"], ["maximize", "minimize"], ["maximize", "minimize"]),
        (["val/mae", "speed/samples_per_second"], None, ["minimize", "maximize"]),
    ],
)
def test_directions_follow_from_the_names(metric, direction, expected):
    goals, problems = read_goals(metric, direction)
    assert [goal["direction"] for goal in goals] == expected and not problems


def test_as_many_directions_as_metrics(messages):
    for metric, direction in ((["val/loss", "val/accuracy"], "minimize"), ("val/loss", ["minimize", "maximize"])):
        _, (problem,) = read_goals(metric, direction)
        messages(problem)


REGRESSION = {"_target_": "runner.tasks.Regression"}


def config(**changes):
    made = {
        "task": {"_target_": "runner.tasks.Classification"},
        "data": {"_target_": "runner.data.digits", "val_fraction": 0.1, "test_fraction": 0.1},
        "train": {"early_stopping": {"metric": None, "mode": None, "patience": None}},
    }
    return OmegaConf.merge(made, OmegaConf.create(changes))


@pytest.mark.parametrize(
    ("metric", "changes", "mend"),
    [
        ("val/loss", {}, None),
        ("speed/samples_per_second", {}, None),
        ("accuracy", {}, "use `hydra.sweeper.metric=val/accuracy`, `"),
        ("val/acc", {}, "hydra.sweeper.metric=val/accuracy"),
        ("val/mae", {"task": REGRESSION}, None),
        ("train/rmse", {"task": REGRESSION}, "hydra.sweeper.metric=val/rmse"),
        ("train/mse", {"task": {**REGRESSION, "loss": "huber"}}, None),
        ("val/dice", {"task": {"_target_": "my_tasks.Segmentation"}}, None),
        ("dice", {"task": {"_target_": "my_tasks.Segmentation"}}, "hydra.sweeper.metric="),
        ("val/f1", {"task": {"metrics": ["f1", "auroc"]}}, None),
        ("val/f1_cat", {"task": {"metrics": {"f1": {"_target_": "x"}}}}, None),
        ("val/auroc", {"task": {"metrics": ["auroc"]}}, None),
        ("val/loss", {"data": {"val_fraction": 0}}, "`data.val_fraction=0.1`, or `hydra.sweeper.metric=train/loss`"),
        ("test/loss", {"data": {"test_fraction": 0}}, "data.test_fraction=0.1"),
        ("val/loss", {"data": {"val_fraction": 0, "_target_": "my_data.with_splits"}}, None),
    ],
)
def test_goal_problems_name_unknown_metrics(metric, changes, mend):
    goals, _ = read_goals(metric, None)
    found = goal_problems(goals, config(**changes), ())
    assert [mend in problem.help for problem in found] == ([] if mend is None else [True]), found


def test_goal_problems_skip_varying_tasks():
    assert not goal_problems(read_goals("val/mae", None)[0], config(), {"task"})


KEPT_BY_ACCURACY = ("train.early_stopping.metric=val/accuracy", "train.early_stopping.mode=max")


@pytest.mark.parametrize(
    ("goals", "stopping", "expected"),
    [
        (LOSS, {}, ()),
        (ACCURACY, {}, KEPT_BY_ACCURACY),
        (ACCURACY + LOSS, {}, KEPT_BY_ACCURACY),
        (ACCURACY, {"metric": "val/loss"}, ()),
        (ACCURACY, {"mode": "min"}, ()),
        (read_goals("train/loss", "minimize")[0], {}, ()),
    ],
)
def test_kept_by_follows_searched_metric(goals, stopping, expected):
    assert kept_by(goals, config(train={"early_stopping": stopping})) == expected


def test_known_metrics_match_tasks():
    from torch import nn

    from runner import tasks

    inputs = torch.zeros(2, 3)
    targets = {"Classification": torch.tensor([0, 1]), "Regression": torch.zeros(2, 3), "Autoencoding": None}
    for name, target in targets.items():
        found = getattr(tasks, name)()(nn.Linear(3, 3), (inputs, target))
        assert REPORTED[f"runner.tasks.{name}"] == tuple(found)
