"""Build the sweeper that hydra/sweeper names, and refuse Hydra's other launchers and sweepers. Their settings are in conf/hydra/.

The runner's are built as other nodes, since Hydra finds plugins only in the package hydra_plugins (hydra#3015).
"""

from __future__ import annotations

from typing import Any

from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.errors import Problem

#: classes that work with a sweep's ledger and checks
PARTS = {
    "launcher": ("runner.sweep.Slots", "runner.sweep.RayCluster", "hydra_plugins.hydra_submitit_launcher."),
    "sweeper": ("runner.sweep.Grid", "runner.sweep.Search"),
}
SO = {
    "launcher": "a sweep's jobs run in the slots of this machine, on Ray, or in Slurm's queue",
    "sweeper": "a sweep is a grid, or a search by Optuna",
}
WRITE = {"launcher": ("slots", "ray", "slurm"), "sweeper": ("grid", "optuna")}


def open_sweeper(config: DictConfig, context: HydraContext, task: TaskFunction) -> Any:
    """Return the sweeper of a configuration that part_problems() has passed."""
    sweeper = instantiate(config.hydra.sweeper)
    sweeper.setup(hydra_context=context, task_function=task, config=config)
    return sweeper


def part_problems(hydra: DictConfig) -> list[Problem]:
    """Return an error for each launcher or sweeper that the runner does not support."""
    found = []
    for part, known in PARTS.items():
        target = str(OmegaConf.select(hydra, f"{part}._target_"))
        if not target.startswith(known):
            choice = OmegaConf.select(hydra, f"runtime.choices.hydra/{part}")
            asked = f"hydra/{part}={choice}" if choice else f"hydra.{part}._target_={target}"
            ways = [f"hydra/{part}={name}" for name in WRITE[part]]
            found.append(Problem.suggest(asked, SO[part], ways))
    return found
