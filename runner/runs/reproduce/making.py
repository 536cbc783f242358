"""Compare what runs were made with: configuration, code, versions, machine, device and data. For `reproduce` and `diff`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.config import defaults
from runner.device import Choice, Hardware
from runner.errors import without_password
from runner.experiment import provenance
from runner.experiment.provenance import TOGETHER, Git
from runner.runs.reproduce.recorded import DIFF, ENVIRONMENT, RecordedRun
from runner.version import DISTRIBUTION, __version__

UNKNOWN = "not known"
NO_GIT = "in no git repository"
MOST_PACKAGES = 3  # named, of the packages that don't affect numbers directly
#: notes in environment.txt that are not files
NOTES = ("platform", "machine", "threads")


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs between runs, as text for each run."""

    what: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Making:
    """What a run is made with, as far as it is known."""

    git: Git | None  # None: not in a repository
    runner: str
    device: tuple[str, str]  # as in `device=`, and its product name
    packages: Mapping[str, str]  # versions by distribution; empty: unknown
    notes: Mapping[str, str]  # NOTES, and fingerprints of the user's files
    data: str | None = None  # None: unknown, or not compared here


def of_run(original: RecordedRun) -> Making:
    """Return what a run recorded."""
    tags, text = original.tags, original.read(ENVIRONMENT) or ""
    commit = tags.get("git_commit")
    git = Git(commit, tags.get("git_dirty") == "true", original.read(DIFF) or "") if commit else None
    device = tags.get("device", UNKNOWN), tags.get("device_name", UNKNOWN)
    packages, notes = provenance.packages(text), provenance.notes(text)
    return Making(git, tags.get("runner_version", UNKNOWN), device, packages, notes, original.data)


def of_now(choice: Choice, hardware: Hardware, *, files: Mapping[str, str]) -> Making:
    """Return what a run would record that starts here now. files: those to fingerprint."""
    text = provenance.environment()
    own = provenance.fingerprints(name for name in files if name not in (*NOTES, TOGETHER))
    notes = {**provenance.notes(text), "machine": hardware.in_words, **own}
    device = choice.device, hardware.name_of(choice.here)
    return Making(provenance.git_state(), __version__, device, provenance.packages(text), notes)


def differing(makings: Sequence[Making]) -> list[ValueDifference]:
    """Return what at least two runs recorded and differs."""
    notes = [_row(name, [each.notes.get(name) for each in makings]) for name in NOTES]
    found = [
        *_code(makings),
        _row("runner", [each.runner for each in makings]),
        *_packages(makings),
        *notes,
        _row(TOGETHER, [each.notes.get(TOGETHER, "by itself") if each.packages else None for each in makings]),
        # cuda:0 and cuda:1 of one product count as the same device
        _row(
            "device", ["{} ({})".format(*each.device) for each in makings], key=lambda text: re.sub(r":\d+", "", text)
        ),
        _row("data", [each.data for each in makings]),
    ]
    return [each for each in found if each is not None]


def unknown(makings: Sequence[Making]) -> tuple[str, ...]:
    """Return what at least one run did not record."""
    of_each = [
        {
            "versions": each.packages,
            "data": each.data,
            "device": each.device[0] != UNKNOWN,
            **{name: each.notes.get(name) for name in NOTES},
        }
        for each in makings
    ]
    return tuple(name for name in of_each[0] if not all(each[name] for each in of_each))


def of_values(sides: Sequence[Mapping[str, Any]]) -> list[ValueDifference]:
    """Return the options and values that differ between configurations, as identity.chosen() returns them.

    Names and directories of runs are left out, and values that follow from a differing option of a group.
    """
    answers = [defaults.answers(each) for each in sides]
    values = [{**side, **answer} for side, answer in zip(sides, answers, strict=True)]
    keys = dict.fromkeys(key for side in sides for key in defaults.changed(side))
    keys |= dict.fromkeys(key for answer in answers for key in answer)
    return [
        ValueDifference(key, tuple(_shown(each, key) for each in values))
        for key in keys
        if any(each.get(key, ...) != values[0].get(key, ...) for each in values)
    ]


