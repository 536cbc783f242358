"""Runs `train`, and run() in a notebook: has Hydra compose and check the run or sweep, then hands it on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from runner.cli import answer, notebook, unexpected
from runner.cli.arguments import Arguments, refuse_misspelt, sorted_words
from runner.cli.check_first import CheckFirst, check, check_folder, folder_of
from runner.cli.table import MULTIRUN, ONE_RUN
from runner.config import override_errors, validate
from runner.config.compose import (
    CONF,
    asks_for_a_sweep,
    composed_with,
    composer,
    hydra_session,
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
from runner.experiment.context import RunContext
from runner.experiment.summary import Summary, read_summary

RunOne = Callable[[DictConfig, Path], tuple[Summary, dict[str, Any]]]  # with more values for --json


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
    with hydra_session(["runner"]):
        cfg = composed_with(compose, overrides)
        try:  # as the first one does, and then is not there to meet
            claim.refuse_used(Path(HydraConfig.get().run.dir), cfg)
        except claim.OverError:
            return 0
        from runner.experiment.processes import follow

        summary = follow(cfg, place)
    return summary.code


def train_composed(
    flags: list[str],
    overrides: list[str],
    run_one: RunOne | None = None,
    *,
    retold: Callable[[RunnerError], RunnerError] = lambda error: error,
) -> int:
    """Hands each composed configuration to `run_one` (None: experiment.run), as Hydra's job. Returns the exit code.

    retold: a person's mistakes, as they are told.
    """
    summaries: list[Summary] = []
    mistaken: list[Problem] = []
    composed: list[bool] = []
    unexpected_errors: list[Exception] = []
    is_sweep = bool(MULTIRUN & set(flags))
    if is_sweep:
        from runner.sweep import hydra_plugins

        hydra_plugins.register()

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def job(cfg: DictConfig) -> None:
        composed.append(True)
        with loading():
            from runner.experiment.run import run as run_experiment  # torch: not on the way to --help

        name_data(cfg)
        folder = Path(HydraConfig.get().runtime.output_dir)
        more: dict[str, Any] = {}
        try:
            with nullcontext() if cfg.train.check else unexpected.noting(folder):  # a check's folder goes
                context = RunContext(checked=CheckFirst.checked, owns_process=True, publisher=CheckFirst.ahead)
                if run_one is not None and not cfg.train.check:
                    summary, more = run_one(cfg, folder)
                elif cfg.train.check:
                    summary = _checked(cfg, folder, context, stays=run_one is not None)
                else:
                    summary = run_experiment(cfg, folder, context=context)
        except KeyboardInterrupt:  # before the training began
            claim.leave_nothing(folder)
            raise
        except RunnerError as error:  # told at the end: Hydra would print around it
            claim.leave_nothing(folder)
            mistaken.extend(problem for problem in retold(error).problems if problem not in mistaken)
            return
        except Exception as error:  # raised below: Hydra would print a line above it
            unexpected_errors.append(error)
            return
        summaries.append(summary)
        answer.give({"folder": None if cfg.train.check else str(folder), **vars(summary), **more})
        if summary.ending == "out_of_memory":
            _say_what_fits(cfg)
        if summary.exit_code:
            sys.exit(summary.exit_code)  # a signal ends a sweep, too

    CheckFirst.folder = CheckFirst.checked = CheckFirst.passing = CheckFirst.ahead = None
    CheckFirst.publishes, CheckFirst.retold = run_one is None, retold
    with hydra_session(["runner", *flags, *overrides]):
        try:
            job()
            if unexpected_errors:
                raise unexpected_errors[0]
        except (RunnerError, BrokenPipeError):
            raise
        except Exception as error:
            if composed or (is_sweep and not override_errors.is_about_composition(error)):
                raise
            if CheckFirst.folder is not None:  # Hydra failed after it was taken: at its log, say
                claim.leave_nothing(CheckFirst.folder)
            raise override_errors.explain(error, overrides, compose=composer(flags), check=check) from None
        finally:
            claim.let_go()
            if CheckFirst.ahead is not None:
                CheckFirst.ahead.close()
            if CheckFirst.passing is not None:
                shutil.rmtree(CheckFirst.passing, ignore_errors=True)
    if mistaken and not summaries:
        raise RunnerError(*mistaken)
    if mistaken:
        answer.report(RunnerError(*mistaken))
    return int(bool(mistaken) or any(summary.status == "failed" for summary in summaries))


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
    with hydra_session(["runner"]):
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
            claim.begin(folder, cfg, anew="-cd" in flags)
        except claim.OverError as over:
            print(claim.over_line(over))
            return notebook.Result(read_summary(folder), folder)
        try:
            with logging_to(folder):
                return notebook.Result(vars(run_experiment(cfg, folder)), folder)
        except (RunnerError, KeyboardInterrupt):  # before the training began
            claim.leave_nothing(folder)
            raise
        finally:
            claim.let_go()


def _say_what_fits(cfg: DictConfig) -> None:
    from runner.plan.command import what_fits

    print("plan    of this run, on the whole of that memory:")
    for line in what_fits(cfg) or ["        not known: it could not be planned"]:
        print(line)
