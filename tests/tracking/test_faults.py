"""Whole runs with faults between them and a real `mlflow server`: each ends well, and everything arrives once."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import psutil
import pytest
from fault_proxy import FAULTS, Proxy, always, at_random
from waiting import LONGEST, wait_for

from runner import cli
from runner.tracking.ack import read_ack
from runner.tracking.journal import read_points
from runner.tracking.journal_reader import read_events, read_series
from runner.tracking.mlflow_store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]

FOLDER = Path("outputs/a/run")
WORDS = [
    "data=digits",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "train.num_epochs=2",
    "metrics.pull_every=5",
    "device=cpu",
    "scheduler=constant",
    "tracking.log_model=false",
    "tracking.system_metrics=false",
    "tracking.grace_seconds=1",
    f"hydra.run.dir={FOLDER}",
]


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    """The curves are enough to test that plots arrive."""
    monkeypatch.setattr("runner.experiment.figures._draw_predictions", lambda *args: [])


@pytest.fixture
def proxy(server):
    with Proxy(server.port, delay_seconds=0.1) as proxy:
        yield proxy


def train(uri, *words):
    assert cli.main([*WORDS, f"tracking.uri={uri}", *words]) == 0
    assert json.loads((FOLDER / "summary.json").read_text())["status"] == "finished"


def sync(uri):
    return cli.main(["sync", "outputs", f"tracking.uri={uri}"])


def sync_all(uri):
    """Sync repeatedly, as a user would."""
    for _ in range(5):
        if sync(uri) == 0:
            return
    pytest.fail(f"something is left: {read_ack(FOLDER)}")


def check_page(store, *, status="FINISHED"):
    """Check that everything in the journal is in the store, once and unchanged. Returns MLflow's run."""
    client = open_store(store)
    events = read_events(FOLDER)
    starts = [event for event in events if event["kind"] == "start"]
    experiment = client.get_experiment_by_name(starts[0]["experiment"])
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`runner.uid` = '{starts[0]['uid']}'")
    assert run.info.run_id == read_ack(FOLDER).run_id and run.info.status == status
    series = read_series(FOLDER)
    assert run.data.metrics.keys() == series.keys()
    for name, columns in series.items():
        expected = sorted(zip(*(column.tolist() for column in columns), strict=True))
        found = client.get_metric_history(run.info.run_id, name)
        assert sorted((point.step, point.timestamp, point.value) for point in found) == expected, name
    assert run.data.params.keys() == starts[0]["params"].keys()
    assert all(
        str(starts[-1]["params"][key])[:100] == value[:100] for key, value in run.data.params.items() if len(starts) < 2
    )
    assert all(run.data.tags[key] for key in starts[0]["tags"])
    assert [found.dataset.name for found in run.inputs.dataset_inputs] == ["digits"]
    wanted = {event["path"] for event in events if event["kind"] == "artifact"}
    assert {found.path for found in client.list_artifacts(run.info.run_id)} == wanted
    for path in Path(FOLDER, "plots").glob("*"):
        assert f"plots/{path.name}" in {found.path for found in client.list_artifacts(run.info.run_id, "plots")}
    return run


def check_model(client, run):
    """The run has exactly one model, with the metrics of its step."""
    best = json.loads((FOLDER / "summary.json").read_text())["best"]
    (model,) = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")
    assert (model.name, model.status, model.params["model"]) == ("mlp-digits", "READY", "mlp")
    assert [output.step for output in run.outputs.model_outputs] == [best["step"]]
    measured = {metric.key: (metric.value, metric.step, metric.dataset_name) for metric in model.metrics}
    assert len(model.metrics) == 4 and measured["val/loss"] == (best["value"], best["step"], "digits")
    assert measured["test/loss"][0] == run.data.metrics["test/loss"]


