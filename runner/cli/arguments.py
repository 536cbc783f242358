"""Parses the arguments of a command: its runs, its own flags, and Hydra's flags and overrides. Imports nothing heavy."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.cli import table
from runner.cli.table import ANY_KEY, JSON, MULTIRUN, ONE_RUN, Arguments, Command
from runner.config import compose, override_errors
from runner.config.identity import key_of
from runner.config.instantiate import ALLOW_VARIABLE
from runner.config.other_names import COMMANDS as OTHER_NAMES
from runner.errors import Problem, RunnerError, nearest, path_problems, refuse, without_password

#: Hydra's flags that take a value of their own, with one that can be typed
FLAGS_WITH_VALUE = {
    "--cfg": "job",
    "-c": "job",
    "--package": "optimizer",
    "-p": "optimizer",
    "--config-path": "FOLDER",
    "-cp": "FOLDER",
    "--config-name": "NAME",
    "-cn": "NAME",
    "--config-dir": "FOLDER",
    "-cd": "FOLDER",
}
SHOWN = ("job", "hydra", "all")  # of --cfg
FLAGS_WITH_WORDS = ("--info", "-i")  # a value may follow
PLAIN_FLAGS = (
    "--help",
    "-h",
    "--hydra-help",
    "--version",
    "--resolve",
    "--run",
    "-r",
    "--multirun",
    "-m",
    "--shell-completion",
    "-sc",
)
#: Hydra does one of these
ALONE = (MULTIRUN, {"-r", "--run"}, {"-c", "--cfg"}, {"-i", "--info"}, {"-sc", "--shell-completion"})

#: what Hydra has for several values
SEVERAL = re.compile(r"\s*(range|choice|glob|interval|shuffle|sort|tag)\(")


def parse(command: Command, words: Sequence[str]) -> Arguments:
    """Parse the arguments of a command.

    Raises:
        RunnerError: All errors in them: unknown flags, values out of range, flags that are missing, keys that the
            command does not take.
    """
    found = _split(command, words)
    flags: list[str] = []
    overrides: list[str] = []
    if command.keys is not None:
        try:
            flags, overrides = sorted_words(found.left)
        except RunnerError as error:
            found.problems += error.problems
        called = shlex.join([command.name, *found.values])
        is_folder = bool(found.values) and Path(found.values[0]).is_dir()
        shown = shlex.join(["-cd", found.values[0], "-cn", "rerun"]) if is_folder else "..."
        found.problems += flag_problems(called, flags, command.hydra_flags, shown=shown)
        found.problems += key_problems(command, overrides)
    refuse(dict.fromkeys(found.problems))
    options = {option.name: option.default if option.value else False for option in command.options}
    return Arguments(command, [*words], tuple(found.values), options | found.options, flags, overrides)


@dataclass
class _Split:
    values: list[str]
    options: dict[str, Any]
    left: list[str]  # for Hydra
    problems: list[Problem]


def _split(command: Command, words: Sequence[str]) -> _Split:
    found, rest = _Split([], {}, [], []), [*words]
    missing = {option.name for option in command.options if option.is_required}
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        option = command.option(f"{name}=" if equals and word[:1] != "-" else name)
        if not word:
            problem = "an argument is empty; perhaps a variable is not set"
            fix = f"{command.name} last, or {command.usage}" if "RUN" in command.values else command.usage
            found.problems.append(Problem(f"{command.name} ''", problem, fix))
        elif option is not None and not option.value and not equals:
            found.options[name] = True
        elif option is not None and option.value:
            missing.discard(option.name)
            if not equals and rest and not rest[0].startswith("--"):
                text = rest.pop(0)
            if text or option.name.endswith("="):
                found.problems += _read(option, text, found.options)
            else:
                found.problems.append(
                    Problem(name, f"it needs a value, {option.value}", option.usage, code="missing-value")
                )
        elif word.startswith("-") and not (command.keys is not None and _is_hydras(name)):
            found.problems.append(_unknown(command, word, rest, missing))
        elif word.startswith("-"):
            found.left.append(word)
            if not equals and rest and (name in FLAGS_WITH_VALUE or name == "--allow"):
                found.left.append(rest.pop(0))
        elif _is_value(command, word) and (command.max_values is None or len(found.values) < command.max_values):
            found.values.append(word)
        elif command.keys is None or (_is_value(command, word) and command.keys != ANY_KEY):
            found.problems.append(_unknown(command, word, rest, missing))
        else:
            found.left.append(word)
    for option in command.options:
        if option.name in missing:
            problem = f"it is needed: {option.usage}"
            found.problems.append(
                Problem(f"{command.name} without {option.name}", problem, command.usage, code="missing-value")
            )
    return found


def _read(option: table.Option, text: str, into: dict[str, Any]) -> list[Problem] | tuple[Problem, ...]:
    try:
        into[option.name] = option.read(option, text)
    except RunnerError as error:
        return error.problems
    if option.name in ("--input", "--output"):
        return path_problems(option.name, text, is_written=option.name == "--output")
    return []


def _is_hydras(flag: str) -> bool:
    return flag in FLAGS_WITH_VALUE or flag in FLAGS_WITH_WORDS or flag in PLAIN_FLAGS or flag == "--allow"


def _is_value(command: Command, word: str) -> bool:
    """Whether it is a positional argument: a run, a sweep or a directory."""
    if command.max_values == 0 or word[:1] in "-~":
        return False
    name, equals, _ = word.partition("=")
    if not equals or is_a_runs_path(word):
        return True
    settings = [option.name for option in command.options if option.name.endswith("=")]
    return command.has_filters and not ({":", "/"}.isdisjoint(name) and nearest(f"{name}=", settings))


def is_a_runs_path(word: str) -> bool:
    """Whether there is such a folder or checkpoint: a job's folder may have a = in its name, as a setting has."""
    path = Path(word)
    try:
        return path.is_dir() or (path.suffix == ".pt" and path.is_file())
    except OSError:  # a setting may be longer than a name
        return False


