"""Send one run's journal to MLflow, in order, each record once: in the uploader process, and in `sync`."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.tracking import journal_reader, mlflow_events, mlflow_store, store_check, thinning
from runner.tracking.ack import Ack, UploadProgress, end_time_ms, start_time_ms
from runner.tracking.journal_records import FILE, Gap, Points, Record, has_records, scan, scan_names
from runner.tracking.mlflow_model import Build, publish_model
from runner.tracking.mlflow_names import Names
from runner.tracking.system_metrics import Machine, SystemMetrics

if TYPE_CHECKING:
    from mlflow import MlflowClient

MAX_POINTS = 1000  # in one call, MLflow's limit
MAX_NAMED = 100  # params or tags in one call
MAX_READ = 200_000  # points of the journal between two acknowledgements, however few of them are sent
FILES = ("artifact", "model")  # sent last, after the metrics and the status of every run

log = logging.getLogger("runner.tracking")


@dataclass
class Known:
    """Answers of the store, shared by the uploaders of a process: a request to a server may take a second."""

    experiments: dict[str, tuple[str, str]] = field(default_factory=dict)  # id and name, by the name in the journal
    run_ids: dict[str, str] = field(default_factory=dict)  # by uid


class Uploader:
    """Sends one run's journal from the last acknowledged record on; files and models come last.

    The store merges points with the same name, time, step and value, so a batch without an answer is sent again
    unchanged. The caller waits between attempts.

    Args:
        machine: Measured while the run is running (None: it is not running).
        build: Makes the model from its node (None: mlflow_model.build_own).
        rest: Called after each call with the seconds that it took; may wait.
        takes_graph: Whether the training made the model's graph next to the journal, see publish_model().
        known: Shared by the uploaders of one store.
    """

    def __init__(
        self,
        folder: Path,
        uri: str,
        *,
        machine: Machine | None = None,
        build: Build | None = None,
        rest: Callable[[float], None] | None = None,
        takes_graph: bool = False,
        known: Known | None = None,
    ) -> None:
        self._rest, self._takes_graph, self._known = rest, takes_graph, known or Known()
        self._folder, self._uri, self._machine, self._build = folder, uri, machine, build
        self._journal = folder / FILE
        self._progress = UploadProgress(folder, uri)
        self._client: MlflowClient | None = None
        self._system_metrics: SystemMetrics | None = None
        self._names: Names | None = None  # of the metrics up to the acknowledged record
        self._replay_end = 0  # end of the records that the store had acknowledged before it lost points
        #: step and time of the points that the store still has, by metric; None unless points are sent again
        self._stored: dict[str, set[tuple[int, int]]] | None = None
        self._failed: list[dict[str, Any]] = []  # postponed events that this process could not send
        self._parent: str | None = None  # the uid of the parent that the run was created with

    @property
    def ack(self) -> Ack:
        return self._progress.ack

    def attempt(self, *, postponed: bool = False, most: int | None = None) -> bool:
        """Send everything. Returns False after an error, which is in `ack.error`.

        Args:
            postponed: Whether to try failed files again at the end.
            most: Batches of points, events or files to send in this call (None: all).
        """
        try:
            began = time.monotonic()
            for _ in self._send(postponed=postponed, most=most):
                if self._rest is not None:
                    self._rest(time.monotonic() - began)
                began = time.monotonic()
            self.sample()
        except mlflow_store.RunGoneError as error:
            log.warning("%s: the whole journal is sent again", error)
            self._progress.begin_again()
            self._stored = None
            self._known.experiments.clear()
            self._known.run_ids.clear()
            self._failed.clear()
            return False
        except Exception as error:
            self._progress.fail(error)
            return False
        if self.ack.error and not self._failed:
            self._progress.note(error=None)
        return not (postponed and self.ack.postponed) or (most is not None and self.has_more())

    def has_more(self) -> bool:
        """Return whether anything is left that this process has not tried to send."""
        return self.has_records() or bool(self._untried())

    def has_records(self) -> bool:
        """Return whether anything except files is left; the attempt to send reports an error of the disk."""
        try:
            return has_records(self._journal, self.ack.offset)
        except OSError:
            return True

    def only_waits(self) -> bool:
        """Return whether everything is sent except events that failed."""
        return bool(self.ack.postponed) and not self.has_more()

    def only_waits_for_parent(self) -> bool:
        """Return whether everything is sent except the link to a parent that is not in the store yet."""
        return self.only_waits() and all(event["kind"] == "parent" for event in self.ack.postponed)

    def note_outage(self, error: str) -> None:
        """Store the reason of an outage that another run found."""
        if self.ack.error != error:
            self._progress.note(error=error)

    def sample(self, *, sends: bool = True) -> None:
        """Measure the machine, if it is time to. sends: must be False in another thread than attempt()."""
        if (system_metrics := self._system_metrics) is not None:
            system_metrics.sample(sends=sends)

    def abandon(self) -> bool:
        """Mark a run without an end as KILLED. Returns False if the store did not take everything."""
        if self.ack.run_id is None or self.ack.ended or self.ack.died:
            return True
        try:
            self._end_measuring()
            self._end_points(self._open(), is_over=False)
            last_ms = end_time_ms(self._folder, self.ack, int(self._journal.stat().st_mtime * 1000))
            mlflow_events.abandon(self._open(), self.ack.run_id, last_ms=last_ms)
            self._progress.note(died=True, error=self.ack.error if self.ack.postponed else None)
            for event in self._untried():  # history.parquet
                if self._send_lone(self._open(), event):
                    self._remove(event)
        except Exception as error:
            self._progress.fail(error)
            return False
        return not self._failed

    def leave(self) -> None:
        """Stop measuring the machine, as the run ends or another process continues it."""
        if self._system_metrics is not None:
            self._system_metrics.leave()
            self._system_metrics = None

    def _end_measuring(self) -> None:
        if self._system_metrics is not None:
            self._system_metrics.sample(now=True)
        self.leave()

    def _send(self, *, postponed: bool, most: int | None) -> Iterator[None]:
        client = self._open()
        if self._journal.stat().st_size < self.ack.offset:
            self._send_again("its journal was cut")
        if self.ack.run_id is None:
            self._begin_behind_damage(client)
        for batch in itertools.islice(self._batches(), most):
            if batch[0].kind == "points":
                self._send_points(client, batch)
            else:
                self._send_event(client, batch[0])
            yield
            if (most := most and most - 1) == 0:
                return
        self._stored = None
        files = self._untried()[:most]
        if postponed and (most is None or not files):
            files = [*files, *self._failed]
        for event in files:
            if self._send_lone(client, event):  # removed only after it is stored
                self._remove(event)
            yield

    def _untried(self) -> list[dict[str, Any]]:
        return [event for event in self.ack.postponed if event not in self._failed]

    def _remove(self, event: dict[str, Any]) -> None:
        self._failed = [other for other in self._failed if other != event]
        self._progress.note(postponed=tuple(other for other in self.ack.postponed if other != event))

    def _batches(self) -> Iterator[list[Record]]:
        """Yield consecutive records of points, with about MAX_POINTS to send and MAX_READ in all; events one by one."""
        batch: list[Record] = []
        num_points, num_read, end = 0, 0, self.ack.offset
        for record in scan(self._journal, end):
            if record.offset > end:
                self._progress.warn(f"{self._journal}: {Gap(end, record.offset).describe()}")
            end = record.end
            size = thinning.size(self.ack.thinning, record)
            if batch and (not size or num_points + size > MAX_POINTS or num_read > MAX_READ):
                yield batch
                batch, num_points, num_read = [], 0, 0
            if size:
                batch.append(record)
                num_points, num_read = num_points + size, num_read + record.num_points
            else:
                yield [record]
        if batch:
            yield batch

    def _begin_behind_damage(self, client: MlflowClient) -> None:
        first = next(scan(self._journal), None)
        if first is not None and first.kind != "start":
            later = next((record for record in scan(self._journal) if record.kind == "start"), None)
            if later is not None:
                self._start(client, dict(later.data))  # type: ignore[arg-type]

    def _open(self) -> MlflowClient:
        if self._client is None:
            client = mlflow_store.open_store(self._uri)
            if self.ack.run_id is not None:
                run = mlflow_store.check_run(client, self.ack.run_id)
                self._known.run_ids[self.ack.uid] = self.ack.run_id
                if store_check.is_behind(client, run, self.ack, self._folder):
                    self._send_again("the store has lost a part of it")
            self._client = client
        return self._client

    def _send_again(self, reason: str) -> None:
        log.warning("%s: %s: what is missing is sent again", self._folder, reason)
        self._replay_end, self._stored, self._names = self.ack.offset, {}, None
        self._progress.begin_again(is_same_run=True)
        self._failed.clear()

    def _lost(self, client: MlflowClient, metrics: list[Any]) -> list[Any]:
        """Return the points that the store does not have; sending known ones takes it seconds per 1,000."""
        if self._stored is None:
            return metrics
        for key in {metric.key for metric in metrics} - self._stored.keys():
            points = client.get_metric_history(self._run_id(), key)
            self._stored[key] = {(point.step, point.timestamp) for point in points}
        return [metric for metric in metrics if (metric.step, metric.timestamp) not in self._stored[metric.key]]

    def _run_id(self) -> str:
        if self.ack.run_id is None:
            raise ValueError(f"{self._journal} does not begin with the start of a run")
        return self.ack.run_id

    def _send_points(self, client: MlflowClient, records: list[Record]) -> None:
        if self._names is None:
            self._names = Names(scan_names(self._journal, self.ack.offset))
        for record in records:
            for name in record.data.names if isinstance(record.data, Points) else ():
                self._names.key(name)
        self._send_chosen(client, *thinning.choose(self.ack.thinning, records), offset=records[-1].end)

    def _send_chosen(
        self, client: MlflowClient, chosen: thinning.Chosen, state: dict[str, Any], *, offset: int
    ) -> None:
        from mlflow.entities import Metric

        names = self._names = self._names or Names(scan_names(self._journal, self.ack.offset))
        metrics = [Metric(names.key(name), value, time_ms, step) for name, time_ms, step, value in chosen]
        lost = self._lost(client, metrics)
        refused = self._send_values(client, "metrics", lost, most=MAX_POINTS)
        self._progress.reject("point", refused)
        num_restored = len(lost) - len(refused) if offset <= self._replay_end else 0
        self._progress.note(
            offset=offset,
            thinning=state,
            points_written=self.ack.points_written + len(metrics) - len(refused),
            points_left_out=state.get("left_out", self.ack.points_left_out),
            points_rejected=self.ack.points_rejected + len(refused),
            points_restored=self.ack.points_restored + num_restored,
            last_points=_with_last(self.ack.last_points, metrics, {id(metric) for metric, _ in refused}),
        )

    def _end_points(self, client: MlflowClient, *, is_over: bool) -> None:
        if self.ack.thinning:
            chosen, state = thinning.close(self.ack.thinning, is_over=is_over)
            self._send_chosen(client, chosen, state, offset=self.ack.offset)
        if self.ack.points_left_out:
            journal_reader.write_history(self._folder)
            event = {"kind": "artifact", "path": journal_reader.HISTORY, "to": ""}
            if event not in self.ack.postponed:
                self._progress.note(postponed=(*self.ack.postponed, event))

    def _send_values(self, client: MlflowClient, kind: str, values: list[Any], *, most: int) -> list[tuple[Any, str]]:
        parts = (values[begin : begin + most] for begin in range(0, len(values), most))
        return [refused for part in parts for refused in self._send_in_halves(client, kind, part)]

    def _send_in_halves(self, client: MlflowClient, kind: str, values: list[Any]) -> list[tuple[Any, str]]:
        """Send values in one call and, where the store refuses them, in halves. Returns the refused ones with the reason."""
        try:
            client.log_batch(self._run_id(), **{kind: values})  # type: ignore[arg-type]
        except Exception as error:
            if not mlflow_store.is_refusal(error):
                raise
            mlflow_store.check_run(client, self._run_id())  # a deleted run refuses every value
            if len(values) == 1:
                return [(values[0], str(error))]
            middle = len(values) // 2
            first = self._send_in_halves(client, kind, values[:middle])
            return first + self._send_in_halves(client, kind, values[middle:])
        return []

    def _send_event(self, client: MlflowClient, record: Record) -> None:
        event = {"record": record.offset, "kind": record.kind, **dict(record.data)}  # type: ignore[arg-type]
        done: dict[str, Any] = {}
        if record.kind == "start":
            self._start(client, event)
        elif record.kind in ("params", "tags"):
            self._send_named(client, record.kind, event[record.kind])
        elif record.kind in FILES:
            done = {"postponed": (*self.ack.postponed, event)}
        elif record.kind in ("dataset", "parent"):
            if not self._send_lone(client, event):
                done = {"postponed": (*self.ack.postponed, event)}
        elif record.kind == "end":
            self._end_measuring()
            self._end_points(client, is_over=event["status"] == "FINISHED")
            event["end_ms"] = end_time_ms(self._folder, self.ack, event["end_ms"])
            mlflow_events.end(client, self._run_id(), event, had_died=self.ack.died)
            done = {"ended": True, "died": False}
        else:
            self._progress.warn(f"the event `{record.kind}` is unknown to this version and was left out")
        self._progress.note(offset=record.end, **done)

    def _start(self, client: MlflowClient, event: Mapping[str, Any]) -> None:
        is_new = False  # a new run needs no requests for its params and status
        if self.ack.run_id is None or self.ack.uid != event["uid"]:
            is_new = self._create(client, event)
        if self.ack.thinning:  # also after a kill: the choice depends only on the journal
            self._send_chosen(client, *thinning.close(self.ack.thinning, is_over=False), offset=self.ack.offset)
        self._progress.note(ended=False, died=False, thinning=thinning.begin(self.ack.thinning, event.get("points")))
        if not is_new:
            self._parent = None
            mlflow_events.resume(client, self._run_id())
            self._send_named(client, "tags", {mlflow_store.UID_TAG: event["uid"], **(event.get("tags") or {})})
        self._send_named(client, "params", event.get("params") or {}, is_new=is_new)
        self.leave()
        if self._machine is not None and event.get("system_metrics"):
            start_ms, most = start_time_ms(self._folder) or event["start_ms"], (event.get("points") or {}).get("most")
            self._system_metrics = SystemMetrics(client, self._run_id(), self._machine, start_ms=start_ms, most=most)

    def _create(self, client: MlflowClient, event: Mapping[str, Any]) -> bool:
        """Find or create the run and its experiment. Returns whether the run is new."""
        name, uid = event["experiment"], event["uid"]
        parent_id = self._parent_of(event)
        if name not in self._known.experiments:
            self._known.experiments[name] = mlflow_store.experiment_of(client, name, uri=self._uri)
        experiment_id, used = self._known.experiments[name]
        if used != name:
            self._progress.warn(f"the experiment {name} was deleted in MLflow; this run is in {used}")
        try:
            run_id, is_new = mlflow_store.find_or_create_run(client, experiment_id, event, uid=uid, parent_id=parent_id)
        except Exception:
            self._known.experiments.pop(name, None)  # it may have been deleted since
            raise
        self._known.run_ids[uid] = run_id
        self._progress.note(run_id=run_id, experiment_id=experiment_id, uid=uid)
        return is_new

    def _parent_of(self, event: Mapping[str, Any]) -> str | None:
        records = itertools.islice(scan(self._journal, int(event["record"])), 1, 2) if "record" in event else ()
        uids = [str(dict(record.data)["uid"]) for record in records if record.kind == "parent"]  # type: ignore[arg-type]
        self._parent = next((uid for uid in uids if uid in self._known.run_ids), None)
        return self._known.run_ids[self._parent] if self._parent is not None else None

    def _send_named(self, client: MlflowClient, kind: str, values: Mapping[str, Any], *, is_new: bool = False) -> None:
        entities = mlflow_events.entities(kind, values)
        refused: list[tuple[Any, str]] = []
        if kind == "params" and entities and not is_new:  # the store refuses a batch that changes a param
            entities, refused = mlflow_events.without_known(client, self._run_id(), entities)
        refused += self._send_values(client, kind, entities, most=MAX_NAMED)
        self._progress.reject(kind.removesuffix("s"), refused)
        for entity, why in refused:
            self._progress.warn(f"the {kind.removesuffix('s')} {entity.key} was refused: {why}")

    def _send_lone(self, client: MlflowClient, event: dict[str, Any]) -> bool:
        from mlflow.entities import RunTag

        run_id = self._run_id()
        try:
            if event["kind"] == "model":
                experiment_id = str(self.ack.experiment_id)
                how = {"build": self._build, "takes_graph": self._takes_graph}
                publish_model(client, run_id, experiment_id, folder=self._folder, event=event, **how)  # type: ignore[arg-type]
            elif event["kind"] == "dataset":
                mlflow_events.log_dataset(client, run_id, event)
            elif event["kind"] == "artifact":
                mlflow_events.log_artifact(client, run_id, self._folder, event)
            elif event["uid"] != self._parent:
                parent_id = self._known.run_ids.get(event["uid"])
                mlflow_events.set_parent(client, run_id, event, parent_id=parent_id)
        except mlflow_events.LeftOutError as error:
            self._progress.warn(f"{mlflow_events.title(event)} was left out: {error}")
        except Exception as error:
            # raises if the store does not answer at all: the following events then wait, too
            mlflow_store.check_run(client, run_id)
            if not mlflow_store.is_refusal(error):
                self._progress.fail(error, what=f"{mlflow_events.title(event)} waits")
                self._failed = [other for other in self._failed if other != event] + [event]
                return False
            if event["kind"] == "parent":  # else each `sync` would miss the link, and send the run again
                self._progress.reject("tag", [(RunTag(mlflow_store.PARENT_TAG, event["uid"]), str(error))])
            self._progress.warn(f"{mlflow_events.title(event)} was refused: {error}")
        return True


def _with_last(before: dict[str, list[int]], metrics: list[Any], refused: set[int]) -> dict[str, list[int]]:
    """Return Ack.last_points with these metrics. MLflow merges points with the same step, time and value."""
    found = {key: list(entry) for key, entry in before.items()}
    once = {(each.key, each.step, each.timestamp, repr(each.value)) for each in metrics if id(each) not in refused}
    for key, step, time_ms, _ in once:
        num_points, *last = found.get(key, (0, step, time_ms))
        found[key] = [num_points + 1, *max(last, [step, time_ms])]
    return found
