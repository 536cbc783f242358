import itertools
import types

import pytest

from runner.tracking import mlflow_store, system_metrics
from runner.tracking.system_metrics import Machine, SystemMetrics


@pytest.fixture
def run_id(client, uri):
    experiment_id, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    return mlflow_store.find_or_create_run(client, experiment_id, {}, uid="one")[0]


def test_machine_metrics_have_names_of_mlflow(client, run_id):
    SystemMetrics(client, run_id, Machine(), start_ms=0).sample(now=True)
    metrics = client.get_run(run_id).data.metrics
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= set(metrics)
    assert all(name.startswith("system/") for name in metrics)
    assert metrics["system/system_memory_usage_percentage"] > 0


def test_samples_come_every_two_seconds(client, run_id, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    metrics = SystemMetrics(client, run_id, Machine(), start_ms=90_000)
    for now in (100.5, 101.9, 102.0, 103.9, 104.1):
        clock[0] = now
        metrics.sample()
    points = client.get_metric_history(run_id, "system/disk_usage_percentage")
    assert [(point.step, point.timestamp) for point in points] == [(12, 102_000), (14, 104_100)]


def test_clock_set_back_ends_nothing(client, run_id, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    metrics = SystemMetrics(client, run_id, Machine(), start_ms=90_000)
    for now in (100.0, 40.0, 42.0):
        clock[0] = now
        metrics.sample(now=True)
    points = client.get_metric_history(run_id, "system/disk_usage_percentage")
    assert sorted((point.step, point.timestamp) for point in points) == [(0, 40_000), (0, 42_000), (10, 100_000)]


def test_outage_keeps_samples_and_raises_nothing(client, run_id, monkeypatch):
    def cut(*args, **more):
        raise ConnectionError("cut")

    clock = [100.0]
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    metrics = SystemMetrics(client, run_id, Machine(), start_ms=0)
    with monkeypatch.context() as outage:
        outage.setattr(type(client), "log_batch", cut)
        metrics.sample(now=True)
    clock[0] = 101.0
    metrics.sample(now=True)
    assert len(client.get_metric_history(run_id, "system/disk_usage_percentage")) == 2


def test_failing_monitor_leaves_machine_unmeasured(client, run_id, monkeypatch):
    import mlflow.system_metrics.system_metrics_monitor as theirs

    def fail(*args, **more):
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(theirs, "SystemMetricsMonitor", fail)
    SystemMetrics(client, run_id, Machine(), start_ms=0).sample(now=True)
    assert client.get_run(run_id).data.metrics == {}


class Meter:
    """A machine with a known load: each measurement returns the number of measurements."""

    def __init__(self):
        self.count = 0

    def collect_metrics(self):
        self.count += 1

    def aggregate_metrics(self):
        return {"load": float(self.count), "network_receive_megabytes": 10.0 * self.count}

    def clear_metrics(self):
        pass


def test_runs_share_each_measurement_and_send_in_turn(client, uri, monkeypatch):
    experiment_id, _ = mlflow_store.experiment_of(client, "digits", uri=uri)
    ids = [mlflow_store.find_or_create_run(client, experiment_id, {}, uid=str(number))[0] for number in range(3)]
    clock, meter, calls = [100.0], Meter(), []
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    monkeypatch.setattr(system_metrics, "_monitors", lambda run_id, uri: [meter])
    whole = type(client).log_batch
    monkeypatch.setattr(
        type(client), "log_batch", lambda self, run_id, **how: (calls.append(run_id), whole(self, run_id, **how))
    )
    machine = Machine()
    runs = [SystemMetrics(client, run_id, machine, start_ms=100_000) for run_id in ids]

    def sample(until):
        while clock[0] < until:
            clock[0] += 0.5
            for run in runs:
                run.sample()

    sample(until=112)
    assert meter.count == 6 and len(calls) == 6  # at 6 s and at 12 s, three samples of each run
    late = SystemMetrics(client, ids[0], machine, start_ms=112_000)
    clock[0] = 113.0
    for run in (*runs, late):
        run.close()  # all within half a second: one measurement
    assert meter.count == 7 and machine.num_watchers == 0
    for run_id in ids[1:]:
        points = client.get_metric_history(run_id, "system/load")
        assert [(point.step, point.value) for point in points] == [(2 * n, n) for n in range(1, 7)] + [(13, 7)]
    traffic = {
        point.step: point.value for point in client.get_metric_history(ids[0], "system/network_receive_megabytes")
    }
    assert traffic == {2: 10, 4: 20, 6: 30, 8: 40, 10: 50, 12: 60, 13: 70, 1: 10}  # the late one counts from its start


@pytest.mark.parametrize(("most", "least", "greatest"), [(100, 55, 100), (None, 10_800, 10_800)])
def test_long_run_has_as_few_samples(monkeypatch, most, least, greatest):
    clock, sent = [100_000.0], []
    client = types.SimpleNamespace(tracking_uri="", log_batch=lambda run_id, metrics: sent.extend(metrics))
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    monkeypatch.setattr(system_metrics, "_monitors", lambda run_id, uri: [Meter()])
    metrics = SystemMetrics(client, "run", Machine(), start_ms=100_000_000, most=most)
    for _ in range(10_800):  # six hours
        clock[0] += 2.0
        metrics.sample()
    steps = [point.step for point in sent if point.key == "system/load"]
    assert least <= len(steps) <= greatest and steps[:10] == [*range(2, 22, 2)]
    assert most is None or max(b - a for a, b in itertools.pairwise(steps)) <= 21_600 / 9
