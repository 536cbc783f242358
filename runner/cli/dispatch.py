"""Runs the command that the words of the command line ask for, and returns its exit code. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys

import hydra

from runner.cli import answer, completion, table, unexpected
from runner.cli.arguments import parse
from runner.cli.table import Arguments
from runner.cli.train import train_composed
from runner.config import trust
from runner.config.compose import config_groups, make_own_code_importable, restored
from runner.config.instantiate import own_line
from runner.distributed.environment import UnmetError, rank_here
from runner.errors import MISTAKE, SECRETS, Problem, RunnerError
from runner.experiment.terminal import leave_unread
from runner.version import __version__

HELP = {"--help", "-h"}
TRUST = "--trust"  # the configuration of a run's directory or of a store has been looked at


@restored(SECRETS)
def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0 done, 1 failed, 2 the person's mistake, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    if answer.FLAG not in words:
        return _run(words)
    return answer.run(_run, [word for word in words if word != answer.FLAG])


def _run(words: list[str]) -> int:
    logging.raiseExceptions = False  # a log that can't be written, on a full disk, is no reason for a traceback
    make_own_code_importable()
    code = 0
    try:
        _refuse_unread(words)
        code = _call(words)
        print(end="", flush=True)  # at the interpreter's end nobody would catch what it meets
        return code
    except RunnerError as error:
        place = rank_here(os.environ)
        # of several processes the first one tells it
        is_told = place is not None and place.rank > 0 and not isinstance(error, UnmetError)
        return MISTAKE if is_told else answer.report(error)
    except SystemExit as end:  # a signal in a sweep, or what Hydra prints
        if own_line(end):  # nobody else's code says how this command ends, and that all is well
            return unexpected.tell(end)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        # one that passed through an exec of text (a dataclass being made, in an import) has CPython end the process by the
        # signal, caught or not; the next exec of text takes that back (run_eval_code_obj in CPython's pythonrun.c)
        exec("")
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        leave_unread()
        return code
    except Exception as error:
        return unexpected.tell(error)


def _call(words: list[str]) -> int:
    named = table.find(words[0]) if words else None
    command, rest = (named, words[1:]) if named else (table.COMMANDS["train"], words)
    if set(completion.FLAGS) & set(words):
        return completion.complete(words, table.every_command(), lambda: train_composed(words, []))
    if HELP & set(rest):
        print(table.explain(named) if named else table.overview(config_groups()))
        return 0
    if "--version" in rest and not named:
        print(f"runner {__version__} (Hydra {hydra.__version__})")
        return 0
    with trust.trusting(TRUST in rest):
        rest = [word for word in rest if word != TRUST or command.option(TRUST)]
        is_train = command.name == "train"  # sorts its arguments itself: --info and -sc have arguments too
        return command(Arguments(command, rest, (), {}, [], []) if is_train else parse(command, rest))


def _refuse_unread(words: list[str]) -> None:
    """Letters that this Python could not read from the command line: it takes them for ASCII, as LANG=C says."""
    unread = [word for word in words if any("\udc80" <= char <= "\udcff" for char in word)]
    if unread:
        problem = "this Python reads the command line as ASCII, and these letters are none"
        fix = "export PYTHONUTF8=1 (or LANG=C.UTF-8) before the command"
        raise RunnerError(*(Problem(ascii(word), problem, fix) for word in unread))
