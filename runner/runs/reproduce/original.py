"""Finds the run that is to be repeated, in its folder or in a store: what it was run with and what it measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import Fault, RunnerError
from runner.experiment.summary import read_summary
from runner.experiment.terminal import short
from runner.runs import find
from runner.runs.reproduce.fetch import fetched
from runner.runs.reproduce.recorded import Original, num_steps_of
from runner.tracking.ack import read_ack
from runner.tracking.journal import is_being_written
from runner.tracking.journal_reader import read_events, read_series


@contextmanager
def original(wanted: str, *, uri: str, trusted: bool, verb: str = "reproduce") -> Iterator[Original]:
    """The run. From a store it is copied into a folder that goes when this ends.

    wanted: a run's folder, `last`, or its id in MLflow; the beginning of that is enough where the run lies below
    outputs/ or multirun/. uri: of the store that is asked where no folder is the run's.
    trusted: whether a store's configuration may name a person's own code.
    verb: of the command that asks; where it is not `reproduce`, the run may be running.
    Raises: RunnerError where there is no such run, and for what its configuration may not hold.
    """
    if _lies_on_a_store(wanted):
        with fetched(f"{verb} {wanted}", wanted, uri=uri, trusted=trusted) as found:
            yield found
    else:
        look = find.find if verb == "reproduce" else find.locate
        yield _in_folder(look(wanted, verb=verb).absolute(), asked=f"{verb} {wanted}")


def default_uri(overrides: list[str]) -> str:
    """The store that these words name, or the environment, or the one of this folder."""
    given = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("tracking.uri=")]
    return given[-1].strip("'\"") if given else os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def _lies_on_a_store(wanted: str) -> bool:
    is_id = len(wanted) == 32 and not set(wanted) - set("0123456789abcdef")
    return is_id and not Path(wanted).is_dir() and not find.with_id(wanted)


def _in_folder(folder: Path, *, asked: str) -> Original:
    events = read_events(folder)
    starts = [event for event in events if event["kind"] == "start"]
    if not starts:
        raise RunnerError(Fault(asked, f"{folder} has no journal", "a run that took a step, or -cn rerun"))
    datasets = [event for event in events if event["kind"] == "dataset"]
    return Original(
        name=short(folder),
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
    if is_being_written(folder):
        return "running"
    return str(read_summary(folder).get("status", "killed"))
