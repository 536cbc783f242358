"""Takes a run's folder for this process alone, by a lock, or says why no run can begin in it.

Hydra writes into a run's folder before it calls the run. So a command takes the folder in Hydra's callback
(runner.cli.check_first), and the run finds it taken.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from runner.config.defaults import in_words
from runner.config.identity import changes, chosen, may_change
from runner.errors import Problem, RunnerError
from runner.experiment.summary import is_over, length_key, read_summary

#: held by the process that a person has started, from before its first file to its last; the journal's is its writer's
LOCK = "journal/run.lock"
#: set above 0 by who starts a run's processes again after a failure: the same words then mean to go on
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
MOST_SHOWN = 4
LOG = "runner.log"
CONSOLE = "console.log"  # what a run prints that has no terminal
HYDRAS = (".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")

_held: dict[Path, FileLock] = {}
_made: dict[Path, list[Path]] = {}  # what was not there when it was taken, the folder itself before those above
#: what was there, where a run writes; with its content, where Hydra writes over it
_there: dict[Path, dict[Path, bytes | None]] = {}
_written: dict[Path, list[Path]] = {}  # what is written for its run beside the usual files, and was not there


class OverError(RunnerError):
    """The run that is asked for has been here, and has come to its end."""


def spelled(folder: Path) -> Path:
    """A run's folder without .. in its path, as Hydra spells it in the end."""
    if ".." not in folder.parts:
        return folder
    return Path(os.path.abspath(folder))  # noqa: PTH100  # resolve() follows links, which Hydra does not


def take(folder: Path, *, wait_seconds: float = 1.0) -> None:
    """Takes the folder for this process; makes it if need be. One that it has already stays its own.

    wait_seconds: for another run to let go; one that was killed lets go when its last data worker ends.
    Raises: RunnerError when another process has it, or it can't be made.
    """
    folder = spelled(folder).absolute()
    if folder in _held:
        return
    asked = f"run folder {folder}"
    _made[folder] = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        _there[folder] = _what_lies_in(folder)
        (folder / LOCK).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, thread_local=False)
        lock.acquire(timeout=wait_seconds)
    except Timeout:
        raise RunnerError(Problem(asked, "another run is writing there", "use another directory, or wait")) from None
    except OSError as error:
        problem = f"it can't be made or written: {error.strerror}"
        raise RunnerError(Problem(asked, problem, "hydra.run.dir=FOLDER with one that you may write to")) from None
    _held[folder] = lock


def _what_lies_in(folder: Path) -> dict[Path, bytes | None]:
    """What a folder has where a run leaves something before it begins. Raises: OSError."""
    hydras = [file for name in HYDRAS if (file := folder / name).is_file()]
    places = {(folder / name).parent for name in (LOG, LOCK)}
    found: dict[Path, bytes | None] = {path: None for place in places if place.is_dir() for path in place.iterdir()}
    return found | {file: file.read_bytes() for file in hydras}


def let_go(folder: Path | None = None) -> None:
    """Lets others have it; may be called twice. folder: None for all that this process has."""
    for held in [spelled(folder).absolute()] if folder is not None else [*_held]:
        lock = _held.pop(held, None)
        if lock is not None:
            lock.release()


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """take() and let_go(), for what is done in a folder."""
    take(folder, wait_seconds=10.0)
    try:
        yield
    finally:
        let_go(folder)


def expect(folder: Path, files: Iterable[Path]) -> None:
    """Files that are to be written for the run of a folder that was taken: those that are not there yet are its own."""
    _written[spelled(folder).absolute()] = [file for file in files if not file.exists()]


