"""Sorts the words of a command line into Hydra's flags and overrides, in the order that Hydra takes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from runner.cli.answer import FLAG
from runner.config import compose, override_errors
from runner.config.identity import key_of
from runner.config.instantiate import ALLOW_VARIABLE
from runner.config.other_names import COMMANDS
from runner.errors import Fault, RunnerError, nearest, refuse, without_password

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
MULTIRUN = {"-m", "--multirun"}
#: of Python's run(), and of the commands that compose one run and do not train it
ONE_RUN = {"--config-name", "-cn", "--config-dir", "-cd"}
#: Hydra does one of these
ALONE = (MULTIRUN, {"-r", "--run"}, {"-c", "--cfg"}, {"-i", "--info"}, {"-sc", "--shell-completion"})

#: what Hydra has for several values
SEVERAL = re.compile(r"\s*(range|choice|glob|interval|shuffle|sort|tag)\(")

#: of all commands (cli/commands.py); a line that begins with none of them is `train`
NAMES = (
    "train",
    "resume",
    "reproduce",
    "evaluate",
    "predict",
    "export",
    "serve",
    "register",
    "lr-find",
    "tune",
    "plan",
    "devices",
    "report",
    "compare",
    "try",
    "diff",
    "history",
    "watch",
    "explain",
    "schema",
    "sync",
    "ui",
)


def refuse_misspelt(words: Sequence[str]) -> None:
    """Raises: RunnerError where the first argument looks like a command; a suggestion is the whole command line."""
    first = words[0] if words else "-"
    verbs = _commands_like(first) if "=" not in first and first[:1] not in ("-", "~") and words[1:2] != ["="] else []
    if verbs and first not in compose.known_keys():
        problem = f"there is no command {first}; there are {', '.join(NAMES)}"
        after = words[1:]
        if verbs == ["--help"] and after and after[0] in NAMES:  # help train
            verbs, after = [after[0]], ["--help"]
        typed = shlex.join(["python", "-m", "runner", *verbs[0].split(), *after])
        raise RunnerError(Fault.suggest(shlex.join(words), problem, [typed], ""))


def _commands_like(word: str) -> list[str]:
    return [COMMANDS[word.lower()]] if word.lower() in COMMANDS else nearest(word, NAMES)[:1]


def sorted_words(
    words: list[str], *, takes: Sequence[str] = (), of_python: bool = False
) -> tuple[list[str], list[str]]:
    """Hydra's flags first, each with its value, then the overrides: Hydra takes them in no other order (hydra#3053).

    takes: flags of the command itself, which are not among these words, to be offered for one that there is not.
    of_python: they are run()'s, and no shell's.
    """
    flags: list[str] = []
    overrides: list[str] = []
    zips: list[str] = []
    faults: list[Fault] = []
    rest, found = _joined(words)
    faults += found
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            (zips if word.startswith("zip(") else overrides).append(word)
        elif name == "--allow":
            _allow(value if equals else rest.pop(0) if rest else "")
        elif name in FLAGS_WITH_VALUE:
            given = value if equals else rest.pop(0) if rest else ""
            faults += _value_faults(name, given)
            flags += [name, given]
        elif name in FLAGS_WITH_WORDS or name in PLAIN_FLAGS:
            flags.append(word)
        else:
            is_value = bool(rest) and "=" not in rest[0] and not re.match(r"-[^\d.]", rest[0])
            faults.append(_unknown_flag(name, value if equals else rest.pop(0) if is_value else None, takes))
    if zips:
        overrides.append(_zipped(zips))
    flags, overrides, found = _with_mode(flags, overrides)
    faults += found
    alone = [next(flag for flag in flags if flag in kind) for kind in ALONE if kind & set(flags)]
    if len(alone) > 1:
        raise RunnerError(*faults, Fault(" ".join(alone), "one of these is done at a time", " or ".join(alone)))
    if "--info" in flags or "-i" in flags or "--shell-completion" in flags or "-sc" in flags:
        refuse(faults)
        return words, []  # these read their own words
    faults += _not_settings(overrides)
    values = [word for word in overrides if not word.startswith("~") and "={" not in word]  # mappings are merged
    last = {key_of(word): word for word in values}
    for word in values:
        if (later := last[key_of(word)]) != word:
            print(f"note: {without_password(word)} has no effect: {without_password(later)} follows", file=sys.stderr)
    several = [word for word in overrides if _has_several(word) or word.startswith(("sweep.zip={", "sweep.zip=["))]
    if several and not MULTIRUN & set(flags):
        if not faults and compose.asks_for_a_sweep(flags, overrides):
            flags = ["-m", *flags]
        else:
            faults += [override_errors.ambiguous(word, of_python=of_python) for word in several]
    refuse(faults)
    return list(dict.fromkeys(flags)) if flags.count("-m") > 1 else flags, overrides


def refuse_flags(asked: str, flags: Sequence[str], takes: Collection[str] = (), *, shown: str = "...") -> None:
    """Raises: RunnerError for each of Hydra's flags that a command has no use for.

    asked: the command, as it is typed. shown: what has `train` compose the same configuration, which --cfg is to show.
    """
    faults = []
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
        faults.append(Fault(f"{asked} {flag}", problem, fix))
    refuse(faults)


def _joined(words: Sequence[str]) -> tuple[list[str], list[Fault]]:
    """Take out the settings that spaces have cut, such as `model = mlp` and `model.hidden_sizes=[64, 32]`, as errors."""
    rest: list[str] = []
    faults = []
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
            faults.append(Fault.suggest(" ".join(parts), problem, [shlex.quote(typed)], ""))
    return rest, faults


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
        raise RunnerError(Fault(word, problem, example))
    columns = zip(*rows, strict=True)
    return "{" + ",".join(f"{key}:[{','.join(column)}]" for key, column in zip(keys, columns, strict=True)) + "}"


def _with_mode(flags: list[str], overrides: list[str]) -> tuple[list[str], list[str], list[Fault]]:
    """hydra.mode=MULTIRUN is another word for -m; hydra.mode=RUN says that a file's MULTIRUN does not count."""
    modes = [word for word in overrides if word.startswith("hydra.mode=")]
    is_sweep = bool(MULTIRUN & set(flags))
    if modes and modes[-1] == "hydra.mode=RUN" and is_sweep:
        return (
            flags,
            overrides,
            [Fault("-m hydra.mode=RUN", "one asks for a sweep, the other for a run", "one of them")],
        )
    if modes and modes[-1] == "hydra.mode=MULTIRUN":
        return (
            ["-m", *(flag for flag in flags if flag not in MULTIRUN)],
            [word for word in overrides if word not in modes],
            [],
        )
    return flags, overrides, []


