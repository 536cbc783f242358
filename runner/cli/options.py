"""Parses the words after a verb: the run that is meant, flags, and what is left for Hydra. Imports nothing heavy."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.cli.answer import FLAG
from runner.cli.verbs import ANY_KEY, VERBS
from runner.errors import Fault, RunnerError, nearest, path_faults, refuse

HELP = {"--help", "-h"}
#: how those are called that are not in VERBS and compose no configuration of their own
FORMS = {
    "resume": "resume [RUN] [KEY=VALUE ...]",
    "reproduce": "reproduce [RUN] [--anyway] [--trust] [KEY=VALUE ...]",
    "plan": "plan [-m] [KEY=VALUE ...] [plan.device_name=NAME] [plan.device_memory=SIZE]",
    "devices": "devices [--bench]",
    "report": "report [SWEEP]",
    "compare": "compare A B | SWEEP [metric=NAME] [tracking.uri=URI]",
    "try": "try [KEY=VALUE ...] [--against RUN|best] [--budget SECONDS] [metric=NAME]",
    "diff": "diff A B [...] [tracking.uri=URI]",
    "watch": "watch [RUN|SWEEP]",
    "history": "history [RUN] [--output FILE] [tracking.uri=URI]",
    "schema": "schema [--output FILE]",
    "sync": "sync [DIR] [tracking.uri=URI]",
    "ui": "ui [tracking.uri=URI] [--port PORT]",
}
#: in a form: --output FILE, --bench, metric=NAME
TAKEN = re.compile(r"(--[\w-]+|[\w.]+=)( ?)([A-Z]+(?:\|\w+)?)?")
JSON = "--json: print the result as JSON to stdout and everything else to stderr"


@dataclass(frozen=True)
class ParsedWords:
    """A verb's words, sorted."""

    verb: str
    run: str  # "" for a verb that is not of a run
    flags: dict[str, str]  # switches have an empty text
    rest: list[str]  # for Hydra
    faults: tuple[Fault, ...] = ()  # flags that the verb does not take, and those that it lacks

    def check(self) -> None:
        """Raises: RunnerError for all of them."""
        refuse(self.faults)

    def number(self, flag: str, default: int, *, least: int = 1, most: int | None = None) -> int:
        """A flag's whole number. Raises: RunnerError."""
        text = self.flags.get(flag)
        if text is None:
            return default
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            to = f" to {most}" if most is not None else " or more"
            problem = f"it is a whole number, {least}{to}"
            raise RunnerError(Fault(f"{flag} {text}", problem, f"{flag} {max(least, default)}"))
        return int(text)

    def amount(self, flag: str, default: float) -> float:
        """A flag's number above 0. Raises: RunnerError."""
        text = self.flags.get(flag)
        try:
            found = default if text is None else float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < float("inf"):
            raise RunnerError(Fault(f"{flag} {text}", "it is a number above 0", f"{flag} {default:g}"))
        return found


def parse(verb: str, words: Sequence[str]) -> ParsedWords:
    """Sorts the words of a verb; what is wrong with its flags stands beside them."""
    takes, rest = VERBS[verb], list(words)
    runs: list[str] = []
    flags: dict[str, str] = {}
    left: list[str] = []
    misspelt: set[str] = set()
    faults: list[Fault] = []
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not word:
            problem = "a word of it is empty: a variable that is not set, perhaps"
            fix = f"{verb} last, or {usage(verb)}" if takes.is_of_a_run else usage(verb)
            faults.append(Fault(f"{verb} ''", problem, fix))
        elif name in takes.switches and not equals:
            flags[name] = ""
        elif name in takes.flags:
            if not (value if equals else rest and rest[0]) or (not equals and rest[0].startswith("--")):
                faults.append(Fault(name, f"it needs a value, {takes.flags[name]}", f"{name} {takes.flags[name]}"))
                rest = rest[int(not equals and rest[:1] == [""]) :]
                continue
            flags[name] = value if equals else rest.pop(0)
            if name in ("--input", "--output"):
                faults += path_faults(name, flags[name], is_written=name == "--output")
        elif word.startswith("-") and takes.is_of_a_run and name != "--allow":
            meant = nearest(name, [*VERBS[verb].flags, *VERBS[verb].switches, FLAG])
            # else its value would be told to be a run, and the flag to be missing
            if meant and meant[0] in takes.flags:
                misspelt.add(meant[0])
                value = value if equals else (rest.pop(0) if rest and not rest[0].startswith("-") else "")
            faults.append(_unknown(verb, name, value, meant))
        elif word == "--allow" and rest:
            left += [word, rest.pop(0)]
        elif takes.is_of_a_run and word[0] not in "-~" and (not equals or is_a_runs_path(word)):
            runs.append(word)
        else:
            left.append(word)
    if len(runs) > 1:
        faults.append(Fault(" ".join([verb, *runs]), f"{verb} takes one run at a time", f"{verb} {runs[0]}"))
    for name in takes.needs:
        if name not in flags and name not in misspelt and not any(fault.asked == name for fault in faults):
            faults.append(Fault(f"{verb} without {name}", f"it is needed: {name} {takes.flags[name]}", usage(verb)))
    run = (runs or ["last"])[0] if takes.is_of_a_run else ""
    return ParsedWords(verb, run, flags, left, tuple(faults))


