import pytest

from runner.tracking import store, system_metrics
from runner.tracking.system_metrics import SystemMetrics


@pytest.fixture
def run_id(client, uri):
    experiment_id, _ = store.experiment_of(client, "digits", uri=uri)
    return store.find_or_create_run(client, experiment_id, {}, uid="one")


def test_the_machine_is_measured_under_mlflows_names(client, run_id):
    SystemMetrics(client, run_id, start_ms=0).sample(now=True)
    metrics = client.get_run(run_id).data.metrics
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= set(metrics)
    assert all(name.startswith("system/") for name in metrics)
    assert metrics["system/system_memory_usage_percentage"] > 0


def test_a_sample_comes_each_two_seconds_at_the_runs_age(client, run_id, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(system_metrics.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    metrics = SystemMetrics(client, run_id, start_ms=90_000)
    for now in (100.5, 101.9, 102.0, 103.9, 104.1):
        clock[0] = now
        metrics.sample()
    points = client.get_metric_history(run_id, "system/disk_usage_percentage")
    assert [(point.step, point.timestamp) for point in points] == [(12, 102_000), (14, 104_100)]


def test_an_outage_keeps_the_samples_and_raises_nothing(client, run_id, monkeypatch):
    def cut(*args, **more):
        raise ConnectionError("cut")

    clock = [100.0]
    monkeypatch.setattr(system_metrics.time, "time", lambda: clock[0])
    metrics = SystemMetrics(client, run_id, start_ms=0)
    with monkeypatch.context() as outage:
        outage.setattr(type(client), "log_batch", cut)
        metrics.sample(now=True)
    clock[0] = 101.0
    metrics.sample(now=True)
    assert len(client.get_metric_history(run_id, "system/disk_usage_percentage")) == 2


def test_a_machine_that_can_not_be_measured_is_left_unmeasured(client, run_id, monkeypatch):
    import mlflow.system_metrics.system_metrics_monitor as theirs

    def fail(*args, **more):
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(theirs, "SystemMetricsMonitor", fail)
    SystemMetrics(client, run_id, start_ms=0).sample(now=True)
    assert client.get_run(run_id).data.metrics == {}
