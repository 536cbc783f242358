"""Compare a run in the store with the acknowledged part of its journal, as a database may be restored from a backup.

The uploader calls it when it opens a store that already has the run.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.tracking import mlflow_events
from runner.tracking.ack import Ack, end_time_ms
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import scan_events
from runner.tracking.mlflow_store import PARENT_TAG, UID_TAG, ParentMissingError
from runner.tracking.upload_log import REJECTED

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def has_lost_points(client: MlflowClient, run: Run, ack: Ack) -> bool:
    """Check that the store still has as many points of each metric as it acknowledged.

    Takes one request per metric, 2 ms for 1,000 points, 1 s for a million.
    """
    from mlflow.exceptions import MlflowException
    from mlflow.utils.search_utils import SearchUtils

    store: Any = client._tracking_client.store  # the client's own method reads the whole history (3.17.2)
    try:
        for key, (num_points, _, _) in ack.last_points.items():
            token = SearchUtils.create_page_token(num_points - 1)
            if not store.get_metric_history(run.info.run_id, key, max_results=1, page_token=token):
                return True
    except MlflowException:  # a server with other page tokens
        return bool(_without_latest(run, ack))
    return False


def restore(client: MlflowClient, run: Run, ack: Ack, *, folder: Path) -> list[str]:
    """Send the params, tags, parent and status that the store has lost, each where it is missing.

    Returns: the metrics whose last value MLflow's lists can't show again.
    """
    rejected = folder / REJECTED
    refused = {json.loads(line)["key"] for line in rejected.read_text().splitlines()} if rejected.is_file() else set()
    params: dict[str, Any] = {}
    tags: dict[str, Any] = {
        tag.key: tag for tag in mlflow_events.entities("tags", {UID_TAG: ack.uid} if ack.uid else {})
    }
    parent = end = None
    for event in scan_events(folder / JOURNAL, end=ack.offset):
        params = {each.key: each for each in mlflow_events.entities("params", event.get("params") or {})} | params
        tags |= {each.key: each for each in mlflow_events.entities("tags", event.get("tags") or {})}
        parent = event if event["kind"] == "parent" else parent
        end = event if event["kind"] == "end" else end
    run_id, known = run.info.run_id, run.data
    there = {*known.params, *refused}
    lost = [param for key, param in params.items() if key not in there]
    lost_tags = [tag for key, tag in tags.items() if key not in known.tags and key not in refused]
    if lost or lost_tags:
        client.log_batch(run_id, params=lost, tags=lost_tags)
    is_linked = PARENT_TAG in known.tags or any(event["kind"] == "parent" for event in ack.postponed)
    if parent is not None and not is_linked:
        with contextlib.suppress(ParentMissingError):
            mlflow_events.set_parent(client, run_id, parent)
    if ack.ended and end is not None and run.info.status != end["status"]:
        mlflow_events.end(client, run_id, end | {"end_ms": end_time_ms(folder, ack, end["end_ms"])}, had_died=False)
    if ack.died and (run.info.status != "KILLED" or mlflow_events.END_TAG not in known.tags):
        last_ms = int((folder / JOURNAL).stat().st_mtime * 1000)
        mlflow_events.abandon(client, run_id, last_ms=end_time_ms(folder, ack, last_ms))
    return _restore_latest(client, run_id, _without_latest(run, ack))


def _without_latest(run: Run, ack: Ack) -> list[str]:
    """The metrics whose last value in MLflow's lists is missing or older than the last point sent."""
    shown = {metric.key: (metric.step, metric.timestamp) for metric in run.data.to_proto().metrics}
    return [key for key, (_, *last) in ack.last_points.items() if key not in shown or shown[key] < tuple(last)]


def _restore_latest(client: MlflowClient, run_id: str, keys: list[str]) -> list[str]:
    """MLflow writes its table of last values only with a new point; sending one again changes nothing there."""
    engine = getattr(client._tracking_client.store, "engine", None)
    if engine is None or not keys:
        return keys
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from sqlalchemy.orm import Session

    fields = ("value", "timestamp", "step", "is_nan")
    with Session(engine) as session:
        for key in keys:
            points = session.query(SqlMetric).filter_by(run_uuid=run_id, key=key)
            last = points.order_by(SqlMetric.step.desc(), SqlMetric.timestamp.desc(), SqlMetric.value.desc()).first()
            if last is not None:
                values = {name: getattr(last, name) for name in fields}
                session.merge(SqlLatestMetric(run_uuid=run_id, key=key, **values))
        session.commit()
    return []
