"""Completes commands in a shell: suggests the words that may follow, and gives the lines that make the shell ask.

Hydra completes its keys and groups for a program of one word. Here are the commands, the runs' folders, and `python -m runner`
(hydra#1957).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from runner.cli.table import Command
from runner.config.compose import restored
from runner.errors import Problem, RunnerError

FLAGS = ("-sc", "--shell-completion")
MOST_FOLDERS = 20

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
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
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
INSTALL = {"bash": BASH, "zsh": ZSH + BASH, "fish": FISH}
UNINSTALL = {
    "bash": "complete -r runner python python3; unset -f _runner_complete\n",
    "zsh": "complete -r runner python python3; unset -f _runner_complete\n",
    "fish": "for name in runner python python3; complete -e -c $name; end; functions -e _runner_complete\n",
}


def complete(words: list[str], commands: Mapping[str, Command], ask_hydra: Callable[[], int]) -> int:
    """Do what `-sc install=SHELL`, `uninstall=SHELL` or `query=SHELL` asks for. ask_hydra: prints Hydra's suggestions."""
    what, _, shell = next((word for word in words if word not in FLAGS), "").partition("=")
    if what not in ("install", "uninstall", "query") or shell not in INSTALL:
        fix = " or ".join(f'eval "$(python -m runner -sc install={name})"' for name in INSTALL)
        raise RunnerError(Problem(f"-sc {what}={shell}", f"there is completion for {', '.join(INSTALL)}", fix))
    if what != "query":
        print((INSTALL if what == "install" else UNINSTALL)[shell], end="")
        return 0
    command, typed, line = _split(os.environ.get("COMP_LINE", "runner "), commands)
    for found in suggestions(command, typed, commands, Path.cwd()):
        print(found)
    if command is not None and command.keys is None:
        return 0
    with restored("COMP_LINE"):  # which Hydra reads
        os.environ["COMP_LINE"] = line
        return ask_hydra()


def suggestions(
    command: Command | None, typed: list[str], commands: Mapping[str, Command], here: Path
) -> Iterator[str]:
    """Yield suggestions besides Hydra's: commands, flags, runs and sweeps.

    command: None while the first word is typed. typed: what follows it, the last one unfinished.
    """
    begun = typed[-1] if typed else ""
    if command is None and len(typed) <= 1:
        yield from (name for name in commands if name.startswith(begun))
    if command is None:
        return
    if begun.startswith("-"):
        yield from (option.name for option in command.options if option.name.startswith(begun))
    elif len(typed) == 1 and command.values:
        of_sweeps = command.values == "[SWEEP]"
        pattern = "multirun/*/*/ledger.jsonl" if of_sweeps else "outputs/*/*/rerun.yaml"
        folders = sorted((path.parent for path in here.glob(pattern)), reverse=True)[:MOST_FOLDERS]
        names = ([] if of_sweeps else ["last"]) + [str(folder.relative_to(here)) for folder in folders]
        yield from (name for name in names if name.startswith(begun))


def _split(line: str, commands: Mapping[str, Command]) -> tuple[Command | None, list[str], str]:
    words = line.split(" ")[1:]
    if len(words) > 1 and words[0] in commands:
        return commands[words[0]], words[1:], " ".join(["runner", *words[1:]])
    return None, words, line
