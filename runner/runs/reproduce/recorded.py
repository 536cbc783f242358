"""A recorded run, read from its directory or from a store, and what runs were made with. For `reproduce` and `diff`."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import defaults
from runner.config.identity import as_text, chosen_of
from runner.config.trust import rerun_problems, trusting
from runner.device import Choice, Hardware
from runner.errors import RunnerError, refuse, without_password
from runner.experiment import provenance
from runner.experiment.directory import DIFF, ENVIRONMENT, RERUN, Run
from runner.experiment.provenance import TOGETHER, Git
from runner.experiment.terminal import short
from runner.runs import find
from runner.runs.history import of_store
from runner.runs.reproduce.compare import IGNORED_KEYS, Points, last_step
from runner.runs.store import open_stored
from runner.tracking import store_uri
from runner.version import DISTRIBUTION, __version__

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as StoredRun


UNKNOWN = "not known"
NO_GIT = "in no git repository"
MAX_PACKAGES = 3  # named, of the packages that don't affect numbers directly
#: notes in environment.txt that are not files
NOTES = ("platform", "machine", "threads")


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run."""

    name: str  # its directory, or its id and store
    run_id: str | None  # in MLflow; None: it was not tracked
    folder: Path  # with its rerun.yaml, and environment.txt and git.diff if they exist
    store: str | None  # the URI it was fetched from; None: `folder` is the run directory
    status: str  # finished, pruned, killed or failed; from a store: finished, killed, failed or running
    tags: Mapping[str, str]
    dataset: Mapping[str, Any]  # name, digest and profile; empty if unknown
    num_steps: int | None  # planned
    series: Mapping[str, Points]

    @property
    def last_step(self) -> int:
        """The last step with a metric."""
        return last_step(self.series)

    @property
    def is_whole(self) -> bool:
        """Whether it reached its planned end, as far as is known."""
        return self.status == "finished" and (self.num_steps is None or self.last_step >= self.num_steps)

    @property
    def data(self) -> str | None:
        """The name, size and fingerprint of the data; None if unknown."""
        digest = str(self.dataset.get("digest") or "")
        return f"{self.dataset.get('name')}, {self._num_rows} rows, fingerprint {digest[:12]}" if digest else None

    @property
    def _num_rows(self) -> str:
        try:
            return f"{json.loads(self.dataset['profile'])['num_rows']:,}"
        except (KeyError, TypeError, ValueError):
            return "?"

    def chosen(self) -> dict[str, Any]:
        """Return the chosen values of its rerun.yaml by dotted key."""
        return chosen_of(defaults.values_of(self.folder / RERUN))


def num_steps_of(params: Mapping[str, Any]) -> int | None:
    """Return the planned number of steps in the run's parameters."""
    try:
        return int(params["facts.num_steps"])
    except (KeyError, ValueError):
        return None


@contextmanager
def open_recorded(wanted: str, *, uri: str, trusted: bool, verb: str = "reproduce") -> Iterator[RecordedRun]:
    """Open a run. From a store it is copied to a temporary directory.

    Args:
        wanted: A run directory, `last`, or the MLflow run id; its beginning is enough for a run below outputs/ or multirun/.
        uri: The store for an id without a directory.
        trusted: Whether the configuration in a store may name code of the current directory.
        verb: The command. The run may be running unless it is `reproduce`.

    Raises:
        RunnerError: If the run is missing, or its configuration is not allowed.
    """
    asked = f"{verb} {wanted}"
    if not find.is_in_store(wanted):
        look = find.find if verb == "reproduce" else find.locate
        yield _of_directory(Run(look(wanted, verb=verb).absolute()), asked=asked)
        return
    with tempfile.TemporaryDirectory(prefix="runner-reproduce-") as name:
        folder, where = Path(name), store_uri.shown(uri)
        with open_stored(asked, wanted, uri) as (client, run):
            recorded = _of_store_run(client, run, folder, where=where, uri=uri)
        rerun = folder / RERUN
        if not rerun.is_file():
            problem = f"the run in {where} has no artifact `{RERUN}`: it is a sweep's parent, or another program's"
            raise RunnerError.of(asked, problem, "use the id of a run that this program tracked")
        look_at = f"MLFLOW_TRACKING_URI={where} mlflow artifacts download -r {wanted} -a {RERUN} -d ."
        with trusting(trusted):
            refuse(rerun_problems(rerun, look=look_at))
        with trusting():  # the checked file
            yield recorded


def _of_directory(run: Run, *, asked: str) -> RecordedRun:
    starts, datasets = run.events("start"), run.events("dataset")
    if not starts:
        raise RunnerError.of(asked, f"`{run.folder}` has no journal", "use a run that took a step, or `-cn rerun`")
    return RecordedRun(
        name=short(run.folder),
        run_id=run.ack.run_id,
        folder=run.folder,
        store=None,
        status=run.status,
        tags=starts[-1]["tags"],
        dataset=datasets[-1] if datasets else {},
        num_steps=num_steps_of(starts[-1]["params"]),
        series=run.points(),
    )


def _of_store_run(client: MlflowClient, run: StoredRun, folder: Path, *, where: str, uri: str) -> RecordedRun:
    """Download the run's files and points: one request per 25,000 points of a metric."""
    run_id = run.info.run_id
    for name in {RERUN, ENVIRONMENT, DIFF} & {item.path for item in client.list_artifacts(run_id)}:
        client.download_artifacts(run_id, name, str(folder))
    series = {name: (steps, values) for name, (steps, _, values) in of_store(client, run).items()}
    datasets = [each.dataset for each in (run.inputs.dataset_inputs if run.inputs else ())]
    last = datasets[-1] if datasets else None
    return RecordedRun(
        name=f"{run_id} on {where}",
        run_id=run_id,
        folder=folder,
        store=uri if store_uri.sqlite_path(uri) is None else where,
        status=str(run.info.status).lower(),
        tags=run.data.tags,
        dataset={"name": last.name, "digest": last.digest, "profile": last.profile} if last else {},
        num_steps=num_steps_of(run.data.params),
        series={name: points for name, points in series.items() if not name.startswith(IGNORED_KEYS)},
    )


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
    tags, run = original.tags, Run(original.folder)
    text = run.text(ENVIRONMENT) or ""
    commit = tags.get("git_commit")
    git = Git(commit, tags.get("git_dirty") == "true", run.text(DIFF) or "") if commit else None
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
    return without_password(as_text(values[key])) if key in values else "not there"


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
        named = others[:MAX_PACKAGES]
        rest = f" and {len(others) - len(named)} more" if len(others) > len(named) else ""
        yield ValueDifference(
            "packages", texts(lambda side: ", ".join(f"{name} {side.get(name, 'none')}" for name in named) + rest)
        )
