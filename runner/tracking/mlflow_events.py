"""What each kind of event does to a run in MLflow: status, tags, files, parent. Uploader calls it; twice leaves what once leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.trust import inside
from runner.tracking import mlflow_store
from runner.tracking.mlflow_names import MOST_NAME, MOST_PARAM, MOST_TAG, cut, valid_names

if TYPE_CHECKING:
    from mlflow import MlflowClient

Event = Mapping[str, Any]

END_TAG = "runner.end"
DIED = "the process died without saying goodbye"


class LeftOutError(Exception):
    """It can't be sent, now or later: a file is missing, a model does not build. The run goes on without it."""


def resume(client: MlflowClient, run_id: str) -> None:
    """Marks the run as running, whatever it ended as before."""
    if client.get_run(run_id).info.status != "RUNNING":
        client.update_run(run_id, status="RUNNING")
    _delete_end_tag(client, run_id)


def end(client: MlflowClient, run_id: str, event: Event, *, had_died: bool) -> None:
    """The run's status and when it ended."""
    client.set_terminated(run_id, event["status"], event["end_ms"])
    if had_died:
        _delete_end_tag(client, run_id)


def abandon(client: MlflowClient, run_id: str, *, last_ms: int) -> None:
    """The run's process is gone and left no word."""
    client.set_tag(run_id, END_TAG, DIED)
    client.set_terminated(run_id, "KILLED", last_ms)


def entities(kind: str, values: Mapping[str, Any]) -> list[Any]:
    """MLflow's entities of `params` or `tags`, with names and lengths that it takes."""
    from mlflow.entities import Param, RunTag

    if kind == "params":
        return [Param(key, value) for key, value in valid_names(values, most=MOST_PARAM).items()]
    return [RunTag(key, value) for key, value in valid_names(values, most=MOST_TAG).items()]


def without_known(client: MlflowClient, run_id: str, params: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, str]]]:
    """The params that the run has not got, and those that it has with another value, and why they stay out."""
    known = client.get_run(run_id).data.params
    changed = [
        (param, f"it is {cut(known[param.key], most=200)} there, and MLflow changes no param")
        for param in params
        if known.get(param.key, param.value) != param.value
    ]
    return [param for param in params if param.key not in known], changed


def log_dataset(client: MlflowClient, run_id: str, folder: Path, event: Event) -> None:
    """The data set that the run used, as MLflow's page shows it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = str(event.get("source") or "")
    dataset = Dataset(
        name=cut(str(event["name"]), most=2 * MOST_NAME),
        digest=str(event["digest"])[:36],
        source_type=str(event.get("source_type") or "local"),
        source=source if source.startswith("{") else json.dumps({"uri": source}),
        schema=event.get("schema"),
        profile=event.get("profile"),
    )
    tags = [InputTag("mlflow.data.context", str(event.get("context") or "training"))]
    client.log_inputs(run_id, [DatasetInput(dataset, tags)])


def log_artifact(client: MlflowClient, run_id: str, folder: Path, event: Event) -> None:
    """A file or a folder of the run's."""
    path, to = own_file(folder, event["path"]), event.get("to") or None
    if to is not None and inside(folder, str(to)) is None:
        raise LeftOutError(f"{to} is no place below the run's artifacts")
    if path.is_dir():
        client.log_artifacts(run_id, str(path), to)
    elif path.is_file():
        client.log_artifact(run_id, str(path), to)
    else:
        raise LeftOutError(f"{path} is not there")


def own_file(folder: Path, name: str) -> Path:
    """What a journal calls so: a journal may come from elsewhere. Raises: LeftOutError unless it lies in the run's folder."""
    path = inside(folder, str(name))
    if path is None:
        raise LeftOutError(f"{name} is not in the run's folder, or holds links that lead out of it")
    return path


def set_parent(client: MlflowClient, run_id: str, event: Event, *, parent_id: str | None = None) -> None:
    """Put the run below its sweep's. parent_id: None: looked up in the store.

    Raises:
        ParentMissingError: while the store has no such run.
    """
    parent_id = parent_id or mlflow_store.find_parent(client, event["experiment"], uid=event["uid"])
    client.set_tag(run_id, mlflow_store.PARENT_TAG, parent_id)


def title(event: Event) -> str:
    """What the event is about, for a message."""
    return f"{event['kind']} {event.get('path') or event.get('name') or ''}".strip()


def _delete_end_tag(client: MlflowClient, run_id: str) -> None:
    if END_TAG in client.get_run(run_id).data.tags:
        client.delete_tag(run_id, END_TAG)
