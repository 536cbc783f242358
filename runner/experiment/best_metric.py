"""Finds the metric that epochs are judged by, for build.py; says what is wrong with its name before any work, for check.py."""

from __future__ import annotations

from collections.abc import Iterable

from omegaconf import DictConfig, OmegaConf

from runner.config import validate
from runner.errors import Problem, nearest
from runner.tasks.metric_names import is_of_a_class, is_rising, metrics_of
from runner.tasks.torchmetrics import SHORT
from runner.training.progress import KEY, Best, missing_metric, what_to_write


def best_of(cfg: DictConfig) -> Best:
    """By what the weights of an epoch are kept, the training ends early, and a schedule may fall."""
    stopping = cfg.train.early_stopping
    metric = stopping.metric or "val/loss"
    return Best(metric, stopping.mode or ("max" if is_rising(metric) else "min"))


def metric_problems(cfg: DictConfig) -> list[Problem]:
    """A name that no epoch would have, as far as the task tells its names before it is built: ours do."""
    metric, task = validate.value(cfg, KEY), validate.value(cfg, "task")
    if not isinstance(metric, str) or not OmegaConf.is_dict(task):
        return []
    split, _, leaf = metric.partition("/")
    measured = metrics_of(task)
    if split != "val" or not leaf:
        problem = "an epoch is judged by what the validation split is measured by, val/..."
        hits = [f"val/{word}" for word in (metric, leaf) if word in (measured or ())]
        return [
            Problem(
                f"{KEY}={metric}", problem, what_to_write([*hits, *nearest(metric, _of_val(measured or ("loss",)))])
            )
        ]
    if measured is None or leaf in measured or is_of_a_class(leaf, task) or validate.value(cfg, "train.hooks"):
        return []  # a hook's names come with its first call
    error = missing_metric(metric, _of_val(measured))
    asks = f"task.metrics=[{leaf}] beside it, or " if any(leaf in names for names in SHORT.values()) else ""
    return [Problem(error.source, error.message, asks + error.help)]


def _of_val(names: Iterable[str]) -> list[str]:
    return [f"val/{name}" for name in names]
