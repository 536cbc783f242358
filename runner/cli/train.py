"""Runs `train`, and run() in a notebook: composes and checks the run or sweep, then hands it on."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.cli import answer, check_first, notebook, unexpected
from runner.cli.arguments import refuse_misspelt, sorted_words
from runner.cli.check_first import Start, check, check_folder, folder_of
from runner.cli.table import MULTIRUN, ONE_RUN, Arguments
from runner.config import compose as composing
from runner.config import override_errors, validate
from runner.config.compose import (
    CheckedLoader,
    asks_for_a_sweep,
    composed_with,
    composer,
    hydra_with,
    make_own_code_importable,
    name_data,
    restored,
)
from runner.config.importing import loading
from runner.config.instantiate import ALLOW_VARIABLE
from runner.config.logs import logging_to
from runner.distributed.environment import RankInfo, rank_here
from runner.errors import SECRETS, Problem, RunnerError, path_problems, refuse
from runner.experiment import claim
from runner.experiment.claim import RunDirectory
from runner.experiment.context import RunContext
from runner.experiment.summary import Summary, read_summary

RunOne = Callable[[DictConfig, Path, Start], tuple[Summary, dict[str, Any]]]  # with more values for --json


def train(given: Arguments) -> int:
    """Train one run or, with -m, several; or show what Hydra shows (--cfg job, --info, ...)."""
    refuse_misspelt(given.words)
    flags, overrides = sorted_words(given.words)
    place = rank_here(os.environ)  # of torchrun or srun
    if place is not None and (MULTIRUN & set(flags) or asks_for_a_sweep(flags, overrides)):
        problem = f"{place.by} has started {place.num} processes, and a sweep starts its jobs itself"
        asked = "-m" if MULTIRUN & set(flags) else "hydra.mode: MULTIRUN, in a file"
        raise RunnerError(
            Problem(asked, problem, "python -m runner -m ..., once; or one run at a time: hydra.mode=RUN")
        )
    if place is not None and place.rank:
        return _follow(flags, overrides, place)
    return train_composed(flags, overrides)


def _follow(flags: list[str], overrides: list[str], place: RankInfo) -> int:
    compose = composer(flags)
    cfg = composed_with(compose, overrides)
    try:  # as the first one does, and then is not there to meet
        claim.refuse_used(Path(HydraConfig.get().run.dir), cfg)
    except claim.OverError:
        return 0
    from runner.experiment.processes import follow

    return follow(cfg, place).code


def train_composed(
    flags: list[str],
    overrides: list[str],
    run_one: RunOne | None = None,
    *,
    retold: Callable[[RunnerError], RunnerError] = lambda error: error,
) -> int:
    """Compose, check and run one run or a sweep, or print the result of a flag such as --cfg. Returns the exit code.

    Args:
        flags: Hydra's flags.
        overrides: Hydra's overrides.
        run_one: What runs a checked configuration in its directory (None: experiment.run).
        retold: Rewords an error, once the configuration was composed.
    """
    loader = CheckedLoader(flags)
    compose, is_sweep = composer(flags, loader=loader), bool(MULTIRUN & set(flags))
    with hydra_with(loader):
        with override_errors.explained(overrides, compose=compose, check=check):
            if composing.show(flags, overrides):
                return 0
            cfg = composing.compose_job(loader, flags, overrides, is_sweep=is_sweep)
        if cfg.hydra.mode == RunMode.MULTIRUN:
            try:
                return _sweep(cfg, loader)
            except Exception as error:
                if isinstance(error, RunnerError) or not override_errors.is_about_composition(error):
                    raise
                raise override_errors.explain(error, overrides, compose=compose, check=check) from None
        try:
            with check_first.started(cfg, publishes=run_one is None) as start:
                return _run(cfg, loader, start, run_one)
        except claim.OverError as over:
            print(claim.over_line(over))
            answer.give(
                {"folder": str(folder_of(cfg, "hydra.run.dir")), **read_summary(folder_of(cfg, "hydra.run.dir"))}
            )
            return 0
        except RunnerError as error:
            raise retold(error) from error


def _run(cfg: DictConfig, loader: CheckedLoader, start: Start, run_one: RunOne | None) -> int:
    """Run one job as Hydra does: its directory, its logs, its callbacks."""

    def job(cfg: DictConfig) -> Summary:
        with loading():
            from runner.experiment.run import run as run_experiment  # torch: not on the way to --help

        name_data(cfg)
        folder = Path(HydraConfig.get().runtime.output_dir)
        more: dict[str, Any] = {}
        context = RunContext(checked=start.checked, owns_process=True, publisher=start.publisher)
        with nullcontext() if cfg.train.check else unexpected.noting(folder):  # a check's folder is removed
            if cfg.train.check:
                summary = _checked(cfg, folder, context, stays=run_one is not None)
            elif run_one is not None:
                summary, more = run_one(cfg, folder, start)
            else:
                summary = run_experiment(cfg, folder, context=context)
        answer.give({"folder": None if cfg.train.check else str(folder), **vars(summary), **more})
        if summary.ending == "out_of_memory":
            _say_what_fits(cfg)
        return summary

    context, name = composing.context_of(loader, cfg), cfg.hydra.job.config_name
    try:
        configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
        context.callbacks.on_run_start(config=cfg, config_name=name)
        done = run_job(job, cfg, "hydra.run.dir", None, context)
    except BaseException:  # Hydra's own, or a Ctrl-C before the training began
        start.directory.leave_nothing()
        raise
    if isinstance(done._return_value, RunnerError):
        start.directory.leave_nothing()
    context.callbacks.on_run_end(config=cfg, config_name=name, job_return=done)
    return _value(done).code


def _value(done: JobReturn) -> Summary:
    """What a job returned. Raises: What it raised; Hydra's own property prints a line before it."""
    if done.status == JobStatus.FAILED:
        raise done._return_value
    value: Summary = done._return_value
    return value


