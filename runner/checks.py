"""A composed configuration goes in; nothing comes out, or everything that is wrong with it, before a folder is made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from runner import claim
from runner.compose import name_data
from runner.errors import RunnerError, report
from runner.loading import loading
from runner.trust import RERUN


def check(cfg: DictConfig) -> None:
    """Raises a RunnerError with everything that is wrong with a composed configuration."""
    with loading():
        from runner import parts  # torch
    from runner.device import probe

    parts.check(cfg, probe())


class CheckFirst(Callback):
    """Checks a run, and takes its folder, before Hydra writes there: a mistake leaves nothing behind."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            check(config)
            name_data(config, config.hydra)
            claim.begin(Path(config.hydra.run.dir), config, anew=config.hydra.job.config_name == RERUN)
        except claim.OverError as over:
            print(claim.over_line(over))
            sys.exit(0)
        except RunnerError as error:
            sys.exit(report(error))  # Hydra turns a callback's other exceptions into warnings

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """What asks for a sweep may be a file, with hydra.mode."""
        from runner.sweep import plugins

        plugins.register()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """A sweep's exit code: 1 when a job of it failed, or is not at its end. Hydra hands a sweeper's answer to nobody."""
        from runner import ledger

        folder = Path(config.hydra.sweep.dir)
        if (folder / ledger.FILE).is_file() and any(
            job.state not in ("finished", "pruned", "skipped") for job in ledger.read(folder).jobs.values()
        ):
            sys.exit(1)
