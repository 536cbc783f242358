"""Whole runs, as a user starts them: trained, tracked in real stores, interrupted by real signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hand_loop import batches_of_digits, steps_of
from waiting import LONGEST, wait_for

from runner import cli
from runner.config import origin
from runner.data.builtin.scikit import digits
from runner.device.placement import map_tensors
from runner.experiment.reporter import Reporter
from runner.models.mlp import MLP
from runner.tracking.journal import read_points
from runner.tracking.mlflow_model import is_best
from runner.version import PACKAGES

pytestmark = pytest.mark.usefixtures("warm_programs")

REPOSITORY = PACKAGES
SMALL = ("model=mlp", "model.hidden_sizes=[32]", "train.num_epochs=3", "hydra.run.dir=run", "metrics.pull_every=10")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONUNBUFFERED": "1"}
COMMAND = (sys.executable, "-m", "runner")


def summary(folder, name="run"):
    return json.loads((folder / name / "summary.json").read_text())


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def reference_losses(num_epochs):
    """Return the loss and the accuracy of each step of the same training by hand."""
    torch.manual_seed(0)
    steps, targets = steps_of(MLP(64, 10, [32]), batches_of_digits(num_epochs)), batches_of_digits(num_epochs)
    return [
        (loss, (logits.argmax(1) == true).float().mean().item())
        for (loss, logits), (_, true) in zip(steps, targets, strict=True)
    ]


def history(uri, run_id, name):
    points = client(uri).get_metric_history(run_id, name)
    return [(point.step, point.value) for point in sorted(points, key=lambda point: point.step)]


def check_page(uri, run_id):
    """Check the required content of the run's page in MLflow."""
    import mlflow

    run = client(uri).get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.batch_size"] == "128"
    assert run.data.params["model.hidden_sizes"] == "[32]"
    assert run.data.params["facts.in_features"] == "64"
    for tag in ("device", "device_name", "device_reason", "runner_version", "mlflow.note.content"):
        assert run.data.tags[tag]
    assert "Again: `python -m runner -cd " in run.data.tags["mlflow.note.content"]
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "digits"
    artifacts = {item.path for item in client(uri).list_artifacts(run_id)}
    assert {"rerun.yaml", "environment.txt", "plots"} <= artifacts
    assert {"plots/loss.png", "plots/accuracy.png"} <= {
        item.path for item in client(uri).list_artifacts(run_id, "plots")
    }
    assert {"val/loss", "test/accuracy", "train/lr", "speed/steps_per_second"} <= run.data.metrics.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", uri)
        model = mlflow.pytorch.load_model(f"runs:/{run_id}/mlp-digits")
        info = mlflow.models.get_model_info(f"runs:/{run_id}/mlp-digits")
    assert info.signature is not None
    inputs = digits().rows[0][:7]
    with torch.no_grad():
        assert model(inputs).shape == (7, 10)


@pytest.mark.slow
def test_mlflow_has_every_step_and_kept_checkpoint(own_folder, empty_store):
    shutil.copy(empty_store, "runs.db")
    own = ["tracking.tags=[baseline]", "tracking.description='a first try'"]
    own += ["train.keep_checkpoints=every_epoch", "train.ema_decay=0.9"]
    assert cli.main([*SMALL, "device=cpu", "tracking.uri=sqlite:///runs.db", *own]) == 0
    found = summary(own_folder)
    uri = f"sqlite:///{own_folder}/runs.db"
    expected = reference_losses(3)
    for column, name in enumerate(("train/loss", "train/accuracy")):
        points = history(uri, found["run_id"], name)
        assert points == [(step, row[column]) for step, row in enumerate(expected, start=1)]
    assert found["num_steps"] == len(expected)
    assert found["tracker"]["points_pending"] == 0
    assert found["host_reads"]["unexpected"] == 0
    assert found["host_reads"]["pulls"] == 2 * 3  # after 10 steps of an epoch, and at its end
    check_page(uri, found["run_id"])
    store = client(uri)
    run = store.get_run(found["run_id"])
    assert run.data.tags["baseline"] == "true"
    assert run.data.tags["mlflow.note.content"].startswith("a first try\n\n**MLP**")
    assert (own_folder / "run" / "checkpoints" / "best.pt").is_file()
    models = {model.model_id: model for model in store.search_logged_models([run.info.experiment_id])}
    steps = {output.step: models[output.model_id] for output in run.outputs.model_outputs}
    assert len(models) == len(steps) == 3 and all(model.status == "READY" for model in models.values())
    losses = {step: next(each.value for each in steps[step].metrics if each.key == "val/loss") for step in steps}
    assert losses == dict(history(uri, found["run_id"], "val/loss"))
    best = steps.pop(found["best"]["step"])
    assert is_best(best) and not any(map(is_best, steps.values()))
    with pytest.MonkeyPatch.context() as patch:
        import mlflow

        patch.setenv("MLFLOW_TRACKING_URI", uri)
        assert mlflow.models.get_model_info(f"runs:/{found['run_id']}/mlp-digits").model_id == best.model_id
        inputs = digits().rows[0][:7]
        with torch.no_grad():
            outputs = [
                mlflow.pytorch.load_model(f"models:/{model.model_id}")(inputs) for model in (best, *steps.values())
            ]
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    assert cli.main(["resume", "run", "train.num_epochs=4"]) == 0
    assert len(store.search_logged_models([run.info.experiment_id])) == 4  # the new best; the others are still stored


