"""A run's journal goes in; its copy in MLflow comes out, each record once however often it is sent."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from runner.tracking import store
from runner.tracking.ack import Ack, read_ack, write_ack
from runner.tracking.journal import Points, Record, journal_path, scan

T = TypeVar("T")

#: MLflow's limits (3.17): points and parameters a call, and the length of names and values
POINTS_A_CALL = 1000
PARAMS_A_CALL = 100
LONGEST_PARAM, LONGEST_TAG, LONGEST_KEY = 6000, 8000, 250
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
#: answers that sending again does not change
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED", "INVALID_STATE"}


class Unreachable(Exception):
    """The store has not answered for as long as the caller wanted to wait."""


class Uploader:
    """Sends one journal to one store.

    patience: asked after each failed call with the seconds since the last answer; False gives up (Unreachable).
    publish_model: logs a `model` event; a model that can't be logged is a word in the ack, never a failed run.
    """

    def __init__(
        self,
        folder: Path,
        uri: str,
        *,
        patience: Callable[[float], bool],
        publish_model: Callable[[Path, str, dict[str, Any]], None] | None = None,
    ) -> None:
        self.folder, self._uri, self._patience, self._publish_model = folder, uri, patience, publish_model
        self._client: MlflowClient | None = None
        ack = read_ack(folder)
        masked = store.without_password(uri)
        # another store has nothing of this run yet
        self.ack = ack if ack.uri in ("", masked) else Ack()
        self.ack = replace(self.ack, uri=masked)

    @property
    def client(self) -> MlflowClient:
        if self._client is None:
            self._client = self._insist(lambda: store.connect(self._uri))
        return self._client

    @property
    def run_id(self) -> str:
        assert self.ack.run_id is not None  # the start event comes first in every journal
        return self.ack.run_id

    def connect(self) -> None:
        """Opens the store ahead of the first record; making a new one takes seconds."""
        _ = self.client

    def drain(self) -> bool:
        """Sends every whole record that is there. True if there was one. Raises: Unreachable."""
        before = self.ack.offset
        waiting: list[Record] = []
        size = 0
        for record in scan(journal_path(self.folder), self.ack.offset):
            if record.points is None:
                self._send_points(waiting)
                waiting, size = [], 0
                self._send_event(record)
                self._acknowledge(record.end)
                continue
            waiting.append(record)
            size += record.points.values.size
            if size >= POINTS_A_CALL:
                self._send_points(waiting)
                waiting, size = [], 0
        self._send_points(waiting)
        return self.ack.offset != before

    def end(self, status: str, *, end_ms: int, why: str) -> None:
        """Closes a run whose process went without a goodbye."""
        if self.ack.run_id is not None and not self.ack.ended:
            self._insist(lambda: self.client.set_tag(self.run_id, "end", why))
            self._insist(lambda: self.client.set_terminated(self.run_id, status, end_ms))

    def _send_points(self, records: list[Record]) -> None:
        if not records:
            return
        metrics = [metric for record in records if record.points for metric in _metrics(record.points)]
        for start in range(0, len(metrics), POINTS_A_CALL):
            self._send_metrics(metrics[start : start + POINTS_A_CALL])
        self.ack = replace(self.ack, points_written=self.ack.points_written + len(metrics))
        self._acknowledge(records[-1].end)

    def _send_metrics(self, metrics: list[Metric]) -> None:
        """One call; what the store refuses for good is halved until the point that it means is found and left out."""
        try:
            self._insist(lambda: self.client.log_batch(self.run_id, metrics=metrics))
        except MlflowException as refusal:
            if len(metrics) > 1:
                half = len(metrics) // 2
                self._send_metrics(metrics[:half])
                self._send_metrics(metrics[half:])
                return
            point = metrics[0]
            self._note(f"refused {point.key}={point.value} at step {point.step}: {_line(refusal)}")
            self.ack = replace(self.ack, points_written=self.ack.points_written - 1)

    def _send_event(self, record: Record) -> None:
        data = record.data
        try:
            match record.event:
                case "start":
                    self._start(data)
                case "tags":
                    self._log_batch(tags=data["tags"])
                case "dataset":
                    self._log_dataset(data)
                case "artifact":
                    self._log_artifact(self.folder / data["path"], data["to"] or None)
                case "model":
                    self._log_model(data)
                case "end":
                    self._insist(lambda: self.client.set_terminated(self.run_id, data["status"], data["end_ms"]))
                    self.ack = replace(self.ack, ended=True)
        except MlflowException as refusal:  # one record that the store will not take keeps no other back
            self._note(f"refused {record.event}: {_line(refusal)}")

    def _start(self, data: dict[str, Any]) -> None:
        """Finds the run by its own mark before making it: a creation whose answer was lost must not make a second."""

        def find_or_make() -> tuple[str, str]:
            experiment_id = store.experiment(self.client, self._uri, data["experiment"])
            mark = f"tags.uid = '{data['uid']}'"
            if known := self.client.search_runs([experiment_id], mark, max_results=1):
                return known[0].info.run_id, experiment_id
            tags = {"uid": data["uid"]}
            made = self.client.create_run(experiment_id, data["start_ms"], tags, data["run_name"])
            return made.info.run_id, experiment_id

        run_id, experiment_id = self._insist(find_or_make)
        self.ack = replace(self.ack, run_id=run_id, experiment_id=experiment_id)
        write_ack(self.folder, self.ack)
        self._log_batch(params=data["params"], tags=data["tags"])

    def _log_batch(self, *, params: dict[str, str] | None = None, tags: dict[str, str] | None = None) -> None:
        entries = [Param(legal_key(key), value[:LONGEST_PARAM]) for key, value in (params or {}).items()]
        for start in range(0, len(entries), PARAMS_A_CALL):
            part = entries[start : start + PARAMS_A_CALL]
            self._insist(lambda part=part: self.client.log_batch(self.run_id, params=part))  # type: ignore[misc]
        labels = [RunTag(key, value[:LONGEST_TAG]) for key, value in (tags or {}).items()]
        if labels:
            self._insist(lambda: self.client.log_batch(self.run_id, tags=labels))

    def _log_dataset(self, data: dict[str, Any]) -> None:
        fields = {name: data[name] for name in ("name", "digest", "source_type", "source", "schema", "profile")}
        context = InputTag("mlflow.data.context", data["context"])
        self._insist(lambda: self.client.log_inputs(self.run_id, [DatasetInput(Dataset(**fields), [context])]))

    def _log_artifact(self, path: Path, to: str | None) -> None:
        inside = path.resolve().is_relative_to(self.folder.resolve())
        if not inside or not path.exists():
            self._note(f"artifact {path.name} is not in the run's folder")
        elif path.is_dir():
            self._insist(lambda: self.client.log_artifacts(self.run_id, str(path), to))
        else:
            self._insist(lambda: self.client.log_artifact(self.run_id, str(path), to))

    def _log_model(self, data: dict[str, Any]) -> None:
        if self._publish_model is None:
            return
        try:
            self._publish_model(self.folder, self.run_id, data)
        except Exception as error:
            self._note(f"the model was not logged: {type(error).__name__}: {_line(error)}")

    def _insist(self, call: Callable[[], T]) -> T:
        """Calls until the store answers. Raises: MlflowException for a refusal, Unreachable when patience ends."""
        pause, silent_since = FIRST_PAUSE, time.monotonic()
        while True:
            try:
                return call()
            except Exception as error:
                if isinstance(error, MlflowException) and error.error_code in REFUSALS and not _is_transport(error):
                    raise
                self.ack = replace(self.ack, error=_line(error))
                write_ack(self.folder, self.ack)
                if not self._patience(time.monotonic() - silent_since):
                    raise Unreachable(_line(error)) from error
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    def _note(self, text: str) -> None:
        print(text, flush=True)  # into journal/publish.log
        self.ack = replace(self.ack, error=store.without_password(text))

    def _acknowledge(self, offset: int) -> None:
        self.ack = replace(self.ack, offset=offset)
        write_ack(self.folder, self.ack)


def legal_key(key: str) -> str:
    """A key as MLflow takes it: `model.layers[0]` becomes `model.layers.0`."""
    key = re.sub(r"\[(\d+)\]", r".\1", key)
    key = re.sub(r"[^\w\-./: ]", "_", key)
    return re.sub(r"/{2,}", "/", key).strip("/.")[:LONGEST_KEY] or "_"


def _metrics(points: Points) -> Iterator[Metric]:
    keys = [legal_key(name) for name in points.names]
    for step, time_ms, row in zip(points.steps.tolist(), points.times_ms.tolist(), points.values.tolist(), strict=True):
        for key, value in zip(keys, row, strict=True):
            yield Metric(key, value, time_ms, step)


def _is_transport(error: MlflowException) -> bool:
    return "Max retries" in str(error) or "failed with error code 5" in str(error)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return store.without_password(text.splitlines()[0][:300] if text else type(error).__name__)