def is_a_runs_path(word: str) -> bool:
    """Whether there is such a folder or checkpoint: a job's folder may have a = in its name, as a setting has."""
    path = Path(word)
    try:
        return path.is_dir() or (path.suffix == ".pt" and path.is_file())
    except OSError:  # a setting may be longer than a name
        return False


def check_keys(verb: str, overrides: Sequence[str]) -> None:
    """Raises: RunnerError for each override of a key that has no part in this verb."""
    keys = VERBS[verb].keys
    listed = ", ".join(f"{key}..." if key.endswith(".") or key == "data" else key for key in keys) or "none"
    problem = f"{verb} takes the run as it was; what may be changed: {listed}"
    refuse(Fault(word, problem, usage(verb)) for word in overrides if not any(_is_of(word, key) for key in keys))


def usage(verb: str) -> str:
    """One line: how a verb is called."""
    takes = VERBS[verb]
    parts = [f"python -m runner {verb}", *(["RUN"] if takes.is_of_a_run else [])]
    for name, value in takes.flags.items():
        parts.append(f"{name} {value}" if name in takes.needs else f"[{name} {value}]")
    parts += [f"[{name}]" for name in takes.switches]
    if takes.keys:
        parts.append("[KEY=VALUE ...]" if takes.keys == ANY_KEY or "data" in takes.keys else f"[{takes.keys[0]}=...]")
    return " ".join(parts)


def explained(verb: str) -> str:
    """What `python -m runner VERB --help` says."""
    takes = VERBS[verb]
    lines = [usage(verb), "", f"{takes.does[0].upper()}{takes.does[1:]}.", takes.more]
    if takes.is_of_a_run:
        lines.append("RUN: a run directory, an MLflow run id, or last (the default)")
    lines.append(JSON)
    return "\n".join(lines)


def help_of(verb: str, does: str) -> int:
    """Prints how a command of FORMS is called. does: what it does."""
    print(f"python -m runner {FORMS[verb]}\n\n{inspect.cleandoc(does)}\n{JSON}")
    return 0


def refuse_others(verb: str, words: Sequence[str]) -> None:
    """Raises: RunnerError for each of these words, which a command of FORMS does not take, with what was probably meant."""
    form = FORMS.get(verb, f"{verb} RUN")
    values = {name: value for name, _, value in TAKEN.findall(form)}
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = (typed := word).partition("=")
        hits = nearest(f"{name}=" if equals and name[:1] != "-" else name, (*values, FLAG))
        if hits and name[:1] == "-" and not equals and values.get(hits[0]) and rest:
            value = rest.pop(0)  # else it would be refused, too
            word = f"{word} {value}"
        shown = [_with_value(hit, values.get(hit, ""), value) for hit in hits]
        problem = f"{verb} does not take {typed}"
        found.append(Fault.suggest(f"{verb} {word}", problem, shown, f"python -m runner {form}"))
    refuse(found)


def _with_value(name: str, kind: str, value: str) -> str:
    text = shlex.quote(value) if value else kind
    return f"{name}{text}" if name.endswith("=") else f"{name} {text}" if kind else name


def is_a_setting(verb: str, word: str) -> bool:
    """Whether it looks like a KEY= of a command of FORMS, which is none of its runs."""
    keys = [name for name, _, _ in TAKEN.findall(FORMS[verb]) if name.endswith("=")]
    name, equals, _ = word.partition("=")
    return bool(equals) and not {":", "/"} & set(name) and bool(nearest(f"{name}=", keys))


def _is_of(word: str, beginning: str) -> bool:
    """Whether an override is of one of these keys; only of data is something taken away (~), which other data may not have."""
    key = word.partition("=")[0].lstrip("+~" if beginning in ("data", *ANY_KEY) else "+")
    if beginning.endswith(".") or not beginning:
        return key.startswith(beginning)
    return key == beginning or key.startswith(f"{beginning}.")


def _unknown(verb: str, flag: str, value: str, meant: list[str]) -> Fault:
    takes = VERBS[verb]
    ways = [f"{hit} {shlex.quote(value or takes.flags[hit])}" if hit in takes.flags else hit for hit in meant]
    problem = f"{verb} has no such flag; it has {', '.join([*takes.flags, *takes.switches, FLAG])}"
    return Fault.suggest(f"{verb} {flag} {value}".rstrip(), problem, ways, usage(verb))