def is_open(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_training_without_server_is_synced_later(server, own_folder, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main([*SMALL, f"tracking.uri={uri}", "tracking.grace_seconds=1"]) == 0
    found = summary(own_folder)
    assert found["status"] == "finished"
    assert found["tracker"]["points_pending"] > 2 * found["num_steps"]
    assert f"runner sync run tracking.uri={uri}\n" in capfd.readouterr().out
    for _ in range(2):  # the second call sends nothing
        assert cli.main(["sync", "run", f"tracking.uri={server.uri}"]) == 0
    assert cli.main(["sync", "run"]) == 0  # finds the current store
    synced = summary(own_folder)
    assert synced["tracker"]["points_pending"] == 0
    assert synced["tracking_uri"] == server.uri and not Path("mlflow.db").exists()
    assert [value for _, value in history(server.uri, synced["run_id"], "train/loss")] == [
        loss for loss, _ in reference_losses(3)
    ]
    check_page(server.uri, synced["run_id"])


@pytest.mark.slow
def test_ui_opens_last_store_hides_uri(own_folder, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("outputs/a/run").mkdir(parents=True)
    Path("outputs/a/run/rerun.yaml").write_text("seed: 0\n")
    shutil.copy(empty_store, "s3cret.db")
    store = f"sqlite:///{own_folder}/s3cret.db"
    client(store).create_experiment("mine")
    origin.sign(Path("outputs/a/run"), store)
    Path("outputs/a/run/journal/journal.bin").touch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # processes that take seconds to import
    few = {"MLFLOW_WORKERS": "1", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = psutil.Popen([*COMMAND, "ui", f"--port={port}"], env=ENVIRONMENT | few, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: is_open(port))
        assert client(f"http://127.0.0.1:{port}").get_experiment_by_name("mine")
        everybody = [process, *process.children(recursive=True)]
        assert "mlflow" in process.cmdline()
        assert not [each for each in everybody if "s3cret" in " ".join(each.cmdline())]
    finally:
        for each in [*process.children(recursive=True), process]:
            each.terminate()
        process.wait(timeout=LONGEST)


LONG = ["model=mlp", "train.num_epochs=100000", "hydra.run.dir=run", "metrics.pull_every=10"]
LONG += ["tracking.uri=sqlite:///runs.db"]


@pytest.mark.slow
def test_a_signal_ends_the_run_cleanly(warm, own_folder, empty_store):
    shutil.copy(empty_store, "runs.db")
    process = warm.command(own_folder, *LONG)
    wait_for(lambda: len(read_points(own_folder / "run")) > 0)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 143, output
    assert "Traceback" not in output
    found = summary(own_folder)
    assert (found["status"], found["tracker"]["points_pending"]) == ("killed", 0)
    assert len(read_points(own_folder / "run")["train/loss"]) == found["num_steps"]
    assert client(f"sqlite:///{own_folder}/runs.db").get_run(found["run_id"]).info.status == "KILLED"
    state = torch.load(own_folder / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert state["step"] == found["num_steps"]


@pytest.mark.parametrize(
    "words",
    [
        ("train.precision=bf16", "train.accumulate_steps=3", "scheduler=cosine", "train.ema_decay=0.9"),
        (
            *("train.precision=fp16", "train.clip_grad_norm=1", "train.early_stopping.patience=1"),
            *("train.early_stopping.metric=val/accuracy", "train.deterministic=true", "metrics.every=5"),
            *("data.residency=stream", "data.num_workers=1", "placement.init=device", "placement.guard=off"),
        ),
    ],
    ids=("bf16", "fp16"),
)
def test_every_setting_runs(own_folder, words):
    assert cli.main([*SMALL, "tracking.enabled=false", "task.plots=false", "train.num_epochs=2", *words]) == 0
    found = summary(own_folder)
    assert found["status"] == "finished"
    assert np.isfinite(found["metrics"]["train/loss"])
    assert found["host_reads"]["unexpected"] == 0


def test_the_defaults_reach_their_accuracy(own_folder):
    """With all metrics and plots: on Python 3.12, plots of predictions were once omitted without a message."""
    assert cli.main(["tracking.enabled=false", "hydra.run.dir=run", "task.metrics=[f1]"]) == 0
    metrics = summary(own_folder)["metrics"]
    assert metrics["test/accuracy"] >= 0.97 and metrics["test/f1"] >= 0.97
    measured = {f"{split}/{name}" for split in ("train", "val", "test") for name in ("loss", "accuracy")}
    assert {name for name in metrics if "speed/" not in name} == measured | {"train/lr", "val/f1", "test/f1"}
    drawn = {path.stem for path in (own_folder / "run" / "plots").iterdir()}
    assert drawn >= {"loss", "accuracy", "confusion", "roc", "samples"}


@pytest.mark.parametrize(
    ("raises", "at", "told"),
    [
        ("RuntimeError('the eighth')", 8, "RuntimeError: the eighth"),
        ("SystemExit(3)", 1, "SystemExit: it would end the program, with exit code 3"),
    ],
)
def test_user_bug_is_reported_with_line(own_folder, raises, at, told):
    (own_folder / "my_models.py").write_text(
        f"from torch import nn\n\nat = {at}\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.layer = nn.Linear(64, 10)\n"
        "        self.calls = 0\n\n    def forward(self, inputs):\n        self.calls += 1\n        if self.calls >= at:\n"
        f"            raise {raises}\n        return self.layer(inputs.flatten(1))\n"
    )
    (own_folder / "conf" / "model").mkdir(parents=True)
    (own_folder / "conf" / "model" / "net.yaml").write_text("_target_: my_models.Net\n")
    assert cli.main(["model=net", "tracking.enabled=false", "hydra.run.dir=run"]) == 1
    found = summary(own_folder)
    assert found["status"] == "failed"
    assert f"{told} (my_models.py:14 in Net)" in found["error"]
    assert len(read_points(own_folder / "run").get("train/loss", [])) == at - 1
    assert "Traceback" in (own_folder / "run" / "runner.log").read_text()


def test_late_part_error_keeps_its_help(own_folder):
    (own_folder / "my_tasks.py").write_text(
        "from runner.errors import Problem, RunnerError\n\ndef loss(model, batch):\n"
        "    raise RunnerError(Problem('model=cnn', '`model=cnn` gives too little', 'use `model=mlp`'))\n"
    )
    words = ["task=own", "task.function._target_=my_tasks.loss", "tracking.enabled=false", "hydra.run.dir=run"]
    assert cli.main(words) == 1
    assert summary(own_folder)["error"] == "`model=cnn` gives too little (model=cnn); help: use `model=mlp`"
    assert "Traceback" not in (own_folder / "run" / "runner.log").read_text()


def test_error_after_training_fails_the_run(own_folder, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no example")

    monkeypatch.setattr(Reporter, "log_model", fails)
    words = ["model=linear", "device=cpu", "train.num_steps=2", "task.plots=false", "tracking.enabled=false"]
    assert cli.main([*words, "hydra.run.dir=run"]) == 1
    run = summary(own_folder)
    assert (run["status"], run["num_steps"], run["hints"]) == ("failed", 2, []) and run["metrics"]["val/loss"] > 0
    assert run["error"].startswith("RuntimeError: no example") and run["seconds"]["finish"] > 0


ROWS = (4, 4)  # from the validation split


@pytest.mark.parametrize(
    ("called", "expected"), [("a, b=b", {"forward()": {"args": [ROWS], "kwargs": {"b": ROWS}}}), ("a", ROWS)]
)
def test_custom_task_leaves_its_call_as_example(called, expected, own_folder):
    (own_folder / "my_parts.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(4, 1)\n\n"
        "    def forward(self, a, b=0):\n        return super().forward(a + b)\n\n\n"
        "def rows():\n    return torch.rand(40, 4), torch.rand(40, 4)\n\n\n"
        f"def loss(model, batch):\n    a, b = batch\n    return model({called}).square().mean()\n"
    )
    words = [f"{group}._target_=my_parts.{name}" for group, name in (("model", "Net"), ("data", "rows"))]
    words += ["task=own", "task.function._target_=my_parts.loss", "train.num_steps=1", "tracking.enabled=false"]
    assert cli.main([*words, "device=cpu", "hydra.run.dir=run"]) == 0
    example = torch.load(own_folder / "run/journal/example.pt", weights_only=True)
    assert map_tensors(example, lambda tensor: tuple(tensor.shape)) == expected


WITHOUT_COMPILER = """
import sys
from runner import cli
words = ["model=vit", "model.patch_size=4", "model.depth=1", "scheduler=cosine", "optimizer=sgd", "train.ema_decay=0.9"]
words += ["train.num_epochs=1", "data.limit=60", "train.clip_grad_norm=1", "tracking.enabled=false", "task.plots=false"]
assert cli.main([*words, "hydra.run.dir=run"]) == 0
assert cli.main(["resume", "run", "train.num_epochs=2"]) == 0
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_eager_run_never_imports_the_compiler(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["[]"] and not done.stderr, done.stdout + done.stderr
