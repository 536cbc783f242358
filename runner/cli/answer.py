"""Prints a command's answer, or its mistakes, for programs: with --json, all of stdout is one JSON document."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from runner.distributed.environment import rank_here
from runner.errors import MISTAKE, RunnerError, as_facts, finite, print_error, without_password

FLAG = "--json"
#: what has a command print a text, and do nothing
TEXTS = {"--help", "-h", "--version", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_is_given = False
_out: TextIO | None = None  # where answers go while a command runs that was asked for one


@contextmanager
def asked_for() -> Iterator[None]:
    """What this process and those that it starts print for a person goes to stderr, and answers to stdout."""
    global _out, _is_given
    stdout = sys.stdout
    stdout.flush()
    _is_given = False
    with redirect_stdout(sys.stderr), _inherited(stdout) as _out:
        try:
            yield
        finally:
            _out = None


def is_asked() -> bool:
    """Whether a program reads, and no person."""
    return _out is not None


def run(command: Callable[[list[str]], int], words: list[str]) -> int:
    """A command whose stdout is a JSON document, also where it only prints a text (--help) or is stopped. Returns its exit code."""
    with asked_for():
        said = io.StringIO()
        is_text = bool({word.partition("=")[0] for word in words} & TEXTS)
        with redirect_stdout(said) if is_text else nullcontext():
            code = command(words)
        place = rank_here(os.environ)
        if not _is_given and not (place is not None and place.rank):  # of several processes the first one answers
            give({"text": said.getvalue()} if is_text else {"exit_code": code})
        return code


def give(facts: Any) -> None:
    """Writes the answer, once a command; NaN and inf are null. Nothing, where nobody asked for it."""
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
    """What report.json in a sweep's folder holds, where one was written."""
    with suppress(FileNotFoundError):
        give({"folder": str(sweep), **json.loads((sweep / "report.json").read_text())})


def report(error: RunnerError) -> int:
    """Print the errors of the user on stderr, and give them as JSON. Returns their exit code."""
    print_error(error)
    give(as_facts(error))
    return MISTAKE


@contextmanager
def _inherited(stdout: TextIO) -> Iterator[TextIO]:
    """Processes inherit the descriptor, not sys.stdout: theirs is stderr's, and a copy of the old one is given."""
    try:
        is_real = stdout.fileno() == 1
    except (OSError, ValueError):  # somebody's buffer
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
