"""Apply each kind of event to a run in MLflow: status, tags, files, parent. Every call can be repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.trust import inside
from runner.tracking import mlflow_store
from runner.tracking.mlflow_names import MAX_NAME, MAX_PARAM, MAX_TAG, cut, valid_names

if TYPE_CHECKING:
    from mlflow import MlflowClient

Event = Mapping[str, Any]

END_TAG = "runner.end"
DIED = "the process was killed"


class LeftOutError(Exception):
    """An event that can never be sent, e.g., with a missing file or a model that can't be built."""


def resume(client: MlflowClient, run_id: str) -> None:
    """Set the status RUNNING, and remove the mark of a killed process."""
    run = client.get_run(run_id)
    if run.info.status != "RUNNING":
        client.update_run(run_id, status="RUNNING")
    if END_TAG in run.data.tags:
        client.delete_tag(run_id, END_TAG)


def end(client: MlflowClient, run_id: str, event: Event, *, had_died: bool) -> None:
    """Set the run's status and end time."""
    if had_died:
        resume(client, run_id)
    client.set_terminated(run_id, event["status"], event["end_ms"])


def abandon(client: MlflowClient, run_id: str, *, last_ms: int) -> None:
    """Set the status of a run whose process was killed."""
    client.set_tag(run_id, END_TAG, DIED)
    client.set_terminated(run_id, "KILLED", last_ms)


def entities(kind: str, values: Mapping[str, Any]) -> list[Any]:
    """Return MLflow's entities of `params` or `tags`, with names and lengths that it accepts."""
    from mlflow.entities import Param, RunTag

    if kind == "params":
        return [Param(key, value) for key, value in valid_names(values, most=MAX_PARAM).items()]
    return [RunTag(key, value) for key, value in valid_names(values, most=MAX_TAG).items()]


def without_known(client: MlflowClient, run_id: str, params: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, str]]]:
    """Return the params that the run does not have, and those that it has with another value, with the reason."""
    known = client.get_run(run_id).data.params
    changed = [
        (param, f"its value in MLflow is {cut(known[param.key], most=200)}, and MLflow does not change params")
        for param in params
        if known.get(param.key, param.value) != param.value
    ]
    return [param for param in params if param.key not in known], changed


def log_dataset(client: MlflowClient, run_id: str, event: Event) -> None:
    """Log the data set that the run used."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = str(event.get("source") or "")
    dataset = Dataset(
        name=cut(str(event["name"]), most=2 * MAX_NAME),
        digest=str(event["digest"])[:36],
        source_type=str(event.get("source_type") or "local"),
        source=source if source.startswith("{") else json.dumps({"uri": source}),
        schema=event.get("schema"),
        profile=event.get("profile"),
    )
    tags = [InputTag("mlflow.data.context", str(event.get("context") or "training"))]
    client.log_inputs(run_id, [DatasetInput(dataset, tags)])


def log_artifact(client: MlflowClient, run_id: str, folder: Path, event: Event) -> None:
    """Log a file or a directory of the run."""
    path, to = own_file(folder, event["path"]), event.get("to") or None
    if to is not None and inside(folder, str(to)) is None:
        raise LeftOutError(f"{to} is not below the run's artifacts")
    if path.is_dir():
        client.log_artifacts(run_id, str(path), to)
    elif path.is_file():
        client.log_artifact(run_id, str(path), to)
    else:
        raise LeftOutError(f"{path} does not exist")


def own_file(folder: Path, name: str) -> Path:
    """Return the file with this name in a journal. Raises: LeftOutError unless it is in the run directory."""
    path = inside(folder, str(name))
    if path is None:
        raise LeftOutError(f"{name} is not in the run directory, or contains links that leave it")
    return path


def set_parent(client: MlflowClient, run_id: str, event: Event, *, parent_id: str | None = None) -> None:
    """Put the run below its sweep's. parent_id: None: looked up in the store.

    Raises:
        ParentMissingError: while the store has no such run.
    """
    parent_id = parent_id or mlflow_store.find_parent(client, event["experiment"], uid=event["uid"])
    client.set_tag(run_id, mlflow_store.PARENT_TAG, parent_id)


def title(event: Event) -> str:
    """Return a short name of the event, for messages."""
    return f"{event['kind']} {event.get('path') or event.get('name') or ''}".strip()
