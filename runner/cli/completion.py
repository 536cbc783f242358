"""Shell completion for `runner` and `python -m runner` (hydra#1957): commands, options and runs; Hydra suggests the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.cli import table
from runner.command import Command
from runner.config.importing import restored
from runner.errors import RunnerError

MAX_FOLDERS = 20

BASH = """_runner_complete() {
    local line="${COMP_LINE:0:$COMP_POINT}" command="${COMP_LINE%% *}"
    case "$line" in
        *python*" -m runner "*) command="$command -m runner"; line="runner ${line#* -m runner }" ;;
        *python*) return ;;
        *) line="runner ${line#* }" ;;
    esac
    COMPREPLY=($(compgen -W "$(COMP_LINE="$line" COMP_POINT=${#line} eval "$command" -sc query=bash 2> /dev/null)" -- "${line##* }"))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _runner_complete runner python python3
"""
FISH = """function _runner_complete
    set -lx COMP_LINE (commandline -cp)
    set -l command runner
    if string match -q '* -m runner *' -- $COMP_LINE
        set command (string split ' ' -- $COMP_LINE)[1] -m runner
        set COMP_LINE (string replace -r '^.* -m runner ' 'runner ' -- $COMP_LINE)
    end
    $command -sc query=fish
end
complete -c runner -x -a '(_runner_complete)'
for name in python python3
    complete -c $name -n 'string match -q "* -m runner *" -- (commandline -cp)' -x -a '(_runner_complete)'
end
"""
INSTALL = {"bash": BASH, "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + BASH, "fish": FISH}


def complete(words: list[str]) -> int:
    """Do what `-sc install=SHELL` or `-sc query=SHELL` says."""
    action, _, shell = next((word for word in words if not word.startswith("-")), "").partition("=")
    if action not in ("install", "query") or shell not in INSTALL:
        fix = "run `" + "` or `".join(f'eval "$(python -m runner -sc install={name})"' for name in INSTALL) + "`"
        problem = f"there is completion for {', '.join(INSTALL)}"
        raise RunnerError.of(f"-sc {action}={shell}", problem, fix, code="bad-value")
    if action == "install":
        print(INSTALL[shell], end="")
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
    """Yield commands, options, runs and sweeps.

    Args:
        command: None while the first argument is typed.
        typed: The arguments after the command; the last one is unfinished.
        commands: All commands by name.
        here: The directory that has outputs/ and multirun/.
    """
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