def _unknown_flag(name: str, value: str | None, takes: Sequence[str]) -> Fault:
    flags = [*PLAIN_FLAGS, *FLAGS_WITH_VALUE, *FLAGS_WITH_WORDS, "--allow", FLAG, *takes]
    own = nearest(name, takes)
    keys = _suggestions(name.lstrip("-").replace("-", "_"), "true" if value is None else value) if not own else []
    near = own or (nearest(name, flags) if not keys else [])
    near = [
        f"{flag} {shlex.quote(value or FLAGS_WITH_VALUE.get(flag, ''))}" if flag in FLAGS_WITH_VALUE else flag
        for flag in near
    ]
    asked = name if value is None else f"{name} {value}"
    problem = f"there is no flag {name}; values are set without dashes"
    return Fault.suggest(asked, problem, [*keys, *near], "leave it out; --help lists the keys and the flags")


def _suggestions(key: str, value: str) -> list[str]:
    composed = compose.composer([])
    with compose.hydra_session(["runner"]):
        return override_errors.suggestions(key, [value], composed([]), composed)


def _value_faults(name: str, value: str) -> list[Fault]:
    if not value or value.startswith("-"):
        return [Fault(name, "it needs a value", f"{name} {FLAGS_WITH_VALUE[name]}")]
    asked = f"{name} {value}"
    if name in ("--config-path", "-cp"):
        problem = "what the runner's own files say would be missing: a folder of yours stands beside theirs"
        return [Fault(asked, problem, f"-cd {value}")]
    if name in ("--config-dir", "-cd") and not Path(value).is_dir():
        beside = [str(each) for each in Path(value).parent.glob("*/")] if Path(value).parent.is_dir() else []
        fix = " or ".join(f"{name} {shlex.quote(hit)}" for hit in nearest(str(Path(value)), beside))
        return [Fault(asked, "there is no such folder", fix or f"{name} FOLDER, with one that is there")]
    if name in ("--cfg", "-c") and value not in SHOWN:
        shown = " or ".join(f"{name} {each}" for each in nearest(value, SHOWN) or SHOWN)
        return [Fault(asked, f"{name} is {', '.join(SHOWN[:-1])} or {SHOWN[-1]}", shown)]
    return []


def _not_settings(overrides: Sequence[str]) -> list[Fault]:
    faults = []
    known = compose.known_keys() if not all(map(_is_setting, overrides)) else []
    left = list(overrides)
    while left:
        word = left.pop(0)
        if _is_setting(word):
            continue
        if word in NAMES:
            command = f"python -m runner {word}"
            faults.append(Fault(word, "a command is the first argument", f"{command} ...", (command,)))
            continue
        has_value = left and not _is_setting(left[0]) and left[0] not in (*NAMES, *known)  # epochs 3
        value = left.pop(0) if has_value else ""
        ways = [*_suggestions(word, value), *(f"python -m runner {name}" for name in _commands_like(word))]
        problem = f"{word} is neither a command nor KEY=VALUE; --help lists both"
        faults.append(Fault.suggest(f"{word} {value}".strip(), problem, ways, "leave it out, or KEY=VALUE"))
    return faults


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
        raise RunnerError(Fault("--allow", "it needs the name of a package whose classes may be built", "--allow timm"))
    before = os.environ.get(ALLOW_VARIABLE)
    os.environ[ALLOW_VARIABLE] = f"{before},{prefix}" if before else prefix