def _unknown(command: Command, word: str, rest: list[str], missing: set[str]) -> Problem:
    """The error for an argument that the command does not take. Its value is taken out of `rest`."""
    name, equals, value = word.partition("=")
    if _is_value(command, word):
        values = command.values.strip("[]").lower()
        problem = f"{command.name} takes one {values} at a time"
        return Problem(f"{command.name} {word}", problem, f"python -m runner {command.name} {shlex.quote(word)}")
    known = {option.name: option for option in command.options}
    hits = nearest(f"{name}=" if equals and name[:1] != "-" else name, (*known, JSON))
    meant = known.get(hits[0]) if hits else None
    if meant is not None and meant.value:
        missing.discard(meant.name)  # else it would also be reported as missing
        if word[:1] == "-" and not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
    shown = [_with_value(known.get(hit), hit, value) for hit in hits]
    asked = f"{command.name} {name} {value}" if word[:1] == "-" else f"{command.name} {word}"
    return Problem.suggest(
        asked.rstrip(),
        f"{command.name} does not take {name if equals else word}",
        shown,
        command.usage,
        code="unknown-flag",
    )


def _with_value(option: table.Option | None, name: str, value: str) -> str:
    if option is None or not option.value:
        return name
    text = shlex.quote(value) if value else option.value
    return f"{name}{text}" if name.endswith("=") else f"{name} {text}"


def key_problems(command: Command, overrides: Sequence[str]) -> list[Problem]:
    """An error for each override of a key that has no part in this command."""
    keys = command.keys or ()
    listed = ", ".join(f"{key}..." if key.endswith(".") or key == "data" else key for key in keys) or "none"
    problem = f"{command.name} takes the run as it was; what may be changed: {listed}"
    return [Problem(word, problem, command.usage) for word in overrides if not any(_is_of(word, key) for key in keys)]


def _is_of(word: str, beginning: str) -> bool:
    """Whether an override is of one of these keys; only of data is something taken away (~), which other data may not have."""
    key = word.partition("=")[0].lstrip("+~" if beginning in ("data", *ANY_KEY) else "+")
    if beginning.endswith(".") or not beginning:
        return key.startswith(beginning)
    return key == beginning or key.startswith(f"{beginning}.")


