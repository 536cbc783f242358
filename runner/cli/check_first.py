"""Checks a composed configuration before a folder is made, and reports everything that is wrong with it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.cli import answer, unexpected
from runner.config import logs, validate
from runner.config.compose import name_data
from runner.config.importing import loading
from runner.config.trust import RERUN
from runner.errors import Problem, RunnerError, first_line, path_problems, refuse
from runner.experiment import claim
from runner.experiment.context import Checked
from runner.experiment.summary import read_summary
from runner.tracking.ahead import Ahead


def check(cfg: DictConfig) -> Checked:
    """The machine and the run's device. Raises: RunnerError with everything that is wrong with the configuration."""
    with loading():
        from runner.experiment.check import check_here  # torch

    return check_here(cfg)


def check_folder(folder: Path, *, key: str) -> None:
    """Raises a RunnerError where a folder can't be made, or nothing be written in it; leaves none behind.

    key: of Hydra's, that names the folder.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        problem = f"this directory can't be created or written to: {error.strerror} ({error.filename or folder})"
        fix = f"{key}=FOLDER, in a place that you may write to"
        raise RunnerError(Problem(f"{key}={folder}", problem, fix)) from None
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()


def folder_of(cfg: DictConfig, key: str) -> Path:
    """The folder that a key of Hydra's names. Raises: RunnerError for an address, and where its ${...} lead nowhere."""
    try:
        refuse(path_problems(key, folder := str(OmegaConf.select(cfg, key)), is_written=True))
        return Path(folder)
    except OmegaConfBaseException as error:
        above, _, name = key.rpartition(".")
        asked = f"{key}={validate.written(OmegaConf.select(cfg, above), name)}"
        raise RunnerError(Problem(asked, first_line(error), f"{key}=FOLDER")) from None


def check_hydra(hydra: DictConfig) -> None:
    """Raises a RunnerError for settings of Hydra's that a run can't follow."""
    if hydra.job.chdir:
        problem = "a run works in the directory that it is started from, where it finds data, stores and your code"
        fix = "hydra.job.chdir=false, and hydra.run.dir=FOLDER for its files"
        raise RunnerError(Problem("hydra.job.chdir=true", problem, fix))


def check_written(hydra: DictConfig, folder: Path) -> list[Path]:
    """What Hydra writes for a run beside its usual files, in its folder or elsewhere.

    Raises a RunnerError for what it can't write, or would write over somebody's.
    """
    found = []
    if hydra.output_subdir is not None:
        place = Path(hydra.output_subdir)
        if place.is_absolute() or ".." in place.parts:
            problem = "it leads out of the run's folder, and Hydra writes its config.yaml there"
            fix = "hydra.output_subdir=.hydra, or null for none"
            raise RunnerError(Problem(f"hydra.output_subdir={place}", problem, fix))
        check_folder(folder / place, key="hydra.output_subdir")
        found = [folder / place / Path(name).name for name in claim.HYDRAS]
    with read_write(hydra), open_dict(hydra):
        hydra.runtime.output_dir = str(folder)  # as Hydra does next
    for key, file in logs.files(hydra).items():
        try:
            is_new = not file.exists()
            with file.open("ab"):
                pass
            if is_new:
                file.unlink()
        except OSError as error:
            problem = f"this file can't be written: {error.strerror}"
            raise RunnerError(Problem(f"{key}={file}", problem, f"{key}=FILE in a folder that is there")) from None
        found.append(file)
    return found


def passing_folder(folder: Path) -> Path:
    """For a run that is only to be tried: on the disk of the one that was asked for, where no command looks for runs."""
    folder, here = folder.absolute(), Path.cwd()
    near = here if folder.is_relative_to(here) else next(path for path in folder.parents if path.is_dir())
    return Path(tempfile.mkdtemp(prefix=".runner-check-", dir=near))


def _store_of(cfg: DictConfig) -> str | None:
    """Where this process will publish, as far as that can be told of what nobody has checked; None: elsewhere, or nowhere.

    hydra.job.env_set comes later, and may say how a store is reached.
    """
    is_alone = validate.value(cfg, "train.num_processes") in ("auto", 1) and not cfg.hydra.job.env_set
    is_on = validate.value(cfg, "tracking.enabled") is True and not validate.value(cfg, "train.check")
    uri = validate.value(cfg, "tracking.uri")
    return uri if is_alone and is_on and isinstance(uri, str) else None


class CheckFirst(Callback):
    """Checks a run, and takes its folder, before Hydra writes there: a mistake leaves nothing behind."""

    folder: Path | None = None  # of the run that has begun last
    passing: Path | None = None  # the same, where it is to be taken away: of a check
    checked: Checked | None = None  # its machine and its device
    publishes = False  # whether such a run publishes by itself
    ahead: Ahead | None = None  # the process that will
    retold: Callable[[RunnerError], RunnerError] = staticmethod(lambda error: error)  # as its mistakes are told

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        try:
            check_hydra(config.hydra)
            if CheckFirst.publishes and (uri := _store_of(config)) is not None:
                CheckFirst.ahead = Ahead(uri)
            CheckFirst.checked = check(config)
            folder = claim.spelled(folder_of(config, "hydra.run.dir"))
            check_folder(folder, key="hydra.run.dir")
            name_data(config, config.hydra)
            anew = config.hydra.job.config_name == RERUN
            if config.train.check:
                claim.refuse_used(folder, config, anew=anew)
                folder = CheckFirst.passing = passing_folder(folder)
                with read_write(config.hydra):
                    config.hydra.run.dir = str(folder)
            CheckFirst.folder = folder.absolute()
            claim.begin(folder, config, anew=anew)
            try:
                claim.expect(folder, check_written(config.hydra, CheckFirst.folder))
            except RunnerError:
                claim.leave_nothing(folder)
                raise
        except claim.OverError as over:
            print(claim.over_line(over))
            answer.give({"folder": str(folder), **read_summary(folder)})
            sys.exit(0)
        except RunnerError as error:
            sys.exit(answer.report(CheckFirst.retold(error)))
        except Exception as error:  # Hydra makes warnings of them, and would run what nobody has checked
            sys.exit(unexpected.tell(error))

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """What asks for a sweep may be a file, with hydra.mode."""
        from runner.sweep import hydra_plugins

        hydra_plugins.register()
        try:
            check_hydra(config.hydra)
            refuse(hydra_plugins.part_problems(config.hydra))
            if config.sweep.resume is None:
                check_folder(folder_of(config, "hydra.sweep.dir"), key="hydra.sweep.dir")
        except RunnerError as error:
            sys.exit(answer.report(error))
        except Exception as error:
            sys.exit(unexpected.tell(error))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """A sweep's exit code: 1 when a job of it failed, or is not at its end. Hydra hands a sweeper's answer to nobody."""
        from runner.sweep.jobs import ledger

        folder = Path(config.hydra.sweep.dir)
        answer.give_report(folder)
        if (folder / ledger.FILE).is_file() and any(
            job.state not in ("finished", "pruned", "skipped") for job in ledger.read(folder).jobs.values()
        ):
            sys.exit(1)