def _sweep(cfg: DictConfig, loader: CheckedLoader) -> int:
    """Run a sweep as Hydra does. Exit code 1 if one of its jobs failed, or has not ended."""
    from runner.sweep import hydra_plugins
    from runner.sweep.jobs import ledger
    from runner.sweep.jobs.run_job import task

    check_first.check_sweep(cfg)
    context, name = composing.context_of(loader, cfg), cfg.hydra.job.config_name
    configure_log(cfg.hydra.hydra_logging, cfg.hydra.verbose)
    context.callbacks.on_multirun_start(config=cfg, config_name=name)
    words = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    hydra_plugins.open_sweeper(cfg, context, task).sweep(words)
    context.callbacks.on_multirun_end(config=cfg, config_name=name)
    folder = Path(cfg.hydra.sweep.dir)
    answer.give_report(folder)
    has_ended = ("finished", "pruned", "skipped")
    jobs = ledger.read(folder).jobs.values() if (folder / ledger.FILE).is_file() else ()
    return int(any(job.state not in has_ended for job in jobs))


def refuse_check(cfg: DictConfig, asked: str) -> None:
    """Raises: RunnerError where a check is asked of a command whose run stays."""
    if validate.value(cfg, "train.check"):
        problem = "a check leaves nothing behind, and the run of this command stays"
        fix = f"{asked} without it; to check a configuration: python -m runner [KEY=VALUE ...] train.check=true"
        raise RunnerError(Problem(f"{asked} train.check=true", problem, fix))


def _checked(cfg: DictConfig, folder: Path, context: RunContext, *, stays: bool) -> Summary:
    if stays:
        refuse_check(cfg, "reproduce")
    from runner.runs.check import check_run  # torch

    return check_run(cfg, folder, context=context)


def run(words: list[str], *, config_name: str = "config", folder: Path | None = None) -> notebook.Result:
    """One run from Python; see runner.run."""
    notebook.refuse_in_own_process()
    make_own_code_importable()
    notebook.forget_edited()
    with restored(ALLOW_VARIABLE), restored(SECRETS):
        flags, overrides = sorted_words(words, of_python=True)
        if others := [flag for flag in flags[::2] if flag not in ONE_RUN]:
            fix = "python -m runner ..., or run() for each"
            raise RunnerError(
                *(Problem(flag, "run() is one run, and takes -cn, -cd and --allow", fix) for flag in others)
            )
        try:
            result = _run_one(["-cn", config_name, *flags], overrides, folder)
        finally:
            notebook.note_loaded()
    if result["exit_code"] == 130:
        raise KeyboardInterrupt  # it has saved where it stands; the cells that follow are not to run
    return result


def _run_one(flags: list[str], overrides: list[str], folder: Path | None) -> notebook.Result:
    compose = composer(flags)
    with override_errors.explained(overrides, compose=compose, check=check):
        cfg = compose(overrides)
    if cfg.hydra.mode == RunMode.MULTIRUN:
        fix = "hydra.mode=RUN, or python -m runner -m ..."
        raise RunnerError(Problem("hydra.mode=MULTIRUN", "run() is one run", fix))
    refuse_check(cfg, "run()")
    with loading():
        from runner.experiment.run import run as run_experiment

    if folder is not None:
        refuse(path_problems("folder", str(folder), is_written=True))
    folder = (folder or folder_of(cfg, "hydra.run.dir")).absolute()  # its result is read after a chdir, too
    check_folder(folder, key="hydra.run.dir")
    HydraConfig.instance().set_config(cfg)
    name_data(cfg)
    del cfg.hydra
    place = rank_here(os.environ)
    if place is not None and place.rank:  # the first of several processes holds the folder
        return notebook.Result(vars(run_experiment(cfg, folder)), folder)
    try:
        directory = RunDirectory.begin(folder, cfg, anew="-cd" in flags)
    except claim.OverError as over:
        print(claim.over_line(over))
        return notebook.Result(read_summary(folder), folder)
    with directory:
        try:
            with logging_to(folder):
                return notebook.Result(vars(run_experiment(cfg, folder)), folder)
        except (RunnerError, KeyboardInterrupt):  # before the training began
            directory.leave_nothing()
            raise


def _say_what_fits(cfg: DictConfig) -> None:
    from runner.plan.command import what_fits

    print("plan    of this run, on the whole of that memory:")
    for line in what_fits(cfg) or ["        not known: it could not be planned"]:
        print(line)
