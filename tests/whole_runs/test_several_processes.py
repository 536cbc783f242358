"""Runs that start several processes: stopped, killed, restarted, and resumed with another number of processes."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from waiting import LONGEST, wait_for

from runner import run
from runner.errors import RunnerError
from runner.tracking.journal_reader import read_series
from runner.training.checkpoint import load

pytestmark = pytest.mark.slow

#: a model whose process dies once at a step, or whose steps take longer, depending on files in the current directory
NET = """
import os, signal, time
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.steps = 0

    def forward(self, inputs):
        self.steps += self.training
        if self.training and self.steps == 10:
            if Path("die").exists() and os.environ["RANK"] == "1":
                Path("die").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            Path("there").touch()
            if Path("spoilt").exists() and os.environ["RANK"] == "1":
                return self.layers(inputs) * float("nan")
        if self.training and self.steps >= 10 and Path("slow").exists():
            time.sleep(0.05)
        return self.layers(inputs)
"""
WORDS = ("model=net", "data=digits", "device=cpu", "train.num_epochs=4", "train.checkpoint_every_steps=4")
UNTRACKED = ("tracking.enabled=false",)
NUM_STEPS = 48


def write_model(folder):
    (folder / "my_models.py").write_text(NET)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text("_target_: my_models.Net\n")


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """The points of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_model(folder)
    told, _ = warm.command(folder, *WORDS, *UNTRACKED, "hydra.run.dir=run").communicate()
    assert "finished in" in told, told
    return read_series(folder / "run")


@pytest.fixture
def person(own_folder):
    write_model(own_folder)
    return own_folder


