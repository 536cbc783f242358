"""Hydra's sweeper for grids (hydra/sweeper=grid): run every combination of the values in the overrides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runner.experiment.summary import Summary
from runner.sweep import until
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import PreparedJob, combinations, grid_params, zips_of
from runner.sweep.scheduler import JobSource
from runner.sweep.sweep import Plan, SweepContext, run_sweep


class Grid(Sweeper):
    """Runs all combinations, in the order of the overrides."""

    def __init__(self, **settings: Any) -> None:
        """settings: Not used here: they are read from the composed configuration."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context, self._config = hydra_context, config

    def sweep(self, arguments: list[str]) -> Any:
        params = grid_params(self._config)
        zipped = zips_of(self._config)
        wanted = combinations(arguments, self._context.config_loader, params=params, zipped=zipped)
        source: Callable[[SweepContext], JobSource] = lambda context: Listed(context.prepared)  # noqa: E731
        if self._config.sweep.until is not None:
            until.check(wanted, self._config.sweep)
            source = lambda context: until.until_decided(context, wanted)  # noqa: E731
        plan = Plan(tuple(arguments), wanted, source, adds_seeds=self._config.sweep.until is not None)
        return run_sweep(plan, self._context, self._config)


class Listed:
    """A source whose jobs are all known before the first one starts."""

    def __init__(self, prepared: Sequence[PreparedJob]) -> None:
        self._left = deque(prepared)

    def next(self, num_waiting: int) -> PreparedJob | None:
        return self._left.popleft() if self._left else None

    def ended(self, job: Job, summary: Summary) -> None:
        pass
