"""Parses the arguments of a command: its runs, its own options, and Hydra's flags and overrides. Imports nothing heavy."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.cli import answer, table
from runner.cli.table import CFG, COMMANDS, INFO, JSON, MULTIRUN, SHELL, SHOWS
from runner.command import ANY_KEY, Arguments, Command, Option
from runner.config import compose, override_errors
from runner.config.identity import key_of
from runner.config.instantiate import ALLOW_VARIABLE
from runner.config.other_names import COMMANDS as OTHER_NAMES
from runner.errors import Problem, RunnerError, nearest, refuse, use, without_password


def _configuration(option: Option, value: str) -> str:
    if value not in (known := ("job", "hydra", "all")):
        ways = [f"{option.name} {each}" for each in nearest(value, known) or known]
        problem = f"`{option.name}` must be job, hydra or all, got `{value}`"
        raise RunnerError.suggest(f"{option.name} {value}", problem, ways)
    return value


def _directory(option: Option, value: str) -> str:
    if not Path(value).is_dir():
        near = nearest(str(Path(value)), [str(each) for each in Path(value).parent.glob("*/")])
        ways = [f"{option.name} {shlex.quote(hit)}" for hit in near]
        source, problem = f"{option.name} {value}", f"there is no directory `{value}`"
        raise RunnerError.suggest(source, problem, ways, "name one that exists", code="missing-file")
    return value


def _no_directory(option: Option, value: str) -> str:
    problem = "`-cp` would replace the built-in configuration, and `-cd` adds a directory to it"
    raise RunnerError.suggest(f"{option.name} {value}", problem, [f"-cd {value}"], code="unknown-flag")


READERS = {"--cfg": _configuration, "--config-path": _no_directory, "--config-dir": _directory}
#: Hydra's flags with what stands for their value, and --allow
FLAGS = {
    name: Option(name, value, read=READERS.get(names[0], Option.read))
    for names, value in {
        ("--cfg", "-c"): "job",
        ("--package", "-p"): "optimizer",
        ("--config-path", "-cp"): "FOLDER",
        ("--config-name", "-cn"): "NAME",
        ("--config-dir", "-cd"): "FOLDER",
        ("--allow",): "timm",
        ("--info", "-i", "--resolve", "--help", "-h", "--version"): "",
        ("--run", "-r", "--multirun", "-m", "--shell-completion", "-sc"): "",
    }.items()
    for name in names
}
#: Hydra does one of these
EXCLUSIVE = (MULTIRUN, {"-r", "--run"}, CFG, INFO, SHELL)
#: how the next flag begins, as opposed to a value
OPTION = re.compile(r"-[^\d.]|-$")


def parse(command: Command, words: Sequence[str]) -> Arguments:
    """Parse the arguments of a command. Flags may be anywhere (hydra#3053).

    Raises:
        RunnerError: All errors in them: unknown flags, values out of range, flags that are missing, keys that the
            command does not take.
    """
    words = [_unquoted(word) for word in words]
    rest = [*words]
    problems: list[Problem] = []
    values: list[str] = []
    flags: list[str] = []
    overrides: list[str] = []
    options: dict[str, Any] = {option.name: option.default if option.value else False for option in command.options}
    missing = {option.name: option for option in command.options if option.is_required}
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        own = command.option(f"{name}=" if equals and argument[:1] != "-" else name)
        option = own or (FLAGS.get(name) if command.keys is not None else None)
        if not argument:
            problem, fix = "an argument is empty; perhaps a variable is not set", "leave it out, or set the variable"
            problems.append(Problem(f"{command.name} ''", problem, fix, code="bad-argument"))
        elif option is not None and (option.value or not equals or own is None):
            missing.pop(option.name, None)
            if option.value and not equals and rest and not OPTION.match(rest[0]):
                text = rest.pop(0)
            try:
                value = _read(option, text)
            except RunnerError as error:
                problems += error.problems
                continue
            if own is not None:
                options[own.name] = value
            elif name == "--allow":
                before = os.environ.get(ALLOW_VARIABLE)
                os.environ[ALLOW_VARIABLE] = f"{before},{text}" if before else text
            else:
                flags += [name, text] if option.value else [argument]
                if name in INFO and rest and "=" not in rest[0] and rest[0][:1] not in "-~":  # --info searchpath
                    flags.append(rest.pop(0))
        elif not argument.startswith("-") and _is_value(command, argument) and len(values) < command.max_values:
            values.append(argument)
        elif command.keys is not None and (argument[:1] == "~" or ("=" in argument and argument[:1] not in "-=")):
            overrides.append(argument)
        else:
            problems.append(_unknown(command, argument, values, rest, missing))
    for option in missing.values():
        source, problem = f"{command.name} without {option.name}", f"`{command.name}` needs `{option.usage}`"
        problems.append(Problem(source, problem, f"add `{option.usage}`; see `{_help(command)}`", code="missing-value"))
    if command.keys is not None:
        flags, overrides = _checked(command, words, flags, overrides, problems)
        problems += _flag_problems(command, flags)
        problems += _key_problems(command, overrides)
    if problems and overrides and command.composes and _are_apart(problems, overrides):
        problems += _errors_of_composition(command, flags, overrides)
    refuse(dict.fromkeys(problems))
    return Arguments(command, [*words], tuple(values), options, flags, overrides, answer.is_json())


def _read(option: Option, text: str) -> Any:
    if not option.value:
        return True
    if not text and not option.name.endswith("="):
        problem = f"`{option.name}` needs a value"
        raise RunnerError.of(option.name, problem, use(option.usage), code="missing-value")
    return option.read(option, text)


def _is_value(command: Command, argument: str) -> bool:
    """Whether it is a positional argument: a run, a sweep (perhaps SWEEP:KEY=VALUE) or a directory."""
    if command.max_values == 0 or argument[:1] in "-~":
        return False
    name, equals, _ = argument.partition("=")
    path = Path(argument)
    with suppress(OSError):  # an override may be longer than a file's name
        if path.is_dir() or (path.suffix == ".pt" and path.is_file()):
            return True  # the name of a job's directory may contain `=`
    return not equals or (command.keys is None and not {":", "/"}.isdisjoint(name))


def _help(command: Command) -> str:
    return f"python -m runner {command.name} --help"


def _unknown(
    command: Command, argument: str, values: Sequence[str], rest: list[str], missing: dict[str, Option]
) -> Problem:
    """Return the error for an argument that the command does not take; its value is removed from `rest`."""
    name, equals, value = argument.partition("=")
    is_flag = argument[:1] == "-"
    if _is_value(command, argument):
        problem = f"`{command.name}` takes one {command.values.strip('[]').lower()} at a time"
        ways = [f"python -m runner {command.name} {shlex.quote(values[0])}"]
        return Problem.suggest(f"{command.name} {argument}", problem, ways, code="bad-argument")
    own = {option.name: option for option in command.options}
    hits = nearest(f"{name}=" if equals and not is_flag else name, (*own, JSON))
    meant = own.get(hits[0]) if hits else None
    if meant is not None and meant.value:
        missing.pop(meant.name, None)  # else it would also be reported as missing
    if rest and not equals and not OPTION.match(rest[0]) and "=" not in rest[0].lstrip("="):  # --epochs 3, epochs = 3
        is_taken = meant.value if meant else command.keys == ANY_KEY and rest[0] not in COMMANDS
        value = rest.pop(0) if is_taken else ""
        if value == "=" and rest:  # epochs = 3
            value += f" {rest.pop(0)}"
    ways = [_typed(own[hit], value) if hit in own else hit for hit in hits]
    if command.keys != ANY_KEY or ways:
        source = f"{name} {value}".rstrip() if is_flag else argument
        problem = f"`{command.name}` does not take `{name if equals else argument}`"
        return Problem.suggest(source, problem, ways, f"leave it out; see `{_help(command)}`", code="unknown-flag")
    source = f"{name} {value}".rstrip()
    key, text = name.lstrip("-").replace("-", "_"), value.lstrip("= ") or ("true" if is_flag else "")
    ways = override_errors.suggestions(key, [text], compose.composer([])([])) if key else []
    if is_flag:
        ways = ways or [_typed(FLAGS[hit], value) for hit in nearest(name, FLAGS)]
        problem, otherwise = f"unknown flag `{name}`; values are set without dashes", "leave it out; see `--help`"
        return Problem.suggest(source, problem, ways, otherwise, code="unknown-flag")
    ways += [f"python -m runner {each}" for each in _commands_like(argument)]
    problem = f"`{argument}` is neither KEY=VALUE, without spaces, nor a command, which would be the first argument"
    otherwise = "leave it out, or write KEY=VALUE, in quotes where it has spaces"
    return Problem.suggest(source, problem, ways, otherwise, code="bad-argument")


def _typed(option: Option, value: str) -> str:
    if not option.value:
        return option.name
    text = shlex.quote(value) if value else option.value
    return f"{option.name}{text}" if option.name.endswith("=") else f"{option.name} {text}"


def refuse_misspelt(words: Sequence[str]) -> None:
    """Raises: RunnerError where the first argument looks like a command; a suggestion is the whole command line."""
    first = words[0] if words else "-"
    if "=" in first or first[:1] in ("-", "~") or words[1:2] == ["="]:
        return
    meant = _commands_like(first)
    if meant and first not in compose.known_keys():
        typed = shlex.join(["python", "-m", "runner", *meant[0].split(), *words[1:]])
        problem = f"there is no command `{first}`"
        raise RunnerError.suggest(shlex.join(words), problem, [typed], code="unknown-command")


def _commands_like(argument: str) -> list[str]:
    return (
        [OTHER_NAMES[argument.lower()]]
        if argument.lower() in OTHER_NAMES
        else nearest(argument, table.every_command())[:1]
    )


def _checked(
    command: Command, words: Sequence[str], flags: list[str], overrides: list[str], problems: list[Problem]
) -> tuple[list[str], list[str]]:
    """Return the flags, with -m for a sweep, and the overrides."""
    modes = [override for override in overrides if override.startswith("hydra.mode=")]
    if modes and modes[-1] == "hydra.mode=MULTIRUN":
        flags, overrides = ["-m", *flags], [override for override in overrides if override not in modes]
    exclusive = [next(flag for flag in flags if flag in kind) for kind in EXCLUSIVE if kind & {*flags}]
    if MULTIRUN & {*flags} and "hydra.mode=RUN" in modes[-1:]:
        exclusive = ["-m", "hydra.mode=RUN"]
    if len(exclusive) > 1:
        problem = "these arguments can't be combined"
        problems.append(Problem.suggest(" ".join(exclusive), problem, exclusive, code="conflict"))
    if {*INFO, *SHELL} & {flag.partition("=")[0] for flag in flags}:
        return [*words], []  # these read their own arguments
    for flag in flags if not CFG & {*flags} else ():
        if flag in SHOWS:
            problem = f"`{flag}` says how `--cfg` prints"
            problems.append(Problem.suggest(flag, problem, [f"--cfg job {flag}"], code="conflict"))
    values = [
        override for override in overrides if not override.startswith("~") and "={" not in override
    ]  # mappings are merged
    last = {key_of(override): override for override in values}
    for override in values:
        if (later := last[key_of(override)]) != override:
            print(
                f"note: {without_password(override)} has no effect: {without_password(later)} follows", file=sys.stderr
            )
    several = [override for override in overrides if override_errors.has_several(override)]
    if several and not MULTIRUN & {*flags}:
        if not problems and compose.asks_for_a_sweep(flags, overrides):
            flags = ["-m", *flags]
        elif problems or not command.composes or any(override.startswith("sweep.zip=") for override in several):
            takes_sweep = command.hydra_flags >= MULTIRUN
            problems += [override_errors.ambiguous(override, takes_sweep=takes_sweep) for override in several]
        # else the composition reports them, next to other errors
    return list(dict.fromkeys(flags)) if flags.count("-m") > 1 else flags, overrides


def _unquoted(word: str) -> str:
    """Remove the quotes of a suggestion that no shell has removed: no override begins with one."""
    return word[1:-1] if word[:1] in ("'", '"') and word[:1] == word[-1:] and "=" in word else word


def _are_apart(problems: Sequence[Problem], overrides: Sequence[str]) -> bool:
    """Whether the overrides can be judged without the refused flags: none of these chooses a file or a directory."""
    meant = [each.partition("=")[0] for problem in problems for each in problem.suggestions if "=" in each]
    are_flags = all(problem.code == "unknown-flag" for problem in problems)
    return are_flags and all("." in key for key in meant) and not any(map(override_errors.has_several, overrides))


def _errors_of_composition(command: Command, flags: list[str], overrides: list[str]) -> tuple[Problem, ...]:
    """Return the errors of the other arguments, which are then reported together with an unknown flag."""
    from runner.cli.train import check
    from runner.tools.plan.command import check as check_plan

    make = compose.composer([flag for flag in flags if flag not in MULTIRUN])
    judge = check_plan if command.name == "plan" else check
    try:
        with override_errors.explained(overrides, compose=make, check=judge):
            judge(make(overrides))
    except RunnerError as error:
        return error.problems
    return ()


def _flag_problems(command: Command, flags: Sequence[str]) -> Iterator[Problem]:
    for flag in dict.fromkeys(each.partition("=")[0] for each in flags if each.startswith("-")):
        if flag not in command.hydra_flags:
            problem = f"`{command.name}` {'takes one run at a time, without' if flag in MULTIRUN else 'does not take'} `{flag}`"
            fix = f"leave it out; see `{_help(command)}`"
            yield Problem(f"{command.name} {flag}", problem, fix, code="unknown-flag")


def _key_problems(command: Command, overrides: Sequence[str]) -> list[Problem]:
    keys = command.keys or ()
    listed = ", ".join(f"{key}..." if key.endswith(".") or key == "data" else key for key in keys) or "none"
    problem = f"`{command.name}` takes the run as it was; what may be changed: {listed}"
    refused = [override for override in overrides if not any(_is_of(override, key) for key in keys)]
    fix = f"leave it out; see `{_help(command)}`"
    return [Problem(override, problem, fix, code="unknown-key") for override in refused]


def _is_of(override: str, beginning: str) -> bool:
    # arguments of other data may be removed with ~
    key = override.partition("=")[0].lstrip("+~" if beginning in ("data", *ANY_KEY) else "+")
    if beginning.endswith(".") or not beginning:
        return key.startswith(beginning)
    return key == beginning or key.startswith(f"{beginning}.")
