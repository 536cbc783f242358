"""Build the sweeper and the launcher that hydra/sweeper and hydra/launcher name, and refuse Hydra's others.

The runner's are built as other nodes, since Hydra finds plugins only in the package hydra_plugins (hydra#3015).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.errors import Problem

if TYPE_CHECKING:
    from runner.sweep.scheduler import Launcher

SUBMITIT = "hydra_plugins.hydra_submitit_launcher."
#: the classes that work with a sweep's ledger and checks, why no others do, and the options
PARTS = {
    "launcher": (
        ("runner.sweep.Slots", "runner.sweep.RayCluster", SUBMITIT),
        "a sweep's jobs run in the slots of this machine, on Ray, or in Slurm's queue",
        ("slots", "ray", "slurm"),
    ),
    "sweeper": (
        ("runner.sweep.Grid", "runner.sweep.Search"),
        "a sweep is a grid, or a search by Optuna",
        ("grid", "optuna"),
    ),
}


def open_sweeper(config: DictConfig) -> Any:
    """Return the sweeper of a configuration that part_problems() has passed."""
    return instantiate(config.hydra.sweeper)


@contextmanager
def open_launcher(context: Any, config: DictConfig) -> Iterator[Launcher]:
    """Open the launcher that hydra/launcher names, and close it at the end. Raises: RunnerError if its package is missing."""
    launcher: Any
    if str(config.hydra.launcher._target_).startswith(SUBMITIT):
        from runner.sweep.launchers.slurm import Queue

        launcher = Queue(context, config)
    else:
        launcher = instantiate(config.hydra.launcher)
        launcher.setup(context, config)
    try:
        yield launcher
    finally:
        launcher.close()


def part_problems(hydra: DictConfig) -> list[Problem]:
    """Return an error for each launcher or sweeper that the runner does not support."""
    problems = []
    for part, (known, problem, options) in PARTS.items():
        target = str(OmegaConf.select(hydra, f"{part}._target_"))
        if not target.startswith(known):
            choice = OmegaConf.select(hydra, f"runtime.choices.hydra/{part}")
            source = f"hydra/{part}={choice}" if choice else f"hydra.{part}._target_={target}"
            ways = [f"hydra/{part}={name}" for name in options]
            problems.append(Problem.suggest(source, problem, ways))
    return problems
