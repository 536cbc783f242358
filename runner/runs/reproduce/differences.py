"""Finds what is not as it was for a run that is repeated: code, versions, device, values, data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from runner.config.identity import flat
from runner.config.validate import without_password
from runner.device import Choice, Hardware
from runner.errors import Fault, RunnerError
from runner.experiment import provenance
from runner.experiment.run_record import data_digest
from runner.runs.reproduce.recorded import DIFF, ENVIRONMENT, RERUN, Original
from runner.training.parts import Parts
from runner.version import DISTRIBUTION, __version__

UNKNOWN = "not known"
MOST_PACKAGES = 3  # named, of those that decide nothing by themselves


@dataclass(frozen=True)
class Difference:
    what: str
    was: str
    now: str


def of_making(original: Original, choice: Choice, hardware: Hardware) -> list[Difference]:
    """Code, versions and device."""
    tags = original.tags
    found = [*_code(original), *_versions(original)]
    device = choice.device, hardware.name_of(choice.here)
    before = tags.get("device", UNKNOWN), tags.get("device_name", UNKNOWN)
    if (before[0].split(":")[0], before[1]) != (
        device[0].split(":")[0],
        device[1],
    ):  # the other one of a pair is no other
        found.append(Difference("device", "{} ({})".format(*before), "{} ({})".format(*device)))
    return found


def of_values(original: Original, cfg: DictConfig) -> list[Difference]:
    """The configuration's keys: what the person changes, and what this version has and that one had not."""
    before = flat(OmegaConf.load(original.folder / RERUN))  # type: ignore[arg-type]
    now = flat(cfg)
    ignored = ("defaults", "sweep.", "plan.", *(("tracking.uri",) if original.store else ()))
    keys = [key for key in dict.fromkeys([*now, *before]) if not key.startswith(ignored)]
    return [
        Difference(key, _shown(before, key), _shown(now, key))
        for key in keys
        if before.get(key, ...) != now.get(key, ...)
    ]


def how_to_get_the_code(original: Original, here: provenance.Git | None) -> str:
    """The words that bring the code back that the run was made with, where it was changed after its commit; or none."""
    commit = original.tags.get("git_commit")
    if commit is None or original.tags.get("git_dirty") != "true" or _is_same_code(original, here):
        return ""
    if original.store is None:
        is_root = Path(".git").exists()
        path = f"{original.name}/{DIFF}" if is_root else str(original.folder / DIFF)
    else:
        path = DIFF
    stash = "git stash && " if here is not None and here.dirty else ""
    return f"{stash}git checkout {commit} && git apply {path}"


def data_check(original: Original, *, anyway: bool, say: Callable[[str], None]) -> Callable[[Parts], None]:
    """A function that takes the built parts and raises a RunnerError when their data is not what the run had."""

    def check(parts: Parts) -> None:
        before, now = str(original.dataset.get("digest") or ""), data_digest(parts)
        if not before:
            say("data:   nothing is known of what it had: not compared")
        elif before == now:
            rows = parts.source.rows
            limits = " (of a Dataset its class and length alone)" if isinstance(rows, Dataset) else ""
            say(f"data:   the same as then, by its fingerprint {now[:12]}{limits}")
        else:
            was = f"{original.dataset.get('name')}, {_num_rows(original)} rows, fingerprint {before[:12]}"
            problem = f"{was} then; {parts.source.name}, {sum(parts.splits.sizes.values()):,} rows, fingerprint {now[:12]} now"
            if not anyway:
                asked = f"reproduce {original.name}"
                raise RunnerError(
                    Fault(asked, f"the data is not the same: {problem}", "that data, or --anyway to go on with this")
                )
            say(f"warning: the data is not the same: {problem}")

    return check


def _code(original: Original) -> Iterator[Difference]:
    here = provenance.git_state()
    commit = original.tags.get("git_commit")
    if (commit is None and here is None) or _is_same_code(original, here):
        return
    was = _commit(commit, original.tags.get("git_dirty") == "true") if commit else "in no git repository"
    now = _commit(here.commit, here.dirty) if here else "in no git repository"
    changes_differ = here is not None and commit == here.commit and was == now
    yield Difference("code", was, f"{now}, other ones" if changes_differ else now)


def _is_same_code(original: Original, here: provenance.Git | None) -> bool:
    if here is None or original.tags.get("git_commit") != here.commit:
        return False
    was_dirty = original.tags.get("git_dirty") == "true"
    return was_dirty == here.dirty and (
        not was_dirty or (original.read(DIFF) or "").splitlines() == here.diff.splitlines()
    )


def _commit(commit: str, dirty: bool) -> str:
    return f"{commit[:12]} with changes" if dirty else commit[:12]


def _versions(original: Original) -> Iterator[Difference]:
    was_runner = original.tags.get("runner_version", UNKNOWN)
    if was_runner != __version__:
        yield Difference("runner", was_runner, __version__)
    text = original.read(ENVIRONMENT)
    if text is None:
        yield Difference("versions", UNKNOWN, f"torch {provenance.versions()['torch']}")
        return
    before, now = provenance.packages(text), provenance.packages(provenance.environment())
    differ = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    differ = [name for name in differ if name not in ("runner", DISTRIBUTION)]  # told above
    deciding = [name for name in ("python", *provenance.DECIDING, "platform") if name in differ]
    for name in deciding:
        yield Difference(name, before.get(name, "not installed"), now.get(name, "not installed"))
    if others := [name for name in differ if name not in deciding]:
        named = others[:MOST_PACKAGES]
        rest = f" and {len(others) - len(named)} more" if len(others) > len(named) else ""
        was, is_now = (", ".join(f"{name} {side.get(name, 'none')}" for name in named) + rest for side in (before, now))
        yield Difference("packages", was, is_now)


def _num_rows(original: Original) -> str:
    try:
        return f"{json.loads(original.dataset['profile'])['num_rows']:,}"
    except (KeyError, TypeError, ValueError):
        return "?"


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not there"
    return "null" if values[key] is None else without_password(str(values[key]))
