"""Runs the command that the words of the command line ask for, and returns its exit code. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys

from runner.cli import answer, unexpected
from runner.cli.commands import COMMANDS
from runner.cli.options import FORMS, HELP, help_of
from runner.config import untrusted
from runner.config.compose import make_own_code_importable, restored
from runner.config.instantiate import own_line
from runner.distributed.environment import UnmetError, rank_here
from runner.errors import MISTAKE, SECRETS, Fault, RunnerError
from runner.experiment.terminal import leave_unread

TRUST = "--trust"  # a run's folder, or a store's configuration, has been looked at


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
        verb = words.pop(0) if words and words[0] in COMMANDS else "train"
        with untrusted.trusting(TRUST in words):
            if verb in FORMS and HELP & set(words):
                return help_of(verb, COMMANDS[verb].__doc__ or "")
            code = COMMANDS[verb]([word for word in words if word != TRUST or verb == "reproduce"])
        print(end="", flush=True)  # at the interpreter's end nobody would catch what it meets
        return code
    except RunnerError as error:
        place = rank_here(os.environ)
        # of several processes the first one tells it
        is_told = place is not None and place.rank > 0 and not isinstance(error, UnmetError)
        return MISTAKE if is_told else answer.report(error)
    except SystemExit as end:  # Hydra's own flags, CheckFirst, a signal in a sweep
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


def _refuse_unread(words: list[str]) -> None:
    """Letters that this Python could not read from the command line: it takes them for ASCII, as LANG=C says."""
    unread = [word for word in words if any("\udc80" <= char <= "\udcff" for char in word)]
    if unread:
        problem = "this Python reads the command line as ASCII, and these letters are none"
        fix = "export PYTHONUTF8=1 (or LANG=C.UTF-8) before the command"
        raise RunnerError(*(Fault(ascii(word), problem, fix) for word in unread))
