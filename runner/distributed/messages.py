"""Records in files why processes of a run failed: ranks/RANK-ATTEMPT.words in the run's directory, next to their logs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.config.run_files import write_whole
from runner.errors import Problem, without_password

FOLDER = "ranks"
#: text of a failure that another failure caused
LOST = "another process of this run is gone"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Failure:
    """Why a process stopped."""

    rank: int
    time: float
    text: str
    problems: list[dict[str, Any]] = field(default_factory=list)  # errors of the user


def forget(folder: Path) -> None:
    """Delete the failures of earlier processes."""
    for old in (folder / FOLDER).glob("*.words"):
        old.unlink(missing_ok=True)


def record(folder: Path, rank: int, text: str, *, problems: Iterable[Problem] = ()) -> None:
    """Record why this process failed; the first record of an attempt counts."""
    failure = Failure(rank, time.time(), without_password(text), [vars(problem.masked()) for problem in problems])
    file = folder / FOLDER / f"{rank}-{attempt()}.words"
    if not file.exists():
        write_whole(file, json.dumps(asdict(failure)))


def first_failure(folder: Path, *, of: int | None = None) -> Failure | None:
    """Return the earliest error of an attempt (None: this one); user errors come first."""
    failures = _failures(folder, attempt() if of is None else of)
    return min(failures, key=lambda failure: (not failure.problems, failure.text == LOST, failure.time), default=None)


def problems_of(folder: Path) -> list[Problem]:
    """Return the user errors of all processes and attempts."""
    return list(dict.fromkeys(Problem.of(facts) for failure in _failures(folder, "*") for facts in failure.problems))


def _failures(folder: Path, number: int | str) -> list[Failure]:
    files = sorted((folder / FOLDER).glob(f"*-{number}.words"))
    return [Failure(**json.loads(file.read_text())) for file in files]


def attempt() -> int:
    """Return how often the launcher restarted the processes."""
    return int(os.environ.get(RESTARTS, "0"))
