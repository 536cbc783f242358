"""Runs the command that the arguments name, and returns its exit code; completes commands for a shell (hydra#1957).

`--help` imports neither Hydra nor torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

from runner.cli import answer, table
from runner.command import Command
from runner.config.importing import make_own_code_importable, restored
from runner.errors import MISTAKE, SECRETS, RunnerError, leave_unread, own_line
from runner.version import __version__

MAX_FOLDERS = 20

#: by shell: the script in this directory, and what precedes it
SHELLS = {"bash": ("bash", ""), "zsh": ("bash", "autoload -U +X bashcompinit && bashcompinit\n"), "fish": ("fish", "")}
TRUST = "--trust"  # the user has looked at the configuration of a run's directory or of a store


@restored(SECRETS)
def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 success, 1 failure, 2 an error of the user, 130 Ctrl-C, 143 SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    if table.JSON not in words:
        return _run(words)
    return answer.run(_run, [word for word in words if word != table.JSON])


def _run(words: list[str]) -> int:
    logging.raiseExceptions = False  # no traceback for a log that can't be written, e.g., on a full disk
    make_own_code_importable()
    code = 0
    try:
        code = _call(words)
        print(end="", flush=True)  # an error of the last output appears here, not when the interpreter ends
        return code
    except RunnerError as error:
        from runner.distributed.environment import UnmetError

        is_reported = answer.is_later_rank() and not isinstance(error, UnmetError)  # by the first process
        return MISTAKE if is_reported else answer.report(error)
    except SystemExit as end:  # a signal in a sweep, or what Hydra prints
        if own_line(end):  # the user's code does not decide how this command ends
            return answer.report_unexpected(end)
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
        return answer.report_unexpected(error)


def _call(words: list[str]) -> int:
    named = table.find(words[0]) if words else None
    command, rest = (named, words[1:]) if named else (table.COMMANDS["train"], words)
    if table.SHELL & set(words):
        return complete(words)
    if table.HELP & set(rest):
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
        arguments = parse(command, [word for word in rest if word != TRUST or command.option(TRUST)])
        result = command.find_function()(arguments)
    code, facts = result if isinstance(result, tuple) else (result, None) if isinstance(result, int) else (0, result)
    if facts is not None:
        answer.give(facts)
    return code


def complete(words: list[str]) -> int:
    """Do what `-sc install=SHELL` or `-sc query=SHELL` says."""
    action, _, shell = next((word for word in words if not word.startswith("-")), "").partition("=")
    if action not in ("install", "query") or shell not in SHELLS:
        fix = "run `" + "` or `".join(f'eval "$(python -m runner -sc install={name})"' for name in SHELLS) + "`"
        problem = f"there is completion for {', '.join(SHELLS)}"
        raise RunnerError.of(f"-sc {action}={shell}", problem, fix, code="bad-value")
    if action == "install":
        name, head = SHELLS[shell]
        print(head + Path(__file__).with_name(f"completion.{name}").read_text(), end="")
        return 0
    commands = table.every_command()
    line = os.environ.get("COMP_LINE", "runner ")
    typed = line.split(" ")[1:]
    command = commands[typed[0]] if len(typed) > 1 and typed[0] in commands else None
    if command is not None:
        typed = typed[1:]
        line = " ".join(["runner", *typed])
    for suggestion in suggestions(command, typed, commands, Path.cwd()):
        print(suggestion)
    if command is not None and command.keys is None:
        return 0
    from runner.cli.train import train_composed

    with restored("COMP_LINE"):  # which Hydra reads
        os.environ["COMP_LINE"] = line
        return train_composed(words, [])


def suggestions(
    command: Command | None, typed: list[str], commands: Mapping[str, Command], here: Path
) -> Iterator[str]:
    """Yield commands (without a command), options, runs and sweeps below `here` that continue the last one of `typed`."""
    begun = typed[-1] if typed else ""
    names: list[str] = []
    if command is None:
        names = [*commands] if len(typed) <= 1 else []
    elif begun.startswith("-"):
        names = [option.name for option in command.options]
    elif len(typed) == 1 and command.values:
        is_sweep = command.values == "[SWEEP]"
        pattern = "multirun/*/*/ledger.jsonl" if is_sweep else "outputs/*/*/rerun.yaml"
        folders = sorted((path.parent for path in here.glob(pattern)), reverse=True)[:MAX_FOLDERS]
        names = [*([] if is_sweep else ["last"]), *(str(folder.relative_to(here)) for folder in folders)]
    yield from (name for name in names if name.startswith(begun))
