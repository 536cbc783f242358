"""Signals at unfavorable moments: during an evaluation, during a step that hangs, to a whole process group, and twice."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import waiting

from runner.tracking.journal import read_points

pytestmark = pytest.mark.slow

#: a model that waits if a file says so: forever in a step, in C, where no handler runs; or for a while in each batch of a split
NET = """
import hashlib, os, time
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Dropout(0.2))
        self.steps = 0

    def forward(self, inputs):
        self.steps += self.training
        if self.training and self.steps == 30 and Path("hang").exists():
            Path("there").touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        if not self.training and Path("wait").exists() and self.steps >= int(Path("wait").read_text()):
            Path("there").touch()
            time.sleep(0.05)
        return self.layers(inputs)
"""
WORDS = (
    "model=net",
    "device=cpu",
    "task.plots=false",
    "train.num_epochs=3",
    "train.eval_batch_size=1",
    "train.checkpoint_every_steps=8",
)
NUM_STEPS = 36


def write_model(folder):
    (folder / "my_models.py").write_text(NET)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: my_models.Net\n")


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """The outcome of a run without signals."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_model(folder)
    said, _ = warm.command(folder, *WORDS, "tracking.enabled=false", "hydra.run.dir=run").communicate()
    assert "finished in" in said, said
    return outcome(folder / "run")


@pytest.fixture
def run(warm, own_folder):
    write_model(own_folder)
    processes = []

    def start(*words):
        processes.append(warm.command(own_folder, *words, MLFLOW_DISABLE_TELEMETRY="true"))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(path):
    waiting.wait_for(Path(path).exists, path)
    Path(path).unlink()


def ended(process):
    output = process.communicate()[0]
    assert "Traceback" not in output, output
    return process.returncode, output


def summary(folder="run"):
    return json.loads((Path(folder) / "summary.json").read_text())


def outcome(folder):
    points = {name: rows for name, rows in read_points(Path(folder)).items() if not name.startswith("speed/")}
    model = torch.load(Path(folder) / "checkpoints" / "last.pt", weights_only=True)["model"]
    return points, {name: tensor.tolist() for name, tensor in model.items()}


def goes_on_to(expected, run):
    code, output = ended(run("resume", "run"))
    assert code == 0, output
    assert summary()["status"] == "finished" and summary()["num_steps"] == NUM_STEPS
    assert outcome("run") == expected


@pytest.mark.parametrize("after", [24, NUM_STEPS])
def test_interrupted_evaluation_is_repeated_on_resume(run, undisturbed, after):
    Path("wait").write_text(str(after))
    process = run(*WORDS, "tracking.enabled=false", "hydra.run.dir=run")
    wait_for("there")
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 143
    assert (summary()["status"], summary()["num_steps"]) == ("killed", after)
    Path("wait").unlink()
    goes_on_to(undisturbed, run)


def test_interrupted_test_is_repeated_on_resume(run):
    process = run(*WORDS, "tracking.enabled=false", "data.val_fraction=0", "hydra.run.dir=run")
    Path("wait").write_text(str(NUM_STEPS))
    wait_for("there")
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert (code, summary()["status"]) == (143, "killed")
    assert "python -m runner resume run" in output
    Path("wait").unlink()
    assert ended(run("resume", "run"))[0] == 0
    assert summary()["status"] == "finished" and "test/loss" in summary()["metrics"]


def test_second_ctrl_c_ends_hanging_step(run, empty_store):
    shutil.copy(empty_store, "mlflow.db")
    Path("hang").touch()
    process = run(*WORDS, "hydra.run.dir=run")
    wait_for("there")
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # the process waits for the step to end
        process.wait(timeout=1)
    process.send_signal(signal.SIGINT)
    code, output = ended(process)
    assert code == 130
    assert "a second Ctrl-C" in output and "python -m runner resume run" in output
    assert (summary()["status"], summary()["error"]) == ("killed", "by a second Ctrl-C")
    Path("hang").unlink()
    assert ended(run("resume", "run"))[0] == 0
    from runner.tracking.mlflow_store import open_store

    # absolute, as MLflow resolves a relative path once per process
    client = open_store(f"sqlite:///{Path.cwd()}/mlflow.db")
    (found,) = client.search_runs(["1"])
    assert (found.info.run_id, found.info.status) == (summary()["run_id"], "FINISHED")
    points = client.get_metric_history(found.info.run_id, "train/loss")
    assert [point.step for point in points] == list(range(1, NUM_STEPS + 1))


def test_hanging_step_ends_after_grace_period(run, undisturbed):
    Path("hang").touch()
    process = run(*WORDS, "tracking.enabled=false", "train.grace_seconds=1", "hydra.run.dir=run")
    wait_for("there")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143
    assert "1 s after SIGTERM (train.grace_seconds)" in summary()["error"]
    Path("hang").unlink()
    goes_on_to(undisturbed, run)


def test_terminal_ctrl_c_reaches_workers_counts_once(run):
    words = ["data.residency=stream", "data.num_workers=2", "tracking.enabled=false", "train.num_epochs=100000"]
    process = run(*WORDS, *words, "train.eval_batch_size=128", "hydra.run.dir=run")
    wait_for("run/checkpoints/last-before.pt")
    os.killpg(process.pid, signal.SIGINT)
    code, output = ended(process)
    assert code == 130
    assert (summary()["status"], summary()["error"]) == ("killed", None), output
    state = torch.load("run/checkpoints/last.pt", weights_only=True)
    assert state["step"] == summary()["num_steps"] == len(read_points(Path("run"))["train/loss"])


def test_run_without_terminal_continues_silently(run):
    process = run(*WORDS, "tracking.enabled=false", "train.eval_batch_size=128", "hydra.run.dir=run")
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    assert process.wait() == 0
    assert (summary()["status"], summary()["num_steps"]) == ("finished", NUM_STEPS)


def test_a_lost_terminal_stops_a_run(run):
    words = [*WORDS, "tracking.enabled=false", "train.eval_batch_size=128", "train.num_epochs=100000"]
    process = run(*words, "hydra.run.dir=run")
    wait_for("run/checkpoints/last-before.pt")
    process.send_signal(signal.SIGHUP)
    assert ended(process)[0] == 143
    assert summary()["status"] == "killed"


def test_run_ended_by_time_limit_resumes(run):
    words = ["tracking.enabled=false", "train.eval_batch_size=128", "train.num_epochs=100000", "hydra.run.dir=run"]
    code, output = ended(run(*WORDS, *words, "train.max_seconds=0.3"))
    assert code == 0 and "(train.max_seconds)" in output and "python -m runner resume run" in output
    steps = summary()["num_steps"]
    code, output = ended(run("resume", "run"))
    assert code == 0 and summary()["num_steps"] > steps
    assert len(read_points(Path("run"))["train/loss"]) == summary()["num_steps"]
