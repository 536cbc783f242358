"""The machine's load as MLflow's `system/...` points, measured in the uploader process, once for all runs."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

EVERY_SECONDS = 2.0
#: a load over a shorter time is noise: another run's sample is used again
SHORTEST_SECONDS = 0.5
MAX_WAITING = 10_000  # points that wait during an outage; older ones are dropped
#: with tracking.points=2000, samples are 0.5 % of the run's age apart from its 7th minute on: 2,000 in a month
PART_OF_AGE = 10

log = logging.getLogger("runner.tracking")


class Machine:
    """Measurements for all runs, with MLflow's monitors.

    They are shared because psutil returns the CPU's load since the process's last call: a second run would read 0 or 100 %.
    """

    def __init__(self) -> None:
        self.num_samples, self.time_ms = 0, 0  # time of the last one
        self.values: dict[str, float] = {}
        self.num_watchers = 0
        self.lock = threading.RLock()  # several threads send
        self._is_shared = False  # stays True after the other runs have ended
        self._monitors: list[Any] | None = None
        self._measured_at = 0.0  # of time.monotonic()

    def watch(self, run_id: str, uri: str) -> None:
        """Add a run. The load is measured from the first one on."""
        with self.lock:
            self.num_watchers += 1
            self._is_shared |= self.num_watchers > 1
            if self._monitors is None:
                self._monitors = _monitors(run_id, uri)
                self._measured_at = time.monotonic()

    def look(self, *, now: bool) -> None:
        """Measure if the last sample is old. now: also if it is less than two seconds old."""
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
    """Sends the machine's samples for one run, in the thread that calls sample().

    MLflow's own thread ends at the first failed call, and requests the run before each sample. A sample's step is the run's
    age in seconds; samples become rarer with it. With many runs, each sends several samples at once, so that the store is
    called about every two seconds.
    """

    def __init__(
        self, client: MlflowClient, run_id: str, machine: Machine, *, start_ms: int, most: int | None = None
    ) -> None:
        """most: about how many points per metric (None: all samples)."""
        self._client, self._run_id, self._machine, self._start_ms = client, run_id, machine, start_ms
        self._apart = PART_OF_AGE / most if most else 0.0  # share of the run's age between samples
        self._kept_ms = 0  # time of the last sample
        self._waiting: list[Any] = []
        self._num_samples = 0  # waiting
        machine.watch(run_id, client.tracking_uri)
        self._last = machine.num_samples  # by number, as the clock may be set back
        #: MLflow counts a run's traffic from its start
        self._before = {name: value for name, value in machine.values.items() if name.startswith("network_")}

    def sample(self, *, now: bool = False, sends: bool = True) -> None:
        """Measure if it is time to, and send if it is this run's turn. Never raises.

        Args:
            now: Measure and send at once.
            sends: False only measures; required in another thread than the one that sends.
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
        """Send the last sample and all waiting ones."""
        self.sample(now=True)
        self.leave()

    def leave(self) -> None:
        """Stop sampling."""
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
        del self._waiting[:-MAX_WAITING]


def _monitors(run_id: str, uri: str) -> list[Any]:
    try:
        import psutil
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        psutil.cpu_percent()  # the first call returns 0
        return list(SystemMetricsMonitor(run_id, tracking_uri=uri).monitors)
    except Exception as error:
        log.warning("this machine can't be measured: %s", error)
        return []
