"""The metric that ranks epochs: a name that no metric has is an error before the training."""

import pytest
from omegaconf import OmegaConf

from runner.experiment.build import best_of
from runner.experiment.check import metric_problems


def config(metric, target="Classification", **task):
    stopping = {"metric": metric, "mode": None, "patience": None}
    return OmegaConf.create(
        {"train": {"early_stopping": stopping}, "task": {"_target_": f"runner.tasks.{target}", **task}}
    )


@pytest.mark.parametrize(
    ("metric", "task", "write"),
    [
        (None, {}, None),
        ("val/loss", {}, None),
        ("val/f1", {"metrics": ["f1"]}, None),
        ("val/f1_cat", {"metrics": {"f1": {}}}, None),
        ("val/rmse", {"target": "Regression"}, None),
        ("val/mse", {"target": "Regression", "loss": "mae"}, None),
        ("val/perplexity", {"target": "Language"}, None),
        ("val/anything", {"target": "Own"}, None),
        ("val/acuracy", {}, "train.early_stopping.metric=val/accuracy"),
        ("accuracy", {}, "train.early_stopping.metric=val/accuracy"),
        ("train/accuracy", {}, "train.early_stopping.metric=val/accuracy"),
        ("train/anything", {"target": "Own"}, "train.early_stopping.metric=val/loss"),
        ("val/f1", {}, "use `'task.metrics=[f1]'`,"),
        ("val/accuracy", {"target": "Regression"}, "train.early_stopping.metric=val/loss"),
        ("val/mse", {"target": "Regression", "loss": "mse"}, "train.early_stopping.metric=val/rmse"),
    ],
)
def test_a_name_that_no_epoch_would_have(metric, task, write):
    found = metric_problems(config(metric, **task))
    assert len(found) == (write is not None)
    assert not found or (write in found[0].help and found[0].source == f"train.early_stopping.metric={metric}")


def test_best_of_follows_mode_or_name():
    assert (best_of(config(None)).metric, best_of(config(None)).mode) == ("val/loss", "min")
    cfg = config("val/accuracy")
    assert best_of(cfg).mode == "max"
    cfg.train.early_stopping.mode = "min"
    assert best_of(cfg).mode == "min"


@pytest.mark.parametrize("metric", ["val", "val/"])
def test_best_metric_needs_more_than_split(metric):
    (problem,) = metric_problems(config(metric, "Own"))
    assert "val/..." in problem.message