def refuse_misspelt(words: Sequence[str]) -> None:
    """Raises: RunnerError where the first argument looks like a command; a suggestion is the whole command line."""
    first = words[0] if words else "-"
    if "=" in first or first[:1] in ("-", "~") or words[1:2] == ["="]:
        return
    names = [*table.every_command()]
    meant = _commands_like(first, names)
    if meant and first not in compose.known_keys():
        problem = f"there is no command {first}; there are {', '.join(names)}"
        after = words[1:]
        if meant == ["--help"] and after and after[0] in names:  # help train
            meant, after = [after[0]], ["--help"]
        typed = shlex.join(["python", "-m", "runner", *meant[0].split(), *after])
        raise RunnerError(Problem.suggest(shlex.join(words), problem, [typed], "", code="unknown-command"))


def _commands_like(word: str, names: Sequence[str]) -> list[str]:
    return [OTHER_NAMES[word.lower()]] if word.lower() in OTHER_NAMES else nearest(word, names)[:1]


def sorted_words(words: list[str], *, of_python: bool = False) -> tuple[list[str], list[str]]:
    """Sort Hydra's flags, each with its value, from the overrides. Flags may be anywhere (hydra#3053).

    of_python: they are run()'s, and no shell's.
    """
    flags: list[str] = []
    overrides: list[str] = []
    zips: list[str] = []
    problems: list[Problem] = []
    rest, found = _joined(words)
    problems += found
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            (zips if word.startswith("zip(") else overrides).append(word)
        elif name == "--allow":
            _allow(value if equals else rest.pop(0) if rest else "")
        elif name in FLAGS_WITH_VALUE:
            given = value if equals else rest.pop(0) if rest else ""
            problems += _value_problems(name, given)
            flags += [name, given]
        elif name in FLAGS_WITH_WORDS or name in PLAIN_FLAGS:
            flags.append(word)
        else:
            is_value = bool(rest) and "=" not in rest[0] and not re.match(r"-[^\d.]", rest[0])
            problems.append(_unknown_flag(name, value if equals else rest.pop(0) if is_value else None))
    if zips:
        overrides.append(_zipped(zips))
    flags, overrides, found = _with_mode(flags, overrides)
    problems += found
    alone = [next(flag for flag in flags if flag in kind) for kind in ALONE if kind & set(flags)]
    if len(alone) > 1:
        raise RunnerError(
            *problems, Problem(" ".join(alone), "these flags can't be combined", " or ".join(alone), code="clash")
        )
    if not {"--cfg", "-c"} & set(flags):
        only = [flag for flag in flags if flag in ("--resolve", "--package", "-p")]
        problems += [Problem(flag, "it says how --cfg prints", f"--cfg job {flag}", code="clash") for flag in only]
    if "--info" in flags or "-i" in flags or "--shell-completion" in flags or "-sc" in flags:
        refuse(problems)
        return words, []  # these read their own words
    problems += _not_settings(overrides)
    values = [word for word in overrides if not word.startswith("~") and "={" not in word]  # mappings are merged
    last = {key_of(word): word for word in values}
    for word in values:
        if (later := last[key_of(word)]) != word:
            print(f"note: {without_password(word)} has no effect: {without_password(later)} follows", file=sys.stderr)
    several = [word for word in overrides if _has_several(word) or word.startswith(("sweep.zip={", "sweep.zip=["))]
    if several and not MULTIRUN & set(flags):
        if not problems and compose.asks_for_a_sweep(flags, overrides):
            flags = ["-m", *flags]
        elif problems or of_python or any(word.startswith("sweep.zip=") for word in several):
            problems += [override_errors.ambiguous(word, of_python=of_python) for word in several]
        # else the composition reports them, next to other errors
    refuse(problems)
    return list(dict.fromkeys(flags)) if flags.count("-m") > 1 else flags, overrides


