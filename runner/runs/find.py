"""Finds the folder of a run by what a person calls it: a folder, its id in MLflow, or `last`. For every command that takes RUN.

check() refuses a configuration that would make another experiment of it, for `resume`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import yaml
from omegaconf import DictConfig

from runner.config.identity import changes, flat, may_change
from runner.config.trust import check_folder
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.experiment.provenance import TRIES
from runner.tracking.ack import read_ack
from runner.tracking.journal import is_being_written
from runner.tracking.journal_records import FILE as JOURNAL

ROOTS = ("outputs", "multirun")


def find(wanted: str, *, verb: str = "resume") -> Path:
    """The folder of a run. wanted: the folder itself, `last`, or a run's id in MLflow or the beginning of it.

    verb: of the command that asks, for the messages.
    Raises: RunnerError where there is none, where it is of a sweep as a whole, where another process works in it, and
    for what may not be in it.
    """
    folder = locate(wanted, verb=verb)
    if is_being_written(folder):
        problem = "the run is still running in another process"
        raise RunnerError.of(f"{verb} {wanted}", problem, "wait until it has ended")
    return folder


def locate(wanted: str, *, verb: str) -> Path:
    """The same for a run that may be running."""
    folder = Path(wanted)
    if wanted == "last":
        folders = newest_first()
        if not folders:
            problem = f"there is no run in {' or '.join(ROOTS)} of {Path.cwd()}"
            raise RunnerError.of(
                f"{verb} last", problem, "name a run directory, or start a run with `python -m runner`"
            )
        folder = folders[0]
    elif not os.path.isdir(folder):  # noqa: PTH112  # Path's own raises for a name of 300 letters
        folder = _by_id(wanted, verb)
    if any(os.path.lexists(folder / name) for name in ("rerun.yaml", "ledger.jsonl")):
        check_folder(folder)  # walks through it, and / may be named, too
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
    """Raises: RunnerError for each key that would make another experiment of it."""
    old, new = flat(before), flat(now)
    problems = []
    for key in changes(old, new):
        if not may_change(key):
            asked, was = (f"{key}={values.get(key)}" for values in (new, old))
            problem = f"the run began with `{was}`, and another value makes it another experiment"
            fix = f"use `{was}`, or start a new run: `python -m runner -cd DIRECTORY -cn rerun {asked}`"
            problems.append(Problem(asked, problem, fix, (was,), code="conflict"))
    refuse(problems)


def retold(error: RunnerError, folder: Path, verb: str, words: Sequence[str] = ()) -> RunnerError:
    """The same, where a file or a module that the run names is not here and lies where the run was made: told so.

    Else another file of this folder would be offered in its place. verb, words: of the command that asks, without the run.
    """
    return RunnerError(*(_from_home(problem, folder.resolve(), verb, words) for problem in error.problems))


@contextmanager
def retelling(folder: Path, verb: str, words: Sequence[str] = ()) -> Iterator[None]:
    """retold(), for what is raised within."""
    try:
        yield
    except RunnerError as error:
        raise retold(error, folder, verb, words) from error


def _from_home(error: Problem, folder: Path, verb: str, words: Sequence[str]) -> Problem:
    key, _, value = error.source.partition("=")
    names = [value] if key.startswith("data.") else []
    if key.endswith("_target_"):
        module = value.partition(".")[0]
        names = [f"{module}.py", f"{module}/__init__.py"]
    if value and not any(os.path.exists(name) for name in names):  # noqa: PTH110  # Path's own raises for 300 letters
        for home, name in product(_homes(folder), names):
            if os.path.exists(home / name):  # noqa: PTH110  # likewise
                run = folder.relative_to(home) if folder.is_relative_to(home) else folder
                problem = f"`{name}` is in {home}, where the run was made, and not here"
                again = shlex.join(["python", "-m", "runner", verb, str(run), *words])
                return Problem(error.source, problem, f"run `cd {shlex.quote(str(home))} && {again}`")
    return error


def _homes(folder: Path) -> list[Path]:
    noted: list[Path] = []
    with suppress(OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        noted = [Path(yaml.safe_load((folder / ".hydra/hydra.yaml").read_text())["hydra"]["runtime"]["cwd"])]
    return [*noted, *folder.resolve().parents]


def _folders() -> list[Path]:
    found = [path.parent for root in ROOTS for path in Path(root).glob("*/**/rerun.yaml")]
    return [folder for folder in found if (folder / JOURNAL).is_file()]


def newest_first() -> list[Path]:
    """The folders of the runs below outputs/ and multirun/, by when they were last begun or gone on with; none of a try's own."""
    found = [folder for folder in _folders() if not folder.is_relative_to(TRIES)]
    return sorted(found, key=lambda found: (found / "rerun.yaml").stat().st_mtime, reverse=True)


def with_id(wanted: str) -> list[Path]:
    """The folders of the runs below outputs/ and multirun/ whose id in MLflow begins so."""
    return [folder for folder in _folders() if (read_ack(folder).run_id or "").startswith(wanted)]


def _by_id(wanted: str, verb: str) -> Path:
    found = with_id(wanted)
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"{len(found)} runs have an id that begins with `{wanted}`: {', '.join(map(str, found[:3]))}"
        raise RunnerError.suggest(f"{verb} {wanted}", problem, _commands(verb, map(str, found[:1])))
    problem = f"there is no directory `{wanted}`, and no run in {' or '.join(ROOTS)} has this id"
    path, known = Path(wanted), newest_first()
    beside: list[Path] = []
    with suppress(OSError, ValueError):  # a name that is too long or has a zero in it, a folder that may not be read
        beside = [file.parent for file in path.parent.glob("*/rerun.yaml")]
    ids = [read_ack(folder).run_id or "" for folder in known]
    hits = nearest(str(path), map(str, (*known, *beside))) or nearest(wanted, ids)
    hits = hits or ["last"][: bool(known) and verb != "diff"]  # which takes two
    otherwise, ways = "name the directory in the run's last lines", _commands(verb, hits)
    raise RunnerError.suggest(f"{verb} {wanted}", problem, ways, otherwise, code="missing-file")


def _commands(verb: str, runs: Iterable[str]) -> list[str]:
    return [f"python -m runner {verb} {shlex.quote(run)}" for run in runs]
