"""Runs the command that the arguments name, and returns its exit code. `--help` imports neither Hydra nor torch."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version

from runner.cli import answer, table
from runner.config import packages
from runner.config.importing import make_own_code_importable, restored
from runner.errors import MISTAKE, SECRETS, Problem, RunnerError, leave_unread, refuse
from runner.version import __version__

HELP = {"--help", "-h"}
SHELL_COMPLETION = {"-sc", "--shell-completion"}
TRUST = "--trust"  # the user has looked at the configuration of a run's directory or of a store


@restored(SECRETS)
def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 success, 1 failure, 2 an error of the user, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    if answer.FLAG not in words:
        return _run(words)
    return answer.run(_run, [word for word in words if word != answer.FLAG])


def _run(words: list[str]) -> int:
    logging.raiseExceptions = False  # no traceback for a log that can't be written, e.g., on a full disk
    make_own_code_importable()
    code = 0
    try:
        _check_encoding(words)
        code = _call(words)
        print(end="", flush=True)  # an error of the last output appears here, not when the interpreter ends
        return code
    except RunnerError as error:
        from runner.distributed.environment import UnmetError

        is_reported = answer.is_later_rank() and not isinstance(error, UnmetError)  # by the first process
        return MISTAKE if is_reported else answer.report(error)
    except SystemExit as end:  # a signal in a sweep, or what Hydra prints
        from runner.config.instantiate import own_line

        if own_line(end):  # the user's code does not decide how this command ends
            return _report(end)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        # One that passed through an exec of text (a dataclass in an import) makes CPython end the process by the signal,
        # caught or not; the next exec of text takes that back (run_eval_code_obj in CPython's pythonrun.c).
        exec("")
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        leave_unread()
        return code
    except Exception as error:
        return _report(error)


def _report(error: BaseException) -> int:
    if isinstance(error, ModuleNotFoundError) and (missing := packages.missing(error)) is not None:
        return answer.report(missing)
    from runner.cli import unexpected

    return unexpected.report(error)


def _call(words: list[str]) -> int:
    named = table.find(words[0]) if words else None
    command, rest = (named, words[1:]) if named else (table.COMMANDS["train"], words)
    if SHELL_COMPLETION & set(words):
        from runner.cli import completion

        return completion.complete(words)
    if HELP & set(rest):
        print(table.explain(named) if named else table.overview())
        return 0
    if "--version" in rest and not named:
        print(f"runner {__version__} (Hydra {version('hydra-core')})")
        return 0
    from runner.cli.arguments import parse, refuse_misspelt
    from runner.config import trust

    if not named:
        refuse_misspelt(rest)
    with trust.trusting(TRUST in rest):
        given = parse(command, [word for word in rest if word != TRUST or command.option(TRUST)])
        result = command.find_function()(given)
    code, facts = result if isinstance(result, tuple) else (result, None) if isinstance(result, int) else (0, result)
    if facts is not None:
        answer.give(facts)
    return code


def _check_encoding(words: list[str]) -> None:
    """Raises: RunnerError for letters that this Python could not decode, as LANG=C says that they are ASCII."""
    problem = "this Python reads the command line as ASCII, and these letters are not ASCII"
    fix = "run `export PYTHONUTF8=1` before the command"
    unread = [word for word in words if any("\udc80" <= char <= "\udcff" for char in word)]
    refuse(Problem(ascii(word), problem, fix, code="bad-argument") for word in unread)
