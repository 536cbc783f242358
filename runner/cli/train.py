"""Composes, checks and runs a training: one run, or a sweep."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobStatus, configure_log, run_job
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from runner.cli import answer
from runner.cli.table import MULTIRUN
from runner.command import Arguments
from runner.config import compose as composing
from runner.config import override_errors, validate
from runner.config.compose import COMPOSITION, CheckedLoader, asks_for_a_sweep, composed_with, composer, hydra_with
from runner.config.importing import loading
from runner.config.trust import RERUN
from runner.distributed.environment import rank_here
from runner.errors import RunnerError, first_line, in_words, path_problems, refuse
from runner.experiment import directory as directories
from runner.experiment.context import Checked, RunContext
from runner.experiment.summary import Summary
from runner.tracking.ahead import Ahead

RunOne = Callable[[DictConfig, Path, RunContext], tuple[Summary, dict[str, Any]]]  # with more values for --json


def train(arguments: Arguments) -> int:
    """Train one run or, with -m, several; or show what Hydra shows (--cfg job, --info, ...)."""
    flags, overrides = arguments.flags, arguments.overrides
    rank = rank_here(os.environ)  # of torchrun or srun
    if rank is not None and (MULTIRUN & set(flags) or asks_for_a_sweep(flags, overrides)):
        problem = f"{rank.by} has started {rank.num} processes, and a sweep starts its jobs itself"
        source = "-m" if MULTIRUN & set(flags) else "hydra.mode: MULTIRUN, in a file"
        fix = "run `python -m runner -m ...` once, or use `hydra.mode=RUN` for one run"
        raise RunnerError.of(source, problem, fix, code="conflict")
    if rank is None or not rank.rank:
        return train_composed(flags, overrides)
    cfg = composed_with(composer(flags), overrides)
    try:  # as the first process does, which then does not wait for this one
        directories.refuse_used(Path(HydraConfig.get().run.dir), cfg)
    except directories.OverError:
        return 0
    from runner.experiment.processes import follow

    return follow(cfg, rank, check(cfg).choice).code


def train_composed(flags: list[str], overrides: list[str], run_one: RunOne | None = None) -> int:
    """Compose, check and run one run or a sweep, or print the result of a flag such as --cfg. Returns the exit code.

    Args:
        flags: Hydra's flags.
        overrides: Hydra's overrides.
        run_one: What runs a checked configuration in its directory (None: experiment.run).
    """
    loader = CheckedLoader(flags)
    compose, is_sweep = composer(flags, loader=loader), bool(MULTIRUN & set(flags))
    with hydra_with(loader):
        with override_errors.explained(overrides, compose=compose, check=check):
            if composing.show(flags, overrides):
                return 0
            cfg = composing.compose_job(loader, flags, overrides, is_sweep=is_sweep)
        if cfg.hydra.mode == RunMode.MULTIRUN:
            with override_errors.explained(overrides, compose=compose, check=check, errors=COMPOSITION):
                return _sweep(cfg, loader)
        try:
            with started(cfg, publishes=run_one is None) as context:
                return _run(cfg, loader, replace(context, owns_process=True), run_one)
        except directories.OverError as over:
            if cfg.hydra.job.config_name == RERUN:  # it was to be repeated
                raise
            print(over)
            folder = folder_of(cfg, "hydra.run.dir")
            answer.give({"folder": str(folder), **vars(Summary.read(folder))})
            return 0


def _run(cfg: DictConfig, loader: CheckedLoader, context: RunContext, run_one: RunOne | None) -> int:
    """Run one job as Hydra does: its directory, its logs, its callbacks."""

    def job(cfg: DictConfig) -> Summary:
        with loading():
            from runner.experiment.run import run as run_experiment  # torch: not on the way to --cfg

        folder = Path(HydraConfig.get().runtime.output_dir)
        more: dict[str, Any] = {}
        with nullcontext() if cfg.train.check else answer.logged(folder):  # a check's directory is removed
            if cfg.train.check:
                if run_one is not None:
                    refuse_check(cfg, "reproduce")
                from runner.runs.check import check_run

                summary = check_run(cfg, folder, context=context)
            elif run_one is not None:
                summary, more = run_one(cfg, folder, context)
            else:
                summary = run_experiment(cfg, folder, context=context)
        answer.give({"folder": None if cfg.train.check else str(folder), **vars(summary), **more})
        if summary.ending == "out_of_memory":
            from runner.tools.plan.command import print_what_fits

            print_what_fits(cfg)
        return summary

    hydra, name = composing.context_of(loader, cfg), cfg.hydra.job.config_name
    with configured_log("hydra.hydra_logging"):
        configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    hydra.callbacks.on_run_start(config=cfg, config_name=name)
    with configured_log("hydra.job_logging"):  # the errors of the job are in what it returns
        done = run_job(job, cfg, "hydra.run.dir", None, hydra)
    result: Any = done._return_value  # Hydra's property prints a line before it raises
    hydra.callbacks.on_run_end(config=cfg, config_name=name, job_return=done)
    if done.status == JobStatus.FAILED:
        raise result
    return int(result.code)


def _sweep(cfg: DictConfig, loader: CheckedLoader) -> int:
    """Run a sweep as Hydra does. Exit code 1 if one of its jobs failed, or has not ended."""
    from runner.sweep import hydra_plugins
    from runner.sweep.jobs import ledger

    check_hydra(cfg.hydra)
    refuse(hydra_plugins.part_problems(cfg.hydra))
    if cfg.sweep.resume is None:
        check_writable(folder_of(cfg, "hydra.sweep.dir"), key="hydra.sweep.dir")
    context, name = composing.context_of(loader, cfg), cfg.hydra.job.config_name
    with configured_log("hydra.hydra_logging"):
        configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    context.callbacks.on_multirun_start(config=cfg, config_name=name)
    overrides = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    hydra_plugins.open_sweeper(cfg).sweep(overrides, context, cfg)
    context.callbacks.on_multirun_end(config=cfg, config_name=name)
    folder = Path(cfg.hydra.sweep.dir)
    answer.give_report(folder)
    jobs = ledger.read(folder).jobs.values() if (folder / ledger.FILE).is_file() else ()
    return int(any(job.state not in ("finished", "pruned", "skipped") for job in jobs))


def check(cfg: DictConfig) -> Checked:
    """Return the machine and the run's device. Raises: RunnerError with every error of the configuration."""
    with loading():
        from runner.experiment.check import check_here  # torch

    return check_here(cfg)


