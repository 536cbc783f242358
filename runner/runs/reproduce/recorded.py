"""A recorded run, its configuration and its metrics, read from its directory or from a store. For `reproduce` and `diff`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import defaults
from runner.config.identity import NOT_CHOSEN
from runner.config.trust import rerun_problems, trusting
from runner.errors import RunnerError, refuse
from runner.experiment.summary import Summary
from runner.experiment.terminal import short
from runner.runs import find
from runner.runs.history import ID, of_store
from runner.runs.reproduce.compare import NOT_OF_THE_RUN, Points, last_step
from runner.tracking import mlflow_store, store_uri
from runner.tracking.ack import read_ack
from runner.tracking.journal import is_being_written
from runner.tracking.journal_reader import read_events, read_series

if TYPE_CHECKING:
    from mlflow.entities import Run

RERUN, ENVIRONMENT, DIFF = "rerun.yaml", "environment.txt", "git.diff"


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
        values = defaults.values_of(self.folder / RERUN)
        return {key: value for key, value in values.items() if not key.startswith(NOT_CHOSEN)}

    def read(self, name: str) -> str | None:
        """Return the text of one of its files; None if the file does not exist."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.is_file() else None


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
    if _is_in_store(wanted):
        with _fetched(f"{verb} {wanted}", wanted, uri=uri, trusted=trusted) as run:
            yield run
    else:
        look = find.find if verb == "reproduce" else find.locate
        yield _in_folder(look(wanted, verb=verb).absolute(), asked=f"{verb} {wanted}")


def default_uri(overrides: list[str]) -> str:
    """Return the store in the overrides, the environment, or the current directory."""
    uris = [override.partition("=")[2] for override in overrides if override.lstrip("+").startswith("tracking.uri=")]
    return uris[-1].strip("'\"") if uris else os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def _is_in_store(wanted: str) -> bool:
    return bool(ID.fullmatch(wanted)) and not Path(wanted).is_dir() and not find.with_id(wanted)


def _in_folder(folder: Path, *, asked: str) -> RecordedRun:
    events = read_events(folder)
    starts = [event for event in events if event["kind"] == "start"]
    if not starts:
        raise RunnerError.of(asked, f"`{folder}` has no journal", "use a run that took a step, or `-cn rerun`")
    datasets = [event for event in events if event["kind"] == "dataset"]
    return RecordedRun(
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
    return Summary.read(folder).status or "killed"


@contextmanager
def _fetched(asked: str, run_id: str, *, uri: str, trusted: bool) -> Iterator[RecordedRun]:
    """Fetch a run from a store. Imports MLflow (1 s); one request per 25,000 points of a metric.

    Args:
        asked: The command, for messages.

    Raises:
        RunnerError: If the store does not answer, has no such run, or the configuration is not allowed.
    """
    where = store_uri.shown(uri)
    path = store_uri.sqlite_path(uri)
    uri = uri if path is None else where  # MLflow caches stores by URI, independent of the current directory
    if path is not None and not path.is_file():  # opening it would create it
        problem = f"no run in outputs or multirun has this id, and the store {where} does not exist"
        raise RunnerError.of(asked, problem, f"run `{asked} tracking.uri=URI`")
    with tempfile.TemporaryDirectory(prefix="runner-reproduce-") as name:
        folder = Path(name)
        try:
            with mlflow_store.settings():
                run, series = _download(run_id, folder, uri)
        except Exception as error:
            problem = f"no run in outputs or multirun has this id; the store: {mlflow_store.explain(error, uri=uri)}"
            raise RunnerError.of(
                asked, problem, f"name the run directory, or the store: `{asked} tracking.uri=URI`"
            ) from error
        rerun = folder / RERUN
        if not rerun.is_file():
            problem = f"the run in {where} has no artifact `{RERUN}`: it is a sweep's parent, or another program's"
            raise RunnerError.of(asked, problem, "use the id of a run that this program tracked")
        with trusting(trusted):
            refuse(rerun_problems(rerun, look=_download_command(RERUN, run_id, uri)))
        with trusting():  # the checked file
            yield _of_store_run(run, folder, uri=uri, series=series)


def _download_command(name: str, run_id: str, uri: str) -> str:
    """Return the command that downloads one of the run's files to the current directory."""
    return f"MLFLOW_TRACKING_URI={store_uri.shown(uri)} mlflow artifacts download -r {run_id} -a {name} -d ."


def _download(run_id: str, folder: Path, uri: str) -> tuple[Run, dict[str, Points]]:
    client = mlflow_store.open_store(uri)
    run = client.get_run(run_id)
    names = {item.path for item in client.list_artifacts(run_id)}
    for name in (RERUN, ENVIRONMENT, DIFF):
        if name in names:
            client.download_artifacts(run_id, name, str(folder))
    series = {name: (steps, values) for name, (steps, _, values) in of_store(client, run).items()}
    return run, {name: points for name, points in series.items() if not name.startswith(NOT_OF_THE_RUN)}


def _of_store_run(run: Run, folder: Path, *, uri: str, series: Mapping[str, Points]) -> RecordedRun:
    datasets = run.inputs.dataset_inputs if run.inputs else []
    dataset: dict[str, Any] = {}
    if datasets:
        last = datasets[-1].dataset
        dataset = {"name": last.name, "digest": last.digest, "profile": last.profile}
    return RecordedRun(
        name=f"{run.info.run_id} on {store_uri.shown(uri)}",
        run_id=run.info.run_id,
        folder=folder,
        store=uri,
        status=str(run.info.status).lower(),
        tags=run.data.tags,
        dataset=dataset,
        num_steps=num_steps_of(run.data.params),
        series=series,
    )
