"""`runner.run` for notebooks and scripts: one run, and its result with a plot."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from runner.cli.answer import is_later_rank
from runner.cli.arguments import parse
from runner.cli.table import COMMANDS, ONE_RUN
from runner.cli.train import check, folder_of, refuse_check, started
from runner.config import override_errors
from runner.config.compose import composer
from runner.config.importing import loading, logging_to, make_own_code_importable, restored
from runner.config.instantiate import ALLOW_VARIABLE
from runner.config.trust import RERUN
from runner.errors import SECRETS, RunnerError, path_problems, refuse
from runner.experiment.directory import OverError
from runner.experiment.summary import Summary

if TYPE_CHECKING:
    import pandas


class RunResult(dict[str, Any]):
    """The contents of summary.json, and `folder`. As the last line of a cell it shows the plot of the loss."""

    def __init__(self, summary: Mapping[str, Any], folder: Path) -> None:
        super().__init__(summary, folder=str(folder))
        self.folder = folder

    @property
    def history(self) -> pandas.DataFrame:
        """Every point of the journal: a row per step, a column per metric, NaN if a metric has no value at a step.

        A learning rate has a value only at the steps where it changes, so `history["train/lr"].ffill()` fills in the others.
        """
        from runner.runs.history import table  # numpy: not on the way to --help
        from runner.tracking.journal_reader import read_series

        return table(read_series(self.folder))

    def _repr_png_(self) -> bytes | None:
        plot = self.folder / "plots" / "loss.png"
        return plot.read_bytes() if plot.is_file() else None


def run(overrides: str | Sequence[str], *, config_name: str, folder: Path | None) -> RunResult:
    """Train one run; see `runner.run`."""
    _refuse_data_worker()
    make_own_code_importable()
    words = shlex.split(overrides) if isinstance(overrides, str) else overrides
    with restored(ALLOW_VARIABLE), restored(SECRETS):
        arguments = parse(replace(COMMANDS["train"], name="run()", hydra_flags=ONE_RUN, composes=False), words)
        result = _run(["-cn", config_name, *arguments.flags], arguments.overrides, folder)
    if result["exit_code"] == 130:
        raise KeyboardInterrupt  # the run has saved its state; the cells below are not to run
    return result


def _run(flags: list[str], overrides: list[str], folder: Path | None) -> RunResult:
    compose = composer(flags)
    with override_errors.explained(overrides, compose=compose, check=check):
        cfg = compose(overrides)
    if cfg.hydra.mode == RunMode.MULTIRUN:
        raise RunnerError.suggest("hydra.mode=MULTIRUN", "run() is one run", ["hydra.mode=RUN"], code="conflict")
    refuse_check(cfg, "run()")
    is_repeated = cfg.hydra.job.config_name == RERUN
    with loading():
        from runner.experiment.run import run as run_experiment

    if folder is not None:
        refuse(path_problems("folder", str(folder), is_written=True))
    folder = (folder or folder_of(cfg, "hydra.run.dir")).absolute()  # its result may be read after a chdir
    HydraConfig.instance().set_config(cfg)
    if is_later_rank():  # the first of several processes holds the directory
        del cfg.hydra
        return RunResult(vars(run_experiment(cfg, folder)), folder)
    try:
        with started(cfg, folder, publishes=False) as context, logging_to(folder):
            del cfg.hydra
            return RunResult(vars(run_experiment(cfg, folder, context=context)), folder)
    except OverError as over:
        if is_repeated:
            raise
        print(over)
        return RunResult(vars(Summary.read(folder)), folder)


def _refuse_data_worker() -> None:
    """Raises: RunnerError in a data worker, which loads the script that calls run() where processes are not forked."""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            problem = "the processes that read its data load the script themselves, and each would begin a run"
            fix = "write `if __name__ == '__main__':` before it, or use `data.num_workers=0`"
            raise RunnerError.of("run() in a script", problem, fix, code="conflict")
