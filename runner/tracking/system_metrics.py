"""The machine's load as MLflow's own `system/...` points, measured in the publishing process, once for all runs that it follows."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

EVERY_SECONDS = 2.0
#: a load over less than that is noise: of a sample taken for another run just now, a copy is better
SHORTEST_SECONDS = 0.5
MOST_WAITING = 10_000  # points that an outage may hold back; older ones are dropped
#: of a run that has tracking.points=2000 samples come each half a percent of its age from its 7th minute on: 2,000 in a month
PART_OF_AGE = 10

log = logging.getLogger("runner.tracking")


class Machine:
    """One measurement for all runs that ask at about the same time, with MLflow's own monitors.

    Not one for each run: psutil gives the load of the CPU since anybody in the process asked last, and the second of
    two runs read 0 or 100 %.
    """

    def __init__(self) -> None:
        self.num_samples, self.time_ms = 0, 0  # and when the last one was
        self.values: dict[str, float] = {}
        self.num_watchers = 0
        self.lock = threading.RLock()  # several threads send
        self._is_shared = False  # or has been
        self._monitors: list[Any] | None = None
        self._measured_at = 0.0  # of time.monotonic()

    def watch(self, run_id: str, uri: str) -> None:
        """One more run wants it measured; the load is measured since the first one began."""
        with self.lock:
            self.num_watchers += 1
            self._is_shared |= self.num_watchers > 1
            if self._monitors is None:
                self._monitors = _monitors(run_id, uri)
                self._measured_at = time.monotonic()

    def look(self, *, now: bool) -> None:
        """Measures if the last sample is old. now: also if it is less than two seconds old."""
        age = time.monotonic() - self._measured_at
        if not self._monitors or (age < EVERY_SECONDS and not now):
            return
        if age < SHORTEST_SECONDS and self._is_shared:
            return
        self._measured_at = time.monotonic()
        self.num_samples, self.time_ms = self.num_samples + 1, int(time.time() * 1000)
        for monitor in self._monitors:
            monitor.collect_metrics()
            self.values.update(monitor.aggregate_metrics())
            monitor.clear_metrics()


class SystemMetrics:
    """Sends a run the machine's samples, in the thread of whoever calls sample().

    MLflow's thread around its monitors ends at the first call that fails, and asks for the run before each sample.
    A sample's step is the run's age in seconds; as it grows, samples come less often. However many runs there are, the store
    is called about each two seconds: 16 runs that send 16 samples now and then take 0.5 % of a core, and 3 % if each sends
    each sample (2026-11).
    """

    def __init__(
        self, client: MlflowClient, run_id: str, machine: Machine, *, start_ms: int, most: int | None = None
    ) -> None:
        """most: points of each metric, about (None: each sample goes)."""
        self._client, self._run_id, self._machine, self._start_ms = client, run_id, machine, start_ms
        self._apart = PART_OF_AGE / most if most else 0.0  # of the run's age, between samples
        self._kept_ms = 0  # when the last one was
        self._waiting: list[Any] = []
        self._num_samples = 0  # that wait
        machine.watch(run_id, client.tracking_uri)
        self._last = machine.num_samples  # by their number: the machine's clock may be set back
        #: MLflow counts a run's traffic from the run's beginning
        self._before = {name: value for name, value in machine.values.items() if name.startswith("network_")}

    def sample(self, *, now: bool = False, sends: bool = True) -> None:
        """Measure if it is time to, and send if it is this run's turn. Never raises: no run fails because of this.

        Args:
            now: measure and send at once.
            sends: False only measures, in another thread than the one that sends.
        """
        batch: list[Any] = []
        num_samples = 0
        try:
            with self._machine.lock:
                self._machine.look(now=now)
                if self._machine.num_samples > self._last and (now or self._is_due()):
                    self._keep()
                if sends and (now or self._num_samples >= self._machine.num_watchers):
                    self._waiting, batch = self._waiting[:-1000], self._waiting[-1000:]
                    num_samples, self._num_samples = self._num_samples, 0
            if batch:
                self._client.log_batch(self._run_id, metrics=batch)
        except Exception as error:
            log.debug("system metrics wait", exc_info=error)
            with self._machine.lock:
                self._waiting[:0] = batch
                self._num_samples += num_samples

    def close(self) -> None:
        """The last sample, and whatever waits."""
        self.sample(now=True)
        self.leave()

    def leave(self) -> None:
        """It is not sampled any more."""
        with self._machine.lock:
            self._machine.num_watchers -= 1

    def _is_due(self) -> bool:
        time_ms = self._machine.time_ms
        return abs(time_ms - self._kept_ms) >= self._apart * (time_ms - self._start_ms)  # a clock may be set back

    def _keep(self) -> None:
        from mlflow.entities import Metric

        self._last, time_ms = self._machine.num_samples, self._machine.time_ms
        self._kept_ms = time_ms
        step = max(0, time_ms - self._start_ms) // 1000
        for name, value in self._machine.values.items():
            self._waiting.append(Metric(f"system/{name}", value - self._before.get(name, 0.0), time_ms, step))
        self._num_samples += 1
        del self._waiting[:-MOST_WAITING]


def _monitors(run_id: str, uri: str) -> list[Any]:
    try:
        import psutil
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        psutil.cpu_percent()  # the first call has nothing to compare with, and says 0
        return list(SystemMetricsMonitor(run_id, tracking_uri=uri).monitors)
    except Exception as error:
        log.warning("this machine can't be measured: %s", error)
        return []