def is_same_code(one: Git | None, other: Git | None) -> bool:
    """Return whether commit and uncommitted changes are the same."""
    if one is None or other is None:
        return one is other
    return (one.commit, one.dirty, one.diff.splitlines()) == (other.commit, other.dirty, other.diff.splitlines())


def _shown(values: Mapping[str, Any], key: str) -> str:
    return without_password(defaults.in_word(values[key])) if key in values else "not there"


def _row(what: str, values: Sequence[str | None], *, key: Callable[[str], str] = str) -> ValueDifference | None:
    known = {key(value) for value in values if value is not None}
    return (
        ValueDifference(what, tuple(UNKNOWN if value is None else value for value in values))
        if len(known) > 1
        else None
    )


def _code(makings: Sequence[Making]) -> Iterator[ValueDifference | None]:
    gits = [each.git for each in makings]
    if all(is_same_code(git, gits[0]) for git in gits):
        changed: list[dict[str, list[str]]] = [{} for _ in gits]
    else:
        changed = [_changed_lines(git.diff if git else "") for git in gits]
        texts = [f"{git.commit[:12]}{' with changes' * git.dirty}" if git else NO_GIT for git in gits]
        alike = [text == texts[0] and not is_same_code(git, gits[0]) for text, git in zip(texts, gits, strict=True)]
        yield ValueDifference(
            "code", tuple(text + ", other ones" * more for text, more in zip(texts, alike, strict=True))
        )
    names = dict.fromkeys(name for lines in changed for name in lines)
    names |= dict.fromkeys(name for each in makings for name in each.notes if name not in (*NOTES, TOGETHER))
    for name in names:
        lines = [each.get(name, []) for each in changed]
        if any(each != lines[0] for each in lines):
            yield ValueDifference(name, tuple(_own_lines(each, lines) for each in lines))
        else:
            yield _row(name, [each.notes.get(name) for each in makings])


def _changed_lines(diff: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]:
        head, *lines = part.splitlines()
        begin = next((number for number, line in enumerate(lines) if line.startswith("@@")), None)
        body = lines if begin is None else [line for line in lines[begin:] if line[:1] in "+-"]
        found[head.rpartition(" b/")[2]] = body
    return found


def _own_lines(lines: Sequence[str], of_all: Sequence[Sequence[str]]) -> str:
    own = [line for line in lines if any(line not in other for other in of_all)]
    own.sort(key=lambda line: not line.startswith("+"))
    if not own:
        return "as committed" if not lines else "only those changes"
    return f"{own[0][0]} {own[0][1:].strip()}" + (f" (and {len(own) - 1} more lines)" if len(own) > 1 else "")


def _packages(makings: Sequence[Making]) -> Iterator[ValueDifference | None]:
    sides = [each.packages for each in makings]
    if not all(sides):
        torch = [f"torch {side['torch']}" if "torch" in side else None for side in sides]
        if any(sides):
            yield ValueDifference("versions", tuple(text or UNKNOWN for text in torch))
        sides = [side for side in sides if side]
        if len(sides) < 2:
            return
    names = dict.fromkeys(name for side in sides for name in side)
    differ = [name for name in sorted(names) if len({side.get(name) for side in sides}) > 1]
    differ = [name for name in differ if name not in ("runner", DISTRIBUTION)]  # told above
    deciding = [name for name in ("python", *provenance.DECIDING) if name in differ]

    def texts(show: Callable[[Mapping[str, str]], str]) -> tuple[str, ...]:
        return tuple(show(each.packages) if each.packages else UNKNOWN for each in makings)

    for name in deciding:
        yield ValueDifference(name, texts(lambda side, name=name: side.get(name, "not installed")))  # type: ignore[misc]
    if others := [name for name in differ if name not in deciding]:
        named = others[:MOST_PACKAGES]
        rest = f" and {len(others) - len(named)} more" if len(others) > len(named) else ""
        yield ValueDifference(
            "packages", texts(lambda side: ", ".join(f"{name} {side.get(name, 'none')}" for name in named) + rest)
        )
