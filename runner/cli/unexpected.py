"""Reports an unexpected error: one line on the screen, the traceback in a file."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.cli import answer
from runner.config import packages
from runner.config.instantiate import own_line
from runner.errors import (
    OF_CODE,
    RunnerError,
    colored,
    has_colors,
    in_words,
    is_out_of_host_memory,
    traceback_of,
    without_password,
)

#: set to print the traceback on the screen as well
VARIABLE = "RUNNER_TRACEBACK"


class UnexpectedError(Exception):
    """An error, its cause, whose traceback is in a run's log."""

    def __init__(self, log: Path) -> None:
        super().__init__(str(log))
        self.log = log


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Write the traceback of an unexpected error into the directory's log. Raises: UnexpectedError."""
    try:
        yield
    except (RunnerError, BrokenPipeError):
        raise
    except OF_CODE as error:
        with (log := folder / "runner.log").open("a", encoding="utf-8") as file:
            file.write(traceback_of(error))
        raise UnexpectedError(log) from error


def report(error: BaseException) -> int:
    """Print the error, the line of the user's code, and where the traceback is. Returns the exit code."""
    cause = error.__cause__ if isinstance(error, UnexpectedError) and error.__cause__ else error
    if isinstance(cause, ModuleNotFoundError) and (missing := packages.missing(cause)) is not None:
        return answer.report(missing)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # before a run began, which has its own log
        problem = f"this file system takes no name of {max(map(len, Path(error.filename).parts))} letters"
        return answer.report(RunnerError.of(str(error.filename), problem, "use a shorter name", code="bad-value"))
    text, log = traceback_of(cause), error.log if isinstance(error, UnexpectedError) else None
    if log is None:
        number, name = tempfile.mkstemp(prefix="runner-", suffix=".log")
        log = Path(name)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
    words = without_password(" ".join(in_words(cause).split()))
    if is_out_of_host_memory(cause):
        from runner.device.host_memory import memory_left, size_in_words

        num_bytes, why = memory_left()
        words = f"out of host memory, {size_in_words(num_bytes)} {why}; use a smaller model or data, or raise the limit"
    lines = [f"error: unexpected error: {words}{own_line(cause)}"]
    if os.environ.get(VARIABLE):
        lines.append(text)
    lines.append(f"note: the traceback is in {log} ({VARIABLE}=1 prints it here)")
    print("\n".join(map(colored, lines) if has_colors(sys.stderr) else lines), file=sys.stderr)
    answer.give({"error": words, "traceback": str(log)})
    return 1
