"""Prints the result of a command or its errors, and the result for programs: with --json, stdout is one JSON document.

An unexpected error is one line on the screen; its traceback is in a file.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from runner.cli.table import CFG, HELP, INFO, SHELL
from runner.config import packages
from runner.errors import (
    CODE_ERRORS,
    MISTAKE,
    RunnerError,
    as_facts,
    colored,
    finite,
    has_colors,
    in_words,
    is_out_of_host_memory,
    own_line,
    print_error,
    traceback_of,
    without_password,
)

#: what makes a command print a text, and do nothing else
TEXTS = HELP | CFG | INFO | SHELL | {"--version"}
_is_given = False
_out: TextIO | None = None  # where the JSON goes while a command with --json runs


@contextmanager
def as_json() -> Iterator[None]:
    """What this process and those that it starts print goes to stderr, and the JSON to stdout."""
    global _out, _is_given
    stdout = sys.stdout
    stdout.flush()
    _is_given = False
    with redirect_stdout(sys.stderr), _inherited(stdout) as _out:
        try:
            yield
        finally:
            _out = None


def is_json() -> bool:
    """Whether --json is set."""
    return _out is not None


def is_later_rank() -> bool:
    """Whether this is one of several processes of a run, and not the first one, which prints."""
    from runner.distributed.environment import rank_here

    rank = rank_here(os.environ)
    return rank is not None and rank.rank > 0


def run(command: Callable[[list[str]], int], words: list[str]) -> int:
    """Run a command whose stdout is a JSON document, also if it prints a text (--help) or is stopped."""
    with as_json():
        printed = io.StringIO()
        is_text = bool({word.partition("=")[0] for word in words} & TEXTS)
        with redirect_stdout(printed) if is_text else nullcontext():
            code = command(words)
        if not _is_given and not is_later_rank():
            give({"text": printed.getvalue()} if is_text else {"exit_code": code})
        return code


def give(facts: Any) -> None:
    """Write the JSON, once per command; NaN and inf are null. Without --json, do nothing."""
    global _is_given
    if _out is not None:
        _is_given = True
        with suppress(BrokenPipeError):  # `... | head` has read enough
            print(json.dumps(_masked(finite(facts)), indent=2), file=_out, flush=True)


def _masked(facts: Any) -> Any:
    if isinstance(facts, Mapping):
        return {key: _masked(value) for key, value in facts.items()}
    if isinstance(facts, list | tuple):
        return [_masked(value) for value in facts]
    return facts if facts is None or isinstance(facts, bool | int | float) else without_password(str(facts))


def give_report(sweep: Path) -> None:
    """Write the contents of report.json in a sweep's directory, if there is one."""
    with suppress(FileNotFoundError):
        give({"folder": str(sweep), **json.loads((sweep / "report.json").read_text())})


def report(error: RunnerError) -> int:
    """Print the errors of the user on stderr, and write them as JSON. Returns their exit code."""
    print_error(error)
    give(as_facts(error))
    return MISTAKE


@contextmanager
def _inherited(stdout: TextIO) -> Iterator[TextIO]:
    """Point descriptor 1, which other processes inherit, to stderr, and yield a copy of the former one."""
    try:
        is_real = stdout.fileno() == 1
    except (OSError, ValueError):  # a buffer
        is_real = False
    if not is_real:
        yield stdout
        return
    copy = os.fdopen(os.dup(1), "w", encoding=stdout.encoding)
    os.dup2(2, 1)
    try:
        yield copy
    finally:
        os.dup2(copy.fileno(), 1)
        with suppress(BrokenPipeError):
            copy.close()


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
    except CODE_ERRORS as error:
        with (log := folder / "runner.log").open("a", encoding="utf-8") as file:
            file.write(traceback_of(error))
        raise UnexpectedError(log) from error


def report_unexpected(error: BaseException) -> int:
    """Print the error, the line of the user's code, and where the traceback is. Returns the exit code."""
    cause = error.__cause__ if isinstance(error, UnexpectedError) and error.__cause__ else error
    if isinstance(cause, ModuleNotFoundError) and (missing := packages.missing(cause)) is not None:
        return report(missing)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # before a run began, which has its own log
        problem = f"this file system takes no name of {max(map(len, Path(error.filename).parts))} letters"
        return report(RunnerError.of(str(error.filename), problem, "use a shorter name", code="bad-value"))
    text, log = traceback_of(cause), error.log if isinstance(error, UnexpectedError) else None
    if log is None:
        number, name = tempfile.mkstemp(prefix="runner-", suffix=".log")
        log = Path(name)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
    text_of_error = without_password(" ".join(in_words(cause).split()))
    if is_out_of_host_memory(cause):
        from runner.device.host_memory import memory_left, size_in_words

        num_bytes, why = memory_left()
        text_of_error = (
            f"out of host memory, {size_in_words(num_bytes)} {why}; use a smaller model or data, or raise the limit"
        )
    lines = [f"error: unexpected error: {text_of_error}{own_line(cause)}"]
    if os.environ.get(VARIABLE):
        lines.append(text)
    lines.append(f"note: the traceback is in {log} ({VARIABLE}=1 prints it here)")
    print("\n".join(map(colored, lines) if has_colors(sys.stderr) else lines), file=sys.stderr)
    give({"error": text_of_error, "traceback": str(log)})
    return 1