def test_faults_send_everything_once(own_folder, proxy, server):
    """The answer to the first request of each kind is lost; of the others, every third one has another fault."""
    met, others = set(), itertools.chain(*((fault, "pass", "pass") for fault in FAULTS), itertools.repeat("pass"))

    def choose(request):
        method, path, _ = request.line.split()
        kind = method, re.sub(r"[0-9a-f]{32}|m-[0-9a-f]+|\?.*|[^/]*\.[a-z0-9]+$", "", path)
        if kind in met:
            return next(others)
        met.add(kind)
        return "lost"

    proxy.choose = choose
    train(proxy.uri, "tracking.log_model=true")
    sync_all(proxy.uri)
    assert sum("logged-models" in path for _, path in met) >= 3 and proxy.met["lost"] >= 10, met
    assert all(proxy.met[fault] for fault in FAULTS), proxy.met
    run = check_page(server.uri)
    check_model(open_store(server.uri), run)
    proxy.choose = always("pass")
    before = dataclasses.replace(read_ack(FOLDER), warnings=())
    assert sync(proxy.uri) == 0
    assert read_ack(FOLDER) == before and check_page(server.uri).to_dictionary() == run.to_dictionary()


def test_mlflow_2_server_gets_everything_except_models(own_folder, proxy, server):
    proxy.choose = lambda request: "unknown" if "logged-models" in request.line else "pass"
    train(proxy.uri, "tracking.log_model=true")
    ack = read_ack(FOLDER)
    assert ack.is_complete and ack.error is None and proxy.met["unknown"] == 1
    assert (
        "model mlp-digits was left out: the server's MLflow is older than 3 and has no logged models" in ack.warnings[0]
    )
    assert "tracking.log_model=false" in ack.warnings[0]
    check_page(server.uri)


def test_sync_after_outage_sends_everything(own_folder, proxy, server, uri, capfd):
    proxy.go_down()
    train(proxy.uri)
    assert read_ack(FOLDER).run_id is None and read_ack(FOLDER).points_pending == sum(
        map(len, read_points(FOLDER).values())
    )
    proxy.come_up()
    capfd.readouterr()
    assert sync(proxy.uri) == 0
    assert "1 of 1 runs are complete" in capfd.readouterr().out
    first = check_page(server.uri)
    assert sync(proxy.uri) == 0 and check_page(server.uri).to_dictionary() == first.to_dictionary()
    assert sync(uri) == 0  # another store, and back
    second = check_page(uri)
    assert second.info.run_id != first.info.run_id and second.data.metrics == first.data.metrics
    assert sync(proxy.uri) == 0
    again = check_page(server.uri)
    assert again.data.metrics == first.data.metrics and again.info.run_id == first.info.run_id
    assert (again.info.status, again.info.end_time) == (first.info.status, first.info.end_time)


def test_killed_run_is_synced_and_resumed(own_folder, proxy, server, warm):
    words = [*WORDS, f"tracking.uri={proxy.uri}", "train.num_epochs=100000", "train.checkpoint_every_steps=20"]
    # slow, to limit the number of steps to check
    words += ["tracking.points=all", "model.hidden_sizes=[1024,1024]"]
    with warm.command(own_folder, *words) as process:
        try:
            wait_for(lambda: read_ack(FOLDER).points_written and (FOLDER / "checkpoints/last.pt").exists())
            children = psutil.Process(process.pid).children()
            for child in children:  # the publisher first: it would report to MLflow that the run has died
                child.kill()
        finally:
            process.kill()
    assert not psutil.wait_procs(children, timeout=LONGEST)[1]
    run_id = read_ack(FOLDER).run_id
    assert open_store(server.uri).get_run(run_id).info.status == "RUNNING"
    proxy.choose = at_random(5, "lost", "drop", share=0.2)
    sync_all(proxy.uri)
    killed = check_page(server.uri, status="KILLED")
    assert killed.info.run_id == run_id and "runner.end" in killed.data.tags
    last = read_points(FOLDER)["train/loss"][-1][0]
    assert cli.main(["resume", str(FOLDER), f"train.num_epochs={last // 12 + 2}"]) == 0
    sync_all(proxy.uri)
    found = check_page(server.uri)
    assert found.info.run_id == run_id and "runner.end" not in found.data.tags
    steps = [step for step, _ in read_points(FOLDER)["train/loss"]]
    assert steps == list(range(1, 12 * (last // 12 + 2) + 1))