@pytest.fixture
def start(warm, person):
    """Start the command line; processes that remain are ended after the test."""
    started = []

    def start(*words, module="runner"):
        process = warm.program(
            [sys.executable, "-m", module, *words],
            cwd=person,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in [*started, *members(person)]:
        if psutil.pid_exists(process.pid):
            process.kill()
    for process in started:
        process.communicate()


def members(folder, *others):
    """Return the processes whose current directory is `folder`, except this one and `others`."""
    found = []
    for process in psutil.process_iter():
        try:
            is_here = process.cwd() == str(folder) and process.status() != "zombie"
            if is_here and process.pid not in (os.getpid(), *(other.pid for other in others)):
                found.append(process)
        except psutil.Error:
            continue
    return found


def summary(folder="run"):
    return json.loads((Path(folder) / "summary.json").read_text())


def assert_same_curves(expected, found):
    for name in ("train/loss", "train/accuracy", "val/loss", "test/loss"):
        assert found[name][0].tolist() == expected[name][0].tolist(), name
        np.testing.assert_allclose(found[name][2], expected[name][2], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sigterm_reaches_all_and_resume_changes_number(start, person, undisturbed, strategy, empty_store):
    shutil.copy(empty_store, person / "mlflow.db")
    (person / "slow").touch()
    first = start(*WORDS, "train.num_processes=2", f"placement.strategy={strategy}", "hydra.run.dir=run")
    wait_for((person / "there").exists)
    first.send_signal(signal.SIGTERM)
    told, _ = first.communicate(timeout=LONGEST)
    assert first.returncode == 143, told
    assert summary()["status"] == "killed" and 10 <= summary()["num_steps"] < NUM_STEPS
    assert summary()["num_processes"] == 2 and not members(person)
    (person / "slow").unlink()

    second = start("resume", "run", "train.num_processes=1")
    told, _ = second.communicate(timeout=LONGEST)
    assert second.returncode == 0, told
    assert (summary()["status"], summary()["num_processes"]) == ("finished", 1)
    assert_same_curves(undisturbed, read_series(person / "run"))
    with sqlite3.connect(person / "mlflow.db") as store:
        points = Counter(store.execute("select key, step from metrics where key like 'train/%'").fetchall())
        statuses = store.execute("select status from runs").fetchall()
    assert {points[("train/loss", step)] for step in range(1, NUM_STEPS + 1)} == {1} and set(points.values()) == {1}
    assert statuses == [("FINISHED",)]


def test_killed_process_ends_run_with_message(start, person):
    (person / "die").touch()
    process = start(*WORDS, *UNTRACKED, "train.num_processes=2", "hydra.run.dir=run")
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 1, told
    assert (summary()["status"], summary()["error"]) == ("failed", "process 1 was ended by SIGKILL")
    assert "process 1 was ended by SIGKILL" in told and not members(person)


def test_process_ending_while_others_wait_is_named(start, person):
    ends = "super().__init__()\n        if os.environ.get('RANK') == '1':\n            os._exit(7)"
    (person / "my_models.py").write_text(NET.replace("super().__init__()", ends))
    process = start(*WORDS, *UNTRACKED, "train.num_processes=2", "hydra.run.dir=run")
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 1, told
    assert summary()["error"] == "process 1 ended with exit code 7" and not members(person)


def test_interrupt_while_processes_start_prints_no_traceback(start, person):
    process = start(*WORDS, *UNTRACKED, "train.num_processes=2", "hydra.run.dir=run")
    wait_for(lambda: len(members(person)) == 2)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 130 and "Traceback" not in told, told
    assert not members(person)


def test_nonfinite_loss_ends_all_and_keeps_checkpoint(start, person):
    (person / "spoilt").touch()
    process = start(*WORDS, *UNTRACKED, "train.num_processes=2", "metrics.pull_every=1000", "hydra.run.dir=run")
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 1 and not members(person), told
    assert "train/loss is nan at step 10;" in summary()["error"]
    # the checkpoint of step 8, unless the disk is so slow that the next one, which is broken, replaces it in the queue
    assert load(person / "run/checkpoints/last.pt")["step"] in (4, 8)


def test_killed_processes_restart_from_the_last_checkpoint(start, person, undisturbed):
    (person / "die").touch()
    words = ("train.num_processes=2", "train.max_restarts=1", "hydra.run.dir=run")
    process = start(*WORDS, *UNTRACKED, *words)
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, told
    assert summary()["status"] == "finished" and not (person / "die").exists()
    assert_same_curves(undisturbed, read_series(person / "run"))


def test_killed_parent_ends_all_and_keeps_checkpoint(start, person):
    (person / "slow").touch()
    process = start(*WORDS, *UNTRACKED, "train.num_epochs=400", "train.num_processes=2", "hydra.run.dir=run")
    wait_for((person / "there").exists)
    assert len(members(person, process)) == 2
    process.kill()
    wait_for(lambda: not members(person))
    assert summary()["status"] == "killed" and (person / "run" / "checkpoints" / "last.pt").exists()


def test_unsupported_parts_are_reported_at_once(person):
    asked = ("train.compile=true", "train.precision=fp16", "placement.init=device", "backends.cpu.channels_last=true")
    with pytest.raises(RunnerError) as caught:
        run([*WORDS, *UNTRACKED, *asked, "placement.strategy=fsdp", "train.num_processes=2"], folder=person / "run")
    for words in asked:
        assert any(f"placement.strategy=fsdp {words}" in problem.source for problem in caught.value.problems)


def test_error_is_reported_once_and_leaves_nothing(start, person):
    words = ["data=table", "data.path=none.csv", "data.target=x", "model=mlp", "device=cpu", *UNTRACKED]
    process = start(*words, "train.num_processes=2", "hydra.run.dir=run")
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 2
    assert told.count("-->") == 1 and "data.path=none.csv" in told
    assert "Traceback" not in told and not (person / "run" / "ranks").exists()


def test_under_torchrun_the_first_process_speaks(start, person, undisturbed):
    torchrun = ("--standalone", "--nproc-per-node", "2", "-m", "runner")
    process = start(*torchrun, *WORDS, *UNTRACKED, module="torch.distributed.run")
    told, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, told
    (folder,) = (person / "outputs").glob("*/*")
    assert told.count("finished in") == 1 and told.count("run      ") == 1
    assert summary(folder)["num_processes"] == 2 and not (folder / "ranks").exists()
    assert_same_curves(undisturbed, read_series(folder))
