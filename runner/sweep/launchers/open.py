"""Opens the launcher that hydra/launcher names, and closes it: one of ours, or submitit's as slurm.py makes it. For sweep.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.plugins import Plugins
from hydra.utils import instantiate
from omegaconf import DictConfig

from runner.sweep.jobs.run_job import task
from runner.sweep.launchers import slurm
from runner.sweep.launchers.local import Slots


@contextmanager
def open_launcher(context: Any, config: DictConfig, *, imports: tuple[str, ...] = ()) -> Iterator[Any]:
    """The launcher that hydra/launcher names: one of ours, or submitit's in our hands.

    imports: modules that all jobs share, for launchers whose processes are warm.
    """
    slurm.check_there(config)
    launcher: Any
    if str(config.hydra.launcher._target_).startswith(slurm.PLUGIN):
        theirs = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        launcher = slurm.Scheduled(theirs, config)
    else:
        launcher = instantiate(config.hydra.launcher)
        launcher.setup(hydra_context=context, task_function=task, config=config)
    if isinstance(launcher, Slots):
        launcher.preload += imports
    try:
        yield launcher
    finally:
        launcher.close()
