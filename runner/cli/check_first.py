"""Checks a composed configuration before a folder is made, and reports everything that is wrong with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.config import logs, validate
from runner.config.compose import name_data
from runner.config.importing import loading
from runner.config.trust import RERUN
from runner.errors import Problem, RunnerError, first_line, path_problems, refuse
from runner.experiment import claim
from runner.experiment.claim import RunDirectory
from runner.experiment.context import Checked
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


@dataclass(frozen=True)
class Start:
    """A run that may begin: its directory is taken, its configuration checked."""

    directory: RunDirectory
    checked: Checked  # the machine and the run's device
    publisher: Ahead | None  # the process that will publish


@contextmanager
def started(cfg: DictConfig, *, publishes: bool) -> Iterator[Start]:
    """Check a run and take its directory, before anything is written there: an error leaves nothing.

    publishes: whether the run has its own uploader process, which starts while the configuration is checked.
    Raises: RunnerError with everything that is wrong, OverError for a run that has finished.
    """
    with ExitStack() as stack:
        check_hydra(cfg.hydra)
        publisher = None
        if publishes and (uri := _store_of(cfg)) is not None:
            publisher = Ahead(uri)
            stack.callback(publisher.close)
        checked = check(cfg)
        folder = claim.spelled(folder_of(cfg, "hydra.run.dir"))
        check_folder(folder, key="hydra.run.dir")
        name_data(cfg, cfg.hydra)
        anew = cfg.hydra.job.config_name == RERUN
        if cfg.train.check:
            claim.refuse_used(folder, cfg, anew=anew)
            folder = passing_folder(folder)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            with read_write(cfg.hydra):
                cfg.hydra.run.dir = str(folder)
        directory = stack.enter_context(RunDirectory.begin(folder, cfg, anew=anew))
        try:
            directory.expect(check_written(cfg.hydra, directory.path))
        except RunnerError:
            directory.leave_nothing()
            raise
        yield Start(directory, checked, publisher)


def check_sweep(cfg: DictConfig) -> None:
    """Raises: RunnerError for settings of Hydra's that a sweep can't follow, and a directory that can't be made."""
    from runner.sweep import hydra_plugins

    check_hydra(cfg.hydra)
    refuse(hydra_plugins.part_problems(cfg.hydra))
    if cfg.sweep.resume is None:
        check_folder(folder_of(cfg, "hydra.sweep.dir"), key="hydra.sweep.dir")
