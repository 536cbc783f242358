"""Makes our launchers and sweepers known to Hydra, and refuses others. Their settings stand in conf/hydra/.

Called by cli/train.py and cli/check_first.py before a sweep.
"""

from __future__ import annotations

from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from runner import sweep
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


def register() -> None:
    """Makes the classes plugins. Hydra 1.3 takes them from the package hydra_plugins alone; 1.4 dropped that (hydra#3015)."""
    in_its_package = getattr(Plugins, "is_in_toplevel_plugins_module", None)
    if in_its_package is not None and not in_its_package("runner.sweep.Grid"):
        ours_too = staticmethod(lambda name: name.startswith("runner.sweep.") or in_its_package(name))
        Plugins.is_in_toplevel_plugins_module = ours_too  # type: ignore[assignment]
    for name in sweep.__all__:
        Plugins.instance().register(plugin := getattr(sweep, name))
        Plugins.instance().class_name_to_class[f"runner.sweep.{name}"] = plugin  # Hydra has it by its module alone


def part_problems(hydra: DictConfig) -> list[Problem]:
    """Launchers and sweepers of others: installed they may be, but the runner does not work with them."""
    found = []
    for part, known in PARTS.items():
        target = str(OmegaConf.select(hydra, f"{part}._target_"))
        if not target.startswith(known):
            choice = OmegaConf.select(hydra, f"runtime.choices.hydra/{part}")
            asked = f"hydra/{part}={choice}" if choice else f"hydra.{part}._target_={target}"
            fix = " or ".join(f"hydra/{part}={name}" for name in WRITE[part])
            found.append(Problem(asked, SO[part], fix))
    return found
