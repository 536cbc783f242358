"""Build the sweeper and the launcher that hydra/sweeper and hydra/launcher name, and refuse Hydra's others.

The runner's are built as other nodes, since Hydra finds plugins only in the package hydra_plugins (hydra#3015).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.errors import Problem

if TYPE_CHECKING:
    from runner.sweep.scheduler import Launcher

SLURM = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
#: launchers of other packages: NAME = "module:Class"
ENTRY_POINTS = "runner.launchers"
LAUNCHERS = ("runner.sweep.Slots", "runner.sweep.RayCluster", SLURM)
SWEEPERS = ("runner.sweep.Grid", "runner.sweep.Search")


def open_sweeper(config: DictConfig) -> Any:
    """Return the sweeper of a configuration that part_problems() has passed."""
    return instantiate(config.hydra.sweeper)


@contextmanager
def open_launcher(context: Any, config: DictConfig) -> Iterator[Launcher]:
    """Open the launcher that hydra/launcher names, and close it at the end. Raises: RunnerError if its package is missing."""
    launcher: Any
    if config.hydra.launcher._target_ == SLURM:
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
    """Return an error for a launcher or a sweeper that does not work with a sweep's ledger and checks."""
    others = [each.value.replace(":", ".") for each in entry_points(group=ENTRY_POINTS)]
    runs = "a sweep's jobs run in the slots of this machine, on Ray, or in Slurm's queue"
    problems = [
        _problem(hydra, "launcher", (*LAUNCHERS, *others), runs, ("slots", "ray", "slurm")),
        _problem(hydra, "sweeper", SWEEPERS, "a sweep is a grid, or a search by Optuna", ("grid", "optuna")),
    ]
    return [problem for problem in problems if problem is not None]


def _problem(
    hydra: DictConfig, part: str, known: Collection[str], problem: str, options: Collection[str]
) -> Problem | None:
    target = str(OmegaConf.select(hydra, f"{part}._target_"))
    if target in known:
        return None
    choice = OmegaConf.select(hydra, f"runtime.choices.hydra/{part}")
    source = f"hydra/{part}={choice}" if choice else f"hydra.{part}._target_={target}"
    return Problem.suggest(source, problem, [f"hydra/{part}={name}" for name in options])