def refuse_check(cfg: DictConfig, command: str) -> None:
    """Raises: RunnerError for `train.check` with a command whose run stays."""
    if validate.value(cfg, "train.check"):
        problem = "a check leaves nothing behind, and the run of this command stays"
        fix = "leave it out; to check a configuration, run `python -m runner train.check=true`"
        raise RunnerError.of(f"{command} train.check=true", problem, fix, code="conflict")


#: what Python's logging raises for settings
REFUSALS = (AssertionError, AttributeError, LookupError, OSError, TypeError, ValueError)


@contextmanager
def configured_log(key: str) -> Iterator[None]:
    """Report an error of the settings of a log with their key, e.g., hydra.job_logging. runner.config.trust has checked its classes."""
    try:
        yield
    except (OmegaConfBaseException, *REFUSALS) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        problem = f"Python's logging refuses `{key}`: {in_words(error).removeprefix('ValueError: ')}{cause}"
        fix = f"set `{key}` to other values, or choose a file: `{key.replace('.', '/')}=default`"
        raise RunnerError.of(key, " ".join(problem.split()), fix, code="bad-value") from error


def check_hydra(hydra: DictConfig) -> None:
    """Raises: RunnerError for settings of Hydra that a run can't follow."""
    if hydra.job.chdir:
        problem = "a run works in the directory that it is started from, where it finds data, stores and your code"
        raise RunnerError.suggest("hydra.job.chdir=true", problem, ["hydra.job.chdir=false"])
    subdir = Path(hydra.output_subdir or "")
    if subdir.is_absolute() or ".." in subdir.parts:
        ways = ["hydra.output_subdir=.hydra", "hydra.output_subdir=null"]
        raise RunnerError.suggest(f"hydra.output_subdir={subdir}", "this directory is not in the run's directory", ways)


def folder_of(cfg: DictConfig, key: str) -> Path:
    """Return the directory that a key of Hydra names. Raises: RunnerError for an address and an unknown ${...}."""
    try:
        refuse(path_problems(key, folder := str(OmegaConf.select(cfg, key)), is_written=True))
        return Path(folder)
    except OmegaConfBaseException as error:
        above, _, name = key.rpartition(".")
        source = f"{key}={validate.written(OmegaConf.select(cfg, above), name)}"
        raise RunnerError.of(source, first_line(error), f"use `{key}=FOLDER`", code="bad-value") from None


def check_writable(folder: Path, *, key: str) -> None:
    """Raises: RunnerError for a directory that can't be created or written to. key: Hydra's, that names it."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        kind = "read-only" if parent.is_dir() else "a file"
        problem = f"this directory can't be created or written to: `{parent}` is {kind}"
        fix = f"use `{key}=FOLDER` in a place that you may write to"
        raise RunnerError.of(f"{key}={folder}", problem, fix, code="missing-file")


def _store_of(cfg: DictConfig) -> str | None:
    """Return the store that this process will publish to, as far as an unchecked configuration says."""
    # hydra.job.env_set is applied later, and may say how a store is reached
    is_alone = validate.value(cfg, "train.num_processes") in ("auto", 1) and not cfg.hydra.job.env_set
    is_on = validate.value(cfg, "tracking.enabled") is True and not validate.value(cfg, "train.check")
    uri = validate.value(cfg, "tracking.uri")
    return uri if is_alone and is_on and isinstance(uri, str) else None


@contextmanager
def started(cfg: DictConfig, folder: Path | None = None, *, publishes: bool) -> Iterator[RunContext]:
    """Check a run and hold its directory, before anything is written there: an error before its journal leaves nothing.

    folder: Its directory (None: `hydra.run.dir`).
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
        folder = folder or folder_of(cfg, "hydra.run.dir")
        check_writable(folder, key="hydra.run.dir")
        if cfg.train.check:
            directories.refuse_used(folder, cfg)
            folder = stack.enter_context(directories.temporary_folder(folder))
            with read_write(cfg.hydra):
                cfg.hydra.run.dir = str(folder)
        directory = stack.enter_context(directories.begin(folder, cfg))
        try:
            yield RunContext(checked=checked, publisher=publisher)
        except answer.UnexpectedError:  # its log stays
            raise
        except BaseException:
            directory.leave_nothing()
            raise
