"""What a person calls a run goes in; what it was run with and what it measured comes out, from its folder or a store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import Fault, RunnerError
from runner.experiment.summary import read_summary
from runner.runs import find
from runner.runs.reproduce.compare import Points, last_step
from runner.tracking.ack import read_ack
from runner.tracking.journal_reader import read_events, read_series

RERUN, ENVIRONMENT, DIFF = "rerun.yaml", "environment.txt", "git.diff"


@dataclass(frozen=True)
class Original:
    """A run that was."""

    name: str  # its folder, or its id and the store that it lies on
    run_id: str | None  # in MLflow; None: it was not tracked
    folder: Path  # that holds its rerun.yaml and, where it has them, its environment.txt and git.diff
    store: str | None  # the URI that it was fetched from; None: `folder` is its own
    status: str  # finished, pruned, killed, failed; as a store says it: finished, killed, failed, running
    tags: Mapping[str, str]
    dataset: Mapping[str, Any]  # its name, digest and profile; empty where nothing is known
    num_steps: int | None  # that it was to have
    series: Mapping[str, Points]

    @property
    def last_step(self) -> int:
        """The last step that it measured."""
        return last_step(self.series)

    @property
    def is_whole(self) -> bool:
        """Whether it went as far as it was to go, as far as can be told."""
        return self.status == "finished" and (self.num_steps is None or self.last_step >= self.num_steps)

    def read(self, name: str) -> str | None:
        """The text of one of its files; None where it has none."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else None


@contextmanager
def original(wanted: str, *, uri: str, trusted: bool) -> Iterator[Original]:
    """The run. From a store it is copied into a folder that goes when this ends.

    wanted: a run's folder, `last`, or its id in MLflow; the beginning of that is enough where the run lies below
    outputs/ or multirun/. uri: of the store that is asked where no folder is the run's.
    trusted: whether a store's configuration may name a person's own code.
    Raises: RunnerError where there is no such run, and for what its configuration may not hold.
    """
    if _lies_on_a_store(wanted):
        from runner.runs.reproduce.fetch import fetched

        with fetched(wanted, uri=uri, trusted=trusted) as found:
            yield found
    else:
        yield _in_folder(find.find(wanted, verb="reproduce").absolute(), wanted)


def default_uri(overrides: list[str]) -> str:
    """The store that these words name, or the environment, or the one of this folder."""
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("tracking.uri=")]
    return given[-1].strip("'\"") if given else os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def num_steps_of(params: Mapping[str, Any]) -> int | None:
    """How many steps a run was to have, by its parameters."""
    try:
        return int(params["facts.num_steps"])
    except (KeyError, ValueError):
        return None


def _lies_on_a_store(wanted: str) -> bool:
    is_id = len(wanted) == 32 and not set(wanted) - set("0123456789abcdef")
    return is_id and not Path(wanted).is_dir() and not find.with_id(wanted)


def _in_folder(folder: Path, wanted: str) -> Original:
    events = read_events(folder)
    starts = [event for event in events if event["kind"] == "start"]
    if not starts:
        raise RunnerError(
            Fault(f"reproduce {wanted}", f"{folder} has no journal", "a run that took a step, or -cn rerun")
        )
    datasets = [event for event in events if event["kind"] == "dataset"]
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return Original(
        name=str(shown),
        run_id=read_ack(folder).run_id,
        folder=folder,
        store=None,
        status=_status(folder),
        tags=starts[-1]["tags"],
        dataset=datasets[-1] if datasets else {},
        num_steps=num_steps_of(starts[-1]["params"]),
        series={name: (steps, values) for name, (steps, _, values) in read_series(folder).items()},
    )


def _status(folder: Path) -> str:
    """A run that left no summary was killed."""
    try:
        return str(read_summary(folder)["status"])
    except KeyError:
        return "killed"