def flag_problems(asked: str, flags: Sequence[str], takes: Collection[str], *, shown: str = "...") -> Iterable[Problem]:
    """An error for each of Hydra's flags that a command has no use for.

    asked: the command, as it is typed. shown: what has `train` compose the same configuration, which --cfg is to show.
    """
    for flag in dict.fromkeys(word.partition("=")[0] for word in flags if word.startswith("-")):
        if flag in takes:
            continue
        problem, fix = f"{asked.split()[0]} does not take {flag}", f"{asked} without {flag}"
        if flag in MULTIRUN:
            problem = f"{problem}: it is of one run at a time"
        elif flag in ONE_RUN:
            problem = f"{problem}: it takes the run's own configuration"
        else:
            fix += f"; to see the configuration: python -m runner {shown} --cfg job"
        yield Problem(f"{asked} {flag}", problem, fix)


def _joined(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """Take out the settings that spaces have cut, such as `model = mlp` and `model.hidden_sizes=[64, 32]`, as errors."""
    rest: list[str] = []
    problems = []
    left = list(words)
    while left:
        parts = [left.pop(0)]
        asked = parts[0]
        while (
            left and "=" in asked and not asked.startswith("zip(") and "=" not in left[0] and _is_open(" ".join(parts))
        ):
            parts.append(left.pop(0))
        typed, problem = " ".join(parts), "a value with a space needs quotes"
        if re.fullmatch(r"[+~]*\w[\w./@]*=?", asked) and left and (left[0][:1] == "=" or _is_cut(asked, left[0])):
            parts.append(left.pop(0))
            parts += [left.pop(0)] if parts[-1] == "=" and left else []
            typed, problem = "".join(parts), "there must be no space around ="
        if len(parts) == 1:
            rest += parts
        else:
            problems.append(Problem.suggest(" ".join(parts), problem, [shlex.quote(typed)], ""))
    return rest, problems


def _is_cut(asked: str, following: str) -> bool:
    return asked[-1] == "=" and re.match(r"[^-+~]", following) is not None and not {"="} & set(following)


def _is_open(text: str) -> bool:
    """Whether a bracket or a quote of it is not closed."""
    return len(_parts(f"{text},")) == len(_parts(text))


def _zipped(words: Sequence[str]) -> str:
    """zip(a,b)=(1,2),(3,4), which Hydra has no grammar for, as the setting that it is: sweep.zip={a:[1,3],b:[2,4]}. Of
    several, each of which is combined with each other, sweep.zip=[{...},{...}].

    Raises: RunnerError where rows do not have a value for each key.
    """
    each = [_columns(word) for word in words]
    return f"sweep.zip={each[0] if len(each) == 1 else '[' + ','.join(each) + ']'}"


def _columns(word: str) -> str:
    head, _, value = word.partition(")=")
    keys = [key.strip() for key in head.removeprefix("zip(").split(",")]
    rows = [_parts(row.strip()[1:-1]) for row in _parts(value) if row.strip().startswith("(")]
    problem = ""
    if not rows or len(rows) != len(_parts(value)) or any(len(row) != len(keys) for row in rows):
        problem = f"it is a row in parentheses for each job, with a value for each of {', '.join(keys)}"
    elif several := [part.strip() for row in rows for part in row if SEVERAL.match(part)]:
        problem = f"a row is of one job, and {several[0]} is several values"
    elif len(set(keys)) < len(keys):
        problem = f"each key is named once, and these are {', '.join(keys)}"
    if problem:
        example = "'zip(model.width,optimizer.lr)=(64,1e-3),(128,3e-4)', in quotes"
        raise RunnerError(Problem(word, problem, example))
    columns = zip(*rows, strict=True)
    return "{" + ",".join(f"{key}:[{','.join(column)}]" for key, column in zip(keys, columns, strict=True)) + "}"


def _with_mode(flags: list[str], overrides: list[str]) -> tuple[list[str], list[str], list[Problem]]:
    """hydra.mode=MULTIRUN is another word for -m; hydra.mode=RUN says that a file's MULTIRUN does not count."""
    modes = [word for word in overrides if word.startswith("hydra.mode=")]
    is_sweep = bool(MULTIRUN & set(flags))
    if modes and modes[-1] == "hydra.mode=RUN" and is_sweep:
        return (
            flags,
            overrides,
            [Problem("-m hydra.mode=RUN", "-m trains a sweep, and hydra.mode=RUN trains one run", "one of them")],
        )
    if modes and modes[-1] == "hydra.mode=MULTIRUN":
        return (
            ["-m", *(flag for flag in flags if flag not in MULTIRUN)],
            [word for word in overrides if word not in modes],
            [],
        )
    return flags, overrides, []


def _unknown_flag(name: str, value: str | None) -> Problem:
    flags = [*PLAIN_FLAGS, *FLAGS_WITH_VALUE, *FLAGS_WITH_WORDS, "--allow", JSON]
    keys = _suggestions(name.lstrip("-").replace("-", "_"), "true" if value is None else value)
    near = nearest(name, flags) if not keys else []
    near = [
        f"{flag} {shlex.quote(value or FLAGS_WITH_VALUE.get(flag, ''))}" if flag in FLAGS_WITH_VALUE else flag
        for flag in near
    ]
    asked = name if value is None else f"{name} {value}"
    problem = f"there is no flag {name}; values are set without dashes"
    return Problem.suggest(asked, problem, [*keys, *near], "leave it out; --help lists the keys and the flags")


def _suggestions(key: str, value: str) -> list[str]:
    composed = compose.composer([])
    return override_errors.suggestions(key, [value], composed([]), composed)


def _value_problems(name: str, value: str) -> list[Problem]:
    if not value or value.startswith("-"):
        return [Problem(name, "it needs a value", f"{name} {FLAGS_WITH_VALUE[name]}", code="missing-value")]
    asked = f"{name} {value}"
    if name in ("--config-path", "-cp"):
        problem = "-cp would replace the built-in configuration, and -cd adds a directory to it"
        return [Problem(asked, problem, f"-cd {value}")]
    if name in ("--config-dir", "-cd") and not Path(value).is_dir():
        beside = [str(each) for each in Path(value).parent.glob("*/")] if Path(value).parent.is_dir() else []
        fix = " or ".join(f"{name} {shlex.quote(hit)}" for hit in nearest(str(Path(value)), beside))
        return [
            Problem(
                asked, "there is no such folder", fix or f"{name} FOLDER, with one that is there", code="missing-file"
            )
        ]
    if name in ("--cfg", "-c") and value not in SHOWN:
        shown = " or ".join(f"{name} {each}" for each in nearest(value, SHOWN) or SHOWN)
        return [Problem(asked, f"{name} is {', '.join(SHOWN[:-1])} or {SHOWN[-1]}", shown)]
    return []


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
            command = f"python -m runner {word}"
            problems.append(Problem(word, "a command must be the first argument", f"{command} ...", (command,)))
            continue
        has_value = left and not _is_setting(left[0]) and left[0] not in (*names, *known)  # epochs 3
        value = left.pop(0) if has_value else ""
        ways = [*_suggestions(word, value), *(f"python -m runner {name}" for name in _commands_like(word, names))]
        problem = f"{word} is neither a command nor KEY=VALUE; --help lists both"
        problems.append(Problem.suggest(f"{word} {value}".strip(), problem, ways, "leave it out, or KEY=VALUE"))
    return problems


def _is_setting(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _has_several(word: str) -> bool:
    return _has_bare_comma(word) or override_errors.SEVERAL.match(word.partition("=")[2]) is not None


def _has_bare_comma(word: str) -> bool:
    """A comma outside of quotes, brackets and parentheses: Hydra would call the value ambiguous."""
    return len(_parts(word.partition("=")[2])) > 1


def _parts(text: str) -> list[str]:
    parts, depth, quote, is_escaped = [""], 0, "", False
    for char in text:
        if is_escaped or char == "\\":  # the one behind it is taken as it is
            is_escaped = not is_escaped
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return parts


def _allow(prefix: str) -> None:
    if not prefix or prefix.startswith("-") or "=" in prefix:
        raise RunnerError(
            Problem("--allow", "it needs the name of a package whose classes may be built", "--allow timm")
        )
    before = os.environ.get(ALLOW_VARIABLE)
    os.environ[ALLOW_VARIABLE] = f"{before},{prefix}" if before else prefix
