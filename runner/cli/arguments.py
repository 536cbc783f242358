"""Parses the arguments of a command: its runs, its own options, and Hydra's flags and overrides. Imports nothing heavy."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.cli import answer, table
from runner.cli.table import COMMANDS, JSON, MULTIRUN, ONE_RUN
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
        parent = Path(value).parent
        near = nearest(str(Path(value)), [str(each) for each in parent.glob("*/")] if parent.is_dir() else [])
        ways, otherwise = [f"{option.name} {shlex.quote(hit)}" for hit in near], "name a directory that exists"
        problem = f"there is no directory `{value}`"
        raise RunnerError.suggest(f"{option.name} {value}", problem, ways, otherwise, code="missing-file")
    return value


def _no_directory(option: Option, value: str) -> str:
    problem = "`-cp` would replace the built-in configuration, and `-cd` adds a directory to it"
    raise RunnerError.suggest(f"{option.name} {value}", problem, [f"-cd {value}"], code="unknown-flag")


def _any_value(option: Option, value: str) -> str:
    return value


INFO = frozenset({"--info", "-i"})
SHELL = frozenset({"--shell-completion", "-sc"})
CFG = frozenset({"--cfg", "-c"})
#: Hydra's flags, and --allow
FLAGS = {
    name: Option(name, value, read=read)
    for names, value, read in (
        (("--cfg", "-c"), "job", _configuration),
        (("--package", "-p"), "optimizer", _any_value),
        (("--config-path", "-cp"), "FOLDER", _no_directory),
        (("--config-name", "-cn"), "NAME", _any_value),
        (("--config-dir", "-cd"), "FOLDER", _directory),
        (("--allow",), "timm", _any_value),
        (("--info", "-i", "--help", "-h", "--version", "--resolve"), "", _any_value),
        (("--run", "-r", "--multirun", "-m", "--shell-completion", "-sc"), "", _any_value),
    )
    for name in names
}
#: Hydra does one of these
EXCLUSIVE = (MULTIRUN, {"-r", "--run"}, CFG, INFO, SHELL)
#: how the next flag begins, as opposed to a value
OPTION = re.compile(r"-[^\d.]|-$")


def parse(command: Command, words: Sequence[str]) -> Arguments:
    """Parse the arguments of a command. Flags may be anywhere (hydra#3053).

    Args:
        command: The command that they follow.
        words: As they were typed.

    Raises:
        RunnerError: All errors in them: unknown flags, values out of range, flags that are missing, keys that the
            command does not take.
    """
    rest, problems = _joined(words) if command.keys is not None else ([*words], [])
    values: list[str] = []
    flags: list[str] = []
    overrides: list[str] = []
    options: dict[str, Any] = {option.name: option.default if option.value else False for option in command.options}
    missing = {option.name: option for option in command.options if option.is_required}
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        own = command.option(f"{name}=" if equals and word[:1] != "-" else name)
        option = own or (FLAGS.get(name) if command.keys is not None else None)
        if not word:
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
                flags += [name, text] if option.value else [word]
        elif not word.startswith("-") and _is_value(command, word) and len(values) < command.max_values:
            values.append(word)
        elif word.startswith("-") or command.keys is None or (_is_value(command, word) and command.keys != ANY_KEY):
            problems.append(_unknown(command, word, values, rest, missing))
        else:
            overrides.append(word)
    for option in missing.values():
        source, problem = f"{command.name} without {option.name}", f"`{command.name}` needs `{option.usage}`"
        problems.append(Problem(source, problem, f"add `{option.usage}`; see `{_help(command)}`", code="missing-value"))
    if command.keys is not None:
        flags, overrides = _checked(command, words, flags, overrides, problems)
        problems += _flag_problems(command, values, flags)
        problems += _key_problems(command, overrides)
    refuse(dict.fromkeys(problems))
    return Arguments(command, [*words], tuple(values), options, flags, overrides, answer.is_json())


def sorted_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's flags and the overrides of a training. Raises: RunnerError."""
    found = parse(COMMANDS["train"], words)
    return found.flags, found.overrides


def _read(option: Option, text: str) -> Any:
    if not option.value:
        return True
    if not text and not option.name.endswith("="):
        problem = f"`{option.name}` needs a value"
        raise RunnerError.of(option.name, problem, use(option.usage), code="missing-value")
    return option.read(option, text)


def _is_value(command: Command, word: str) -> bool:
    """Whether it is a positional argument: a run, a sweep (perhaps SWEEP:KEY=VALUE) or a directory."""
    if command.max_values == 0 or word[:1] in "-~":
        return False
    name, equals, _ = word.partition("=")
    return not equals or is_a_runs_path(word) or (command.keys is None and not {":", "/"}.isdisjoint(name))


def is_a_runs_path(word: str) -> bool:
    """Return whether it is a directory or a checkpoint: the name of a job's directory may contain `=`."""
    path = Path(word)
    try:
        return path.is_dir() or (path.suffix == ".pt" and path.is_file())
    except OSError:  # an override may be longer than a file's name
        return False


def _help(command: Command) -> str:
    return f"python -m runner {command.name} --help"


def _unknown(
    command: Command, word: str, values: Sequence[str], rest: list[str], missing: dict[str, Option]
) -> Problem:
    """Return the error for an argument that the command does not take; its value is removed from `rest`."""
    name, equals, value = word.partition("=")
    if _is_value(command, word):
        problem = f"`{command.name}` takes one {command.values.strip('[]').lower()} at a time"
        ways = [f"python -m runner {command.name} {shlex.quote(values[0])}"]
        return Problem.suggest(f"{command.name} {word}", problem, ways, code="bad-argument")
    own = {option.name: option for option in command.options}
    hits = nearest(f"{name}=" if equals and name[:1] != "-" else name, (*own, JSON))
    meant = own.get(hits[0]) if hits else None
    if meant is not None and meant.value:
        missing.pop(meant.name, None)  # else it would also be reported as missing
    is_taken = word[:1] == "-" and not equals and rest and not OPTION.match(rest[0])
    if is_taken and (meant.value if meant else command.keys == ANY_KEY and "=" not in rest[0]):
        value = rest.pop(0)
    shown = [_typed(own[hit], value) if hit in own else hit for hit in hits]
    if command.keys != ANY_KEY or shown:
        source = f"{command.name} {name} {value}" if word[:1] == "-" else f"{command.name} {word}"
        problem = f"`{command.name}` does not take `{name if equals else word}`"
        otherwise = f"leave it out; see `{_help(command)}`"
        return Problem.suggest(source.rstrip(), problem, shown, otherwise, code="unknown-flag")
    ways = _suggestions(name.lstrip("-").replace("-", "_"), value or "true")
    ways = ways or [_typed(FLAGS[hit], value) for hit in nearest(name, FLAGS)]
    problem, otherwise = f"unknown flag `{name}`; values are set without dashes", "leave it out; see `--help`"
    return Problem.suggest(f"{name} {value}".rstrip(), problem, ways, otherwise, code="unknown-flag")


def _typed(option: Option, value: str) -> str:
    if not option.value:
        return option.name
    text = shlex.quote(value) if value else option.value
    return f"{option.name}{text}" if option.name.endswith("=") else f"{option.name} {text}"


def _suggestions(key: str, value: str) -> list[str]:
    composed = compose.composer([])
    return override_errors.suggestions(key, [value], composed([]), composed)


def refuse_misspelt(words: Sequence[str]) -> None:
    """Raises: RunnerError where the first argument looks like a command; a suggestion is the whole command line."""
    first = words[0] if words else "-"
    if "=" in first or first[:1] in ("-", "~") or words[1:2] == ["="]:
        return
    names = [*table.every_command()]
    meant = _commands_like(first, names)
    if meant and first not in compose.known_keys():
        problem, after = f"there is no command `{first}`", words[1:]
        if meant == ["--help"] and after and after[0] in names:  # help train
            meant, after = [after[0]], ["--help"]
        typed = shlex.join(["python", "-m", "runner", *meant[0].split(), *after])
        raise RunnerError.suggest(shlex.join(words), problem, [typed], code="unknown-command")


def _commands_like(word: str, names: Sequence[str]) -> list[str]:
    return [OTHER_NAMES[word.lower()]] if word.lower() in OTHER_NAMES else nearest(word, names)[:1]


def _checked(
    command: Command,
    words: Sequence[str],
    flags: list[str],
    overrides: list[str],
    problems: list[Problem],
) -> tuple[list[str], list[str]]:
    """Return the flags, with -m for a sweep, and the overrides."""
    modes = [word for word in overrides if word.startswith("hydra.mode=")]
    if modes and modes[-1] == "hydra.mode=MULTIRUN":
        flags, overrides = ["-m", *flags], [word for word in overrides if word not in modes]
    elif modes and modes[-1] == "hydra.mode=RUN" and MULTIRUN & {*flags}:
        problem = "`-m` trains a sweep, and `hydra.mode=RUN` trains one run"
        problems.append(Problem.suggest("-m hydra.mode=RUN", problem, ["-m", "hydra.mode=RUN"], code="conflict"))
    exclusive = [next(flag for flag in flags if flag in kind) for kind in EXCLUSIVE if kind & {*flags}]
    if len(exclusive) > 1:
        problem = "these flags can't be combined"
        problems.append(Problem.suggest(" ".join(exclusive), problem, exclusive, code="conflict"))
    if {*INFO, *SHELL} & {flag.partition("=")[0] for flag in flags}:
        return [*words], []  # these read their own arguments
    only_with_cfg = [flag for flag in flags if flag in ("--resolve", "--package", "-p") and not CFG & {*flags}]
    for flag in only_with_cfg:
        problem = f"`{flag}` says how `--cfg` prints"
        problems.append(Problem.suggest(flag, problem, [f"--cfg job {flag}"], code="conflict"))
    problems += _not_settings(overrides)
    values = [word for word in overrides if not word.startswith("~") and "={" not in word]  # mappings are merged
    last = {key_of(word): word for word in values}
    for word in values:
        if (later := last[key_of(word)]) != word:
            print(f"note: {without_password(word)} has no effect: {without_password(later)} follows", file=sys.stderr)
    several = [word for word in overrides if override_errors.has_several(word)]
    if several and not MULTIRUN & {*flags}:
        if not problems and compose.asks_for_a_sweep(flags, overrides):
            flags = ["-m", *flags]
        elif problems or not command.composes or any(word.startswith("sweep.zip=") for word in several):
            takes_sweep = command.hydra_flags >= MULTIRUN
            problems += [override_errors.ambiguous(word, takes_sweep=takes_sweep) for word in several]
        # else the composition reports them, next to other errors
    return list(dict.fromkeys(flags)) if flags.count("-m") > 1 else flags, overrides


def _flag_problems(command: Command, values: Sequence[str], flags: Sequence[str]) -> Iterator[Problem]:
    asked = f"{command.name} {shlex.join(values)}".rstrip()
    is_run = bool(values) and Path(values[0]).is_dir()
    shown = shlex.join(["-cd", values[0], "-cn", "rerun"]) if is_run else "..."  # the same configuration, for train
    for flag in dict.fromkeys(word.partition("=")[0] for word in flags if word.startswith("-")):
        if flag in command.hydra_flags:
            continue
        problem, fix = f"`{command.name}` does not take `{flag}`", f"leave out `{flag}`"
        if flag in MULTIRUN:
            problem += ": it takes one run at a time"
        elif flag in ONE_RUN:
            problem += ": it takes the configuration of the run"
        else:
            fix += f"; to see the configuration, run `python -m runner {shown} --cfg job`"
        yield Problem(f"{asked} {flag}", problem, fix, code="unknown-flag")


def _key_problems(command: Command, overrides: Sequence[str]) -> list[Problem]:
    keys = command.keys or ()
    listed = ", ".join(f"{key}..." if key.endswith(".") or key == "data" else key for key in keys) or "none"
    problem = f"`{command.name}` takes the run as it was; what may be changed: {listed}"
    refused = [word for word in overrides if not any(_is_of(word, key) for key in keys)]
    fix = f"leave it out; see `{_help(command)}`"
    return [Problem(word, problem, fix, code="unknown-key") for word in refused]


def _is_of(word: str, beginning: str) -> bool:
    # arguments of other data may be removed with ~
    key = word.partition("=")[0].lstrip("+~" if beginning in ("data", *ANY_KEY) else "+")
    if beginning.endswith(".") or not beginning:
        return key.startswith(beginning)
    return key == beginning or key.startswith(f"{beginning}.")


def _not_settings(overrides: Sequence[str]) -> list[Problem]:
    if all(map(_is_setting, overrides)):
        return []
    problems = []
    known, names = compose.known_keys(), [*table.every_command()]
    left = list(overrides)
    while left:
        word = left.pop(0)
        if _is_setting(word):
            continue
        if word in names:
            ways = [f"python -m runner {word}"]
            problem = f"the command `{word}` must be the first argument"
            problems.append(Problem.suggest(word, problem, ways, code="unknown-command"))
            continue
        has_value = left and not _is_setting(left[0]) and left[0] not in (*names, *known)  # epochs 3
        value = left.pop(0) if has_value else ""
        ways = [*_suggestions(word, value), *(f"python -m runner {name}" for name in _commands_like(word, names))]
        problem = f"`{word}` is neither a command nor KEY=VALUE; `--help` lists both"
        otherwise = "leave it out, or write KEY=VALUE"
        problems.append(Problem.suggest(f"{word} {value}".strip(), problem, ways, otherwise, code="bad-argument"))
    return problems


def _is_setting(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _joined(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Remove the settings that spaces have cut, such as `model = mlp` and `model.hidden_sizes=[64, 32]`, as errors."""
    rest: list[str] = []
    problems = []
    left = list(words)
    while left:
        first = left.pop(0)
        parts, is_setting = [first], "=" in first and first[:1] != "-"
        while left and is_setting and "=" not in left[0] and _is_open(" ".join(parts)):
            parts.append(left.pop(0))
        typed, problem = " ".join(parts), "a value with a space needs quotes"
        if re.fullmatch(r"[+~]*\w[\w./@]*=?", first) and left and (left[0][:1] == "=" or _is_cut(first, left[0])):
            parts.append(left.pop(0))
            parts += [left.pop(0)] if parts[-1] == "=" and left else []
            typed, problem = "".join(parts), "there must be no space around ="
        if len(parts) == 1:
            rest += parts
        else:
            problems.append(Problem.suggest(" ".join(parts), problem, [shlex.quote(typed)]))
    return rest, problems


def _is_cut(first: str, following: str) -> bool:
    return first[-1] == "=" and re.match(r"[^-+~]", following) is not None and "=" not in following


def _is_open(text: str) -> bool:
    is_quoted = "'" in text or '"' in text
    return not is_quoted and sum(map(text.count, "[{(")) > sum(map(text.count, "]})"))
