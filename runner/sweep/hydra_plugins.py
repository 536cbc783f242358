"""Opens the sweeper that hydra/sweeper names, and refuses launchers and sweepers of others. Their settings are in conf/hydra/.

Ours are objects like any other in the configuration: Hydra opens plugins in the package hydra_plugins only (hydra#3015).
"""

from __future__ import annotations

from typing import Any

from hydra.types import HydraContext, TaskFunction
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.errors import Problem

#: what a sweep's ledger, checks and ends are made for; another plugin of Hydra's has none of them
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
    """Launchers and sweepers of others: installed they may be, but the runner does not work with them."""
    found = []
    for part, known in PARTS.items():
        target = str(OmegaConf.select(hydra, f"{part}._target_"))
        if not target.startswith(known):
            choice = OmegaConf.select(hydra, f"runtime.choices.hydra/{part}")
            asked = f"hydra/{part}={choice}" if choice else f"hydra.{part}._target_={target}"
            ways = [f"hydra/{part}={name}" for name in WRITE[part]]
            found.append(Problem.suggest(asked, SO[part], ways))
    return found
