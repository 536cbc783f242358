"""Sweeps in the queue of a simulated Slurm, by submitit."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import simulated_slurm
import sweeps_in_a_shell
from forked_programs import DOOR
from omegaconf import OmegaConf
from refused import problems_of
from sweeps_in_a_shell import finish, jobs_in, person, read_until, start, states, summary, sweep
from waiting import wait_for

from runner.config.packages import install
from runner.experiment.context import RunContext
from runner.sweep.hydra_plugins import SLURM as SLURM_LAUNCHER
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.launchers import slurm
from runner.sweep.launchers.process_pool import NotTakenError

submitit = pytest.importorskip("submitit")
from submitit.core.utils import FailedJobError  # noqa: E402


def slow(test):
    """Mark a test of whole sweeps, whose processes are forked."""
    return pytest.mark.slow(pytest.mark.usefixtures("forked")(test))


SLURM = "hydra/launcher=slurm"
LONG = ("device=cpu", "model=linear", "train.num_epochs=1000000", "tracking.enabled=false")
LONG += ("train.checkpoint_every_steps=50", "train.max_seconds=60")


@pytest.fixture
def forked(warm, monkeypatch):
    monkeypatch.setattr(sweeps_in_a_shell, "STARTED", warm.program)
    monkeypatch.setenv(DOOR, warm.door)  # also for a cluster's jobs


def settings():
    return OmegaConf.create(
        {"hydra": {"launcher": {"_target_": SLURM_LAUNCHER}, "runtime": {"choices": {"hydra/launcher": "slurm"}}}}
    )


@slow
def test_slurm_sweep_reports_each_end(empty_store, tmp_path):
    home, slurm = person(tmp_path / "home"), tmp_path / "slurm"
    path = simulated_slurm.install(slurm)
    zipped = "sweep.zip={device:[cpu,cpu,auto],model.how:[fine,SIGKILL,fine]}"
    words = (
        zipped,
        "model=dying",
        "task.plots=false",
        "train.num_epochs=1",
        "tracking.log_model=false",
        "data.limit=200",
    )
    shutil.copy(empty_store, home / "mlflow.db")
    code, text = sweep(home, SLURM, *words, "hydra.launcher.partition=short", PATH=path)
    found = states(home)
    assert code == 1, text
    assert "slots    Slurm's queue, by submitit" in text
    for device in ("cpu", "auto"):
        assert found[f"device={device} model.how=fine"] == ("finished", device, None), text
    state, _, error = found["device=cpu model.how=SIGKILL"]
    assert state == "killed" and error.startswith("Slurm says OUT_OF_MEMORY of job 1"), error
    for number in range(3):  # submitit's logs, which have the same name as the output of every job
        assert "sees" in (home / f"swept/{number}/console.log").read_text(), text
    assert summary(home, 0)["run_id"], "it is not in MLflow"
    on_cpu, others = simulated_slurm.batches(slurm)
    assert "--gpus-per-node" not in on_cpu
    assert "#SBATCH --gpus-per-node=1" in others
    assert "#SBATCH --array=0-1" in on_cpu
    assert all("#SBATCH --partition=short" in script for script in (on_cpu, others))


@slow
def test_slurm_job_is_requeued_then_cancelled(tmp_path):
    """At its time limit, and with the sweep. The job starts as on a cluster: no process is forked."""
    home, slurm = person(tmp_path / "home"), tmp_path / "slurm"
    process = start(home, SLURM, *LONG, PATH=simulated_slurm.install(slurm), **{DOOR: ""})
    read_until(process, " started on")
    wait_for(lambda: (home / "swept/0/checkpoints/last.pt").exists())
    os.kill(json.loads((slurm / "100.json").read_text())["pid"], signal.SIGUSR2)
    wait_for(lambda: (home / "swept/0/summary.json").exists())
    stood = summary(home, 0)["num_steps"]
    assert stood > 0
    wait_for(lambda: any(path.read_text().count("run      ") == 2 for path in home.glob("swept/.submitit/*/*_log.out")))
    os.kill(process.pid, signal.SIGTERM)
    code, text = finish(process)
    assert code == 143, text
    assert [state for state, _, _ in states(home).values()] == ["interrupted"]
    assert summary(home, 0)["num_steps"] >= stood
    assert [path.name for path in slurm.glob("*.cancelled")] == ["100.cancelled"]
    wait_for(lambda: not jobs_in(home))


def queue(monkeypatch, folder, map_array, **settings):
    """Return a queue of a launcher with these settings, whose executor calls map_array(parameters, jobs)."""

    class Executor:
        def __init__(self, folder, cluster, **limits):
            assert (folder, cluster, limits) == ("out", "slurm", {"slurm_max_num_timeout": 2})

        def update_parameters(self, **parameters):
            self.parameters = parameters

        def map_array(self, function, payloads):
            return map_array(self.parameters, [pickle.loads(payload)[0] for payload in payloads])

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    monkeypatch.setattr(slurm, "check_installed", lambda config: None)
    launcher = {"_target_": SLURM_LAUNCHER, "submitit_folder": "out", "max_num_timeout": 2, **settings}
    config = OmegaConf.create({"hydra": {"launcher": launcher, "sweep": {"dir": str(folder)}}})
    return slurm.Queue(None, config)


def start_job(queued, number, device):
    config = OmegaConf.create({"device": device})
    prepared = PreparedJob(Job(number, (), ""), config, (device,))
    assert queued.start(prepared, RunContext()) == device
    return config


def test_slurm_refused_jobs_stay_planned(tmp_path, monkeypatch):
    """The jobs for a CPU are already in the queue, and those for a GPU are not."""
    submitted, cancelled = [], []

    def map_array(parameters, jobs):
        if parameters["gpus_per_node"]:
            text = "sbatch: error: invalid partition specified: shrt\nsbatch: error: Batch job submission failed"
            raise FailedJobError(text)
        submitted.extend(jobs)
        assert parameters["slurm_partition"] == "shrt"
        return [SimpleNamespace(cancel=lambda check: cancelled.append(1))]

    queued = queue(monkeypatch, tmp_path, map_array, partition="shrt", account=None, gpus_per_node=8)
    configs = [start_job(queued, number, device) for number, device in enumerate(["cpu", "cuda", "cuda"])]
    with pytest.raises(NotTakenError) as caught:
        queued.ended(0.0)
    queued.close()
    assert (submitted, caught.value.numbers, cancelled) == (configs[:1], (1, 2), [1])
    (problem,) = caught.value.problems
    assert problem.source == "hydra.launcher.partition=shrt hydra.launcher.gpus_per_node=8"
    assert problem.message == "invalid partition specified: shrt Batch job submission failed"
    assert "sinfo" in problem.help and "sweep.resume=last" in problem.help


@pytest.mark.parametrize("is_safe", [False, True])
def test_slurm_jobs_import_this_package_first(is_safe, tmp_path, monkeypatch):
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner/__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith(("_", "n_"))}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags | {"safe_path": is_safe}))
    paths = []

    # like submitit's `python -m`, which also searches the current directory first
    def map_array(parameters, jobs):
        command = [sys.executable, "-c", "import json, sys, runner.version; print(json.dumps(sys.path))"]
        script = "\n".join([*parameters.get("slurm_setup", ()), shlex.join(command)])
        paths.extend(json.loads(subprocess.check_output(["bash", "-c", script], text=True)))
        return [SimpleNamespace(cancel=lambda check: None, job_id=0)]

    queued = queue(monkeypatch, tmp_path, map_array, setup=["export PYTHONPATH=/own"])
    before = dict(os.environ)
    start_job(queued, 0, "cpu")
    monkeypatch.setattr(queued, "_is_done", lambda number: False)
    assert queued.ended(0.0) == [] and dict(os.environ) == before
    assert (str(tmp_path) in paths) != is_safe and "/own" in paths


def test_slurm_without_plugin_names_the_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = problems_of(slurm.check_installed, settings())
    assert problems[0].source == "hydra/launcher=slurm"
    assert problems[0].help == f"run `{install('slurm')}`"


def test_slurm_without_srun_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    problems = problems_of(slurm.check_installed, settings())
    assert "there is no Slurm on this machine" in problems[0].message