def leave_nothing(folder: Path) -> None:
    """Takes away what a run leaves in a folder before it begins, and the folders that were made for it.

    By name, and what was not there before, for it may be a folder with anybody's files. Nothing, where a run has begun in it.
    """
    from runner.tracking import journal, journal_records, publisher, sync  # numpy: not on the way to --help

    folder = spelled(folder).absolute()
    if (folder / journal_records.FILE).exists():
        return
    there = _there.get(folder, {})
    for name in (*HYDRAS, LOG, LOCK, journal.LOCK, publisher.LOG, sync.LOCK):
        if (file := folder / name) not in there:
            file.unlink(missing_ok=True)
        elif (content := there[file]) is not None:
            file.write_bytes(content)
    own = _written.pop(folder, [])
    for file in own:
        with suppress(OSError):  # it may have come to nothing
            file.unlink()
    files = [*own, *(folder / name for name in (*HYDRAS, LOCK))]
    inners = {place for file in files for place in file.parents if folder in place.parents}
    for inner in sorted(inners, key=lambda place: -len(place.parts)):
        with suppress(OSError):  # something else lies there
            inner.rmdir()
    with suppress(OSError):
        for made in _made.get(folder, []):
            made.rmdir()


def begin(folder: Path, cfg: DictConfig, *, anew: bool = False) -> None:
    """Takes a folder for a run that begins.

    anew: whether the run is wanted a second time, so that one that is over is in the way, too.
    Raises: RunnerError for a folder that holds a run, OverError where that is this one, and is over.
    """
    refuse_used(folder, cfg, anew=anew)
    take(folder)
    try:
        refuse_used(folder, cfg, anew=anew)  # the one that it was waited for
    except RunnerError:
        let_go(folder)
        raise


def is_used(folder: Path) -> bool:
    """Whether a run has begun in it."""
    from runner.tracking.journal_records import FILE, scan  # numpy: not on the way to --help

    journal = folder / FILE
    if journal.is_file() and any(record.kind == "start" for record in scan(journal)):
        return True
    return any((folder / "checkpoints").glob("last*.pt"))


def refuse_used(folder: Path, cfg: DictConfig, *, anew: bool = False) -> None:
    """Raises: RunnerError where a folder holds a run: what is another, or how to go on. Reads, and writes nothing."""
    if not is_used(folder):
        return
    from runner.tracking.journal import is_being_written  # numpy, as above

    try:
        before = chosen(OmegaConf.load(folder / "rerun.yaml"))  # type: ignore[arg-type]
    except Exception:  # it may be torn, or of anybody
        before = {}
    now = chosen(cfg)
    changed = changes(before, now)
    asked, resume = f"run folder {folder}", f"python -m runner resume {shlex.quote(str(folder))}"
    others = [key for key in changed if not may_change(key)]
    if others or not before:
        problem = (
            f"another experiment is in it: {_differences(others, before, now) or 'its rerun.yaml can not be read'}"
        )
        fix = f"another folder (the usual one has the time in its name), or {resume}"
        raise RunnerError(Problem(asked, problem, fix))
    more = in_words({key: now.get(key) for key in changed if key.startswith("train.")})
    if is_being_written(folder):
        raise RunnerError(Problem(asked, "this run is in it already, and is running", "use another directory, or wait"))
    if is_over(read_summary(folder)) and not more:
        if anew:
            raise RunnerError(Problem(asked, "this run is in it already, and has finished", "another folder"))
        fix = f"{resume} {length_key(cfg)}=... for more of it, or another folder"
        raise OverError(Problem(asked, "it has finished", fix))
    if any(os.environ.get(name, "0") != "0" for name in RESTARTS):
        return
    fix = f"{resume} {more}".rstrip() + ", or another folder"
    raise RunnerError(Problem(asked, "this run is in it already, and can be resumed", fix))


def over_line(error: OverError) -> str:
    """What is said of a run that is asked for again, and is over."""
    (problem,) = error.problems
    return f"{problem.source}: {problem.message}; {problem.help}"


def _differences(keys: list[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    shown = [f"{key}={before.get(key, '-')} (asked: {now.get(key, '-')})" for key in keys[:MOST_SHOWN]]
    more = len(keys) - MOST_SHOWN
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")
