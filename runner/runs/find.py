"""Find the directory of a run, named by a directory, its MLflow run id, or `last`. For every command that takes RUN."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from runner.config.identity import changes, flat, may_change
from runner.config.trust import check_card, check_folder
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.experiment.directory import CHECKPOINTS, Run
from runner.experiment.provenance import TRIES
from runner.models.card import NAME as CARD
from runner.tracking.ack import read_ack
from runner.tracking.journal_records import FILE as JOURNAL

ROOTS = ("outputs", "multirun")
ID = re.compile(r"[0-9a-f]{32}")  # of a run in MLflow


def find_trained(wanted: str, *, verb: str) -> Run:
    """Return a run with a model, and its best weights or the checkpoint that was named instead of it.

    Raises:
        RunnerError: As find(), and for a checkpoint that does not exist.
    """
    file = Path(wanted)
    if file.suffix != ".pt" or file.parent.name != CHECKPOINTS:
        run = Run(find(wanted, verb=verb).absolute())
    elif file.is_file() or not file.parent.is_dir():
        run = Run(find(str(file.absolute().parents[1]), verb=verb).absolute(), f"{CHECKPOINTS}/{file.name}")
    else:
        kept = sorted(map(str, file.parent.glob("*.pt")))
        ways, problem = _commands(verb, nearest(wanted, kept) or kept[:3]), f"the run has no checkpoint `{wanted}`"
        raise RunnerError.suggest(f"{verb} {wanted}", problem, ways, f"use `{verb} last`")
    check_card(run.folder / CARD)
    return run


def find(wanted: str, *, verb: str = "resume") -> Path:
    """Return the directory of a run.

    Args:
        wanted: The directory, `last`, or an MLflow run id or its beginning.
        verb: The command, for messages.

    Raises:
        RunnerError: If the run is missing, is a sweep, is written by another process, or has files that are not allowed.
    """
    folder = locate(wanted, verb=verb)
    if Run(folder).is_running:
        problem = "the run is still running in another process"
        raise RunnerError.of(f"{verb} {wanted}", problem, "wait until it has ended")
    return folder


def locate(wanted: str, *, verb: str) -> Path:
    """Return the directory of a run that may be running; see find()."""
    folder = Path(wanted)
    if wanted == "last":
        folders = newest_first()
        if not folders:
            problem = f"no run is in {' or '.join(ROOTS)} of {Path.cwd()}"
            raise RunnerError.of(
                f"{verb} last", problem, "name a run directory, or start a run with `python -m runner`"
            )
        folder = folders[0]
    elif not os.path.isdir(folder):  # noqa: PTH112  # Path's own raises for a name of 300 letters
        folder = _by_id(wanted, verb)
    if any(os.path.lexists(folder / name) for name in ("rerun.yaml", "ledger.jsonl")):
        check_folder(folder)  # walks through all files: not for a directory like /
    if (folder / "ledger.jsonl").is_file():
        again = f"run the sweep's arguments with `{shlex.quote(f'sweep.resume={folder}')}`"
        ways = [] if verb == "resume" else _commands(verb, [str(folder / "0")])
        problem = f"`{wanted}` is a sweep's directory with many runs"
        raise RunnerError.suggest(f"{verb} {wanted}", problem, ways, again)
    if not (folder / "rerun.yaml").is_file():
        problem = f"`{folder}` is not a run directory: it has no `rerun.yaml`"
        fix = "use `last`, or the directory that the run's last lines name"
        raise RunnerError.of(f"{verb} {wanted}", problem, fix)
    return folder


def check(before: DictConfig, now: DictConfig) -> None:
    """Check the configuration of a resumed run. Raises: RunnerError for each key that makes it another experiment."""
    old, new = flat(before), flat(now)
    problems = []
    for key in changes(old, new):
        if not may_change(key):
            asked, was = (f"{key}={values.get(key)}" for values in (new, old))
            problem = f"the run began with `{was}`, and another value makes it another experiment"
            fix = f"use `{was}`, or start a new run: `python -m runner -cd DIRECTORY -cn rerun {asked}`"
            problems.append(Problem(asked, problem, fix, (was,), code="conflict"))
    refuse(problems)


def _folders() -> list[Path]:
    folders = [path.parent for root in ROOTS for path in Path(root).glob("*/**/rerun.yaml")]
    return [folder for folder in folders if (folder / JOURNAL).is_file()]


def newest_first() -> list[Path]:
    """Return the directories of runs below outputs/ and multirun/, the last started or resumed first; without those of `try`."""
    folders = [folder for folder in _folders() if not folder.is_relative_to(TRIES)]
    return sorted(folders, key=lambda folder: (folder / "rerun.yaml").stat().st_mtime, reverse=True)


def is_in_store(wanted: str) -> bool:
    """Return whether it is the id of a run that is in no directory here."""
    return bool(ID.fullmatch(wanted)) and not Path(wanted).is_dir() and not with_id(wanted)


def with_id(wanted: str) -> list[Path]:
    """Return the directories of runs below outputs/ and multirun/ with this beginning of the MLflow run id."""
    return [folder for folder in _folders() if (read_ack(folder).run_id or "").startswith(wanted)]


def _by_id(wanted: str, verb: str) -> Path:
    folders = with_id(wanted)
    if len(folders) == 1:
        return folders[0]
    if folders:
        problem = f"{len(folders)} runs have an id that begins with `{wanted}`: {', '.join(map(str, folders[:3]))}"
        raise RunnerError.suggest(f"{verb} {wanted}", problem, _commands(verb, map(str, folders[:1])))
    problem = f"there is no directory `{wanted}`, and no run in {' or '.join(ROOTS)} has this id"
    path, known = Path(wanted), newest_first()
    siblings: list[Path] = []
    with suppress(OSError, ValueError):  # a name that is too long or contains a zero byte, an unreadable directory
        siblings = [file.parent for file in path.parent.glob("*/rerun.yaml")]
    ids = [read_ack(folder).run_id or "" for folder in known]
    hits = nearest(str(path), map(str, (*known, *siblings))) or nearest(wanted, ids)
    hits = hits or ["last"][: bool(known) and verb != "diff"]  # which takes two
    otherwise, ways = "name the directory in the run's last lines", _commands(verb, hits)
    raise RunnerError.suggest(f"{verb} {wanted}", problem, ways, otherwise, code="missing-file")


def _commands(verb: str, runs: Iterable[str]) -> list[str]:
    return [f"python -m runner {verb} {shlex.quote(run)}" for run in runs]
