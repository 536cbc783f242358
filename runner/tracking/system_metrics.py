"""A machine goes in; its load comes out as MLflow's own `system/...` points of a run, one sample each two seconds."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow import MlflowClient

EVERY_SECONDS = 2.0
MOST_WAITING = 10_000  # points that an outage may hold back; older ones are dropped

log = logging.getLogger("runner.publish")


class SystemMetrics:
    """Samples with MLflow's own monitors, in the thread of whoever calls sample().

    MLflow's thread around them ends at the first call that fails, and asks for the run before each sample.
    A sample's step is the run's age in seconds.
    """

    def __init__(self, client: MlflowClient, run_id: str, *, start_ms: int) -> None:
        self._client, self._run_id, self._start_ms = client, run_id, start_ms
        self._waiting: list[Any] = []
        self._next = time.monotonic() + EVERY_SECONDS  # the load is measured since the monitors began
        self._monitors = _monitors(run_id, client.tracking_uri)

    def sample(self, *, now: bool = False) -> None:
        """Measures if it is time to, and sends. Never raises: no run fails for this."""
        if not self._monitors or not (now or time.monotonic() >= self._next):
            return
        self._next = time.monotonic() + EVERY_SECONDS
        try:
            self._measure()
            self._client.log_batch(self._run_id, metrics=self._waiting[-1000:])
            self._waiting = self._waiting[:-1000]
        except Exception as error:
            log.debug("system metrics wait", exc_info=error)

    def _measure(self) -> None:
        from mlflow.entities import Metric

        time_ms = int(time.time() * 1000)
        step = max(0, time_ms - self._start_ms) // 1000
        for monitor in self._monitors:
            monitor.collect_metrics()
            found = monitor.aggregate_metrics()
            self._waiting += [Metric(f"system/{name}", float(value), time_ms, step) for name, value in found.items()]
            monitor.clear_metrics()
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
