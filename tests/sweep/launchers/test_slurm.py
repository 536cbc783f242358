"""Sweeps by submitit: in processes of this machine (its local executor), and in the queue of a simulated Slurm."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import simulated_slurm
import sweeps_in_a_shell
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from refused import problems_of
from sweeps_in_a_shell import finish, interrupt, jobs_in, person, read_until, start, states, summary, sweep
from waiting import LONGEST, wait_for
from warm_door import DOOR

from runner.config.packages import install
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.jobs.run_job import Assignment
from runner.sweep.launchers.process_pool import NotTakenError
from runner.sweep.launchers.slurm import PLUGIN, Scheduled, check_there, overrides_of

submitit = pytest.importorskip("submitit")


def slow(test):
    """Mark a test of whole sweeps, whose processes are forked."""
    return pytest.mark.slow(pytest.mark.usefixtures("forked")(test))


LOCAL = "hydra/launcher=submitit_local"
SLURM = "hydra/launcher=slurm"
LONG = ("device=cpu", "model=linear", "train.num_epochs=1000000", "tracking.enabled=false")
LONG += ("train.checkpoint_every_steps=50", "train.max_seconds=60")


@pytest.fixture
def forked(warm, warm_door, monkeypatch):
    monkeypatch.setattr(sweeps_in_a_shell, "STARTED", warm.program)
    monkeypatch.setenv(DOOR, warm_door)  # also for a cluster's jobs


def settings(target: str):
    return OmegaConf.create(
        {"hydra": {"launcher": {"_target_": target}, "runtime": {"choices": {"hydra/launcher": "slurm"}}}}
    )


@slow
def test_a_local_sweep_with_a_death_in_it(empty_store, tmp_path):
    words = ("device=cpu,mps", "model=dying", "model.how=fine,SIGKILL", "task.plots=false", "train.num_epochs=1")
    shutil.copy(empty_store, person(tmp_path) / "mlflow.db")
    code, text = sweep(tmp_path, LOCAL, *words)
    found = states(tmp_path)
    assert code == 1, text
    assert found["device=cpu model.how=fine"] == ("finished", "cpu", None), text
    assert found["device=cpu model.how=SIGKILL"] == ("failed", "cpu", "its process ended, and it left no summary")
    assert [state for state, _, _ in found.values()].count("skipped") == 2
    assert "skipped  device=mps: " in text
    assert summary(tmp_path, 0)["run_id"], "it is not in MLflow"
    for number in range(2):  # submitit's logs, which have the same name as the output of every job
        log = tmp_path / f"swept/{number}/console.log"
        assert log.is_file() and "sees" in log.read_text(), text
    assert "RUNNER_JOB" not in text


@slow
def test_ctrl_c_lets_local_jobs_save_their_state_and_the_same_line_goes_on(tmp_path):
    process = start(tmp_path, LOCAL, *LONG, "seed=1,2")
    read_until(process, " started on", 2)
    wait_for(lambda: all((tmp_path / f"swept/{number}/checkpoints/last.pt").exists() for number in (0, 1)))
    interrupt(process)
    code, text = finish(process)
    assert code == 130, text
    assert [state for state, _, _ in states(tmp_path).values()] == ["interrupted"] * 2
    assert [summary(tmp_path, number)["status"] for number in (0, 1)] == ["killed"] * 2
    wait_for(lambda: not jobs_in(tmp_path))


@slow
def test_a_job_whose_time_is_over_saves_its_state_and_is_started_again(tmp_path):
    """Slurm sends SIGUSR2; submitit's local executor starts such a job again in the same process."""
    process = start(tmp_path, LOCAL, *LONG)
    read_until(process, " started on")
    log = tmp_path / "swept/.submitit"
    wait_for(lambda: (tmp_path / "swept/0/checkpoints/last.pt").exists())
    (job,) = [one for one in jobs_in(tmp_path) if one.name().startswith("submitit.core._")]
    job.send_signal(signal.SIGUSR2)
    psutil.wait_procs([job], timeout=LONGEST)
    stood = summary(tmp_path, 0)["num_steps"]
    assert stood > 0
    wait_for(lambda: any(path.read_text().count("run      ") == 2 for path in log.glob("*/*_log.out")))
    interrupt(process)
    code, text = finish(process)
    assert code == 130, text
    assert summary(tmp_path, 0)["num_steps"] >= stood


@slow
def test_a_sweep_in_slurms_queue(empty_store, tmp_path):
    home, slurm = person(tmp_path / "home"), tmp_path / "slurm"
    path = simulated_slurm.install(slurm)
    words = ("device=cpu,auto", "model=dying", "model.how=fine,SIGKILL", "task.plots=false", "train.num_epochs=1")
    shutil.copy(empty_store, home / "mlflow.db")
    code, text = sweep(home, SLURM, *words, "hydra.launcher.partition=short", PATH=path)
    found = states(home)
    assert code == 1, text
    assert "slots    Slurm's queue, by submitit" in text
    for device in ("cpu", "auto"):
        assert found[f"device={device} model.how=fine"] == ("finished", device, None), text
        state, _, error = found[f"device={device} model.how=SIGKILL"]
        assert state == "killed" and error.startswith("Slurm says OUT_OF_MEMORY of job 1"), error
    assert summary(home, 0)["run_id"], "it is not in MLflow"
    on_cpu, others = simulated_slurm.batches(slurm)
    assert "--gpus-per-node" not in on_cpu
    assert "#SBATCH --gpus-per-node=1" in others
    for script in (on_cpu, others):
        assert "#SBATCH --partition=short" in script and "#SBATCH --array=0-1" in script


@slow
def test_a_sweep_that_is_stopped_cancels_its_jobs_in_the_queue(tmp_path):
    """The jobs start as on a cluster: no process is forked."""
    home, slurm = person(tmp_path / "home"), tmp_path / "slurm"
    process = start(home, SLURM, *LONG, "seed=1,2", PATH=simulated_slurm.install(slurm), **{DOOR: ""})
    read_until(process, " started on", 2)
    wait_for(lambda: all((home / f"swept/{number}/checkpoints/last.pt").exists() for number in (0, 1)))
    os.kill(process.pid, signal.SIGTERM)
    code, text = finish(process)
    assert code == 143, text
    assert [state for state, _, _ in states(home).values()] == ["interrupted"] * 2
    assert sorted(path.name for path in slurm.glob("*.cancelled")) == ["100_0.cancelled", "100_1.cancelled"]
    wait_for(lambda: not jobs_in(home))


@pytest.mark.parametrize("uri", ["${oc.env:MLFLOW_TRACKING_URI,sqlite:///mlflow.db}", r"http://it's\here\'s/a,b=c\\"])
def test_a_job_that_is_composed_again_is_told_the_store(uri):
    config = OmegaConf.create({"tracking": {"uri": uri}})
    assigned = Assignment("sweep", "1", "digits", "seed=1")
    words = overrides_of(PreparedJob(Job(0, ("seed=1",), "seed=1"), config), assigned, Path("swept"))
    (word,) = [word for word in words if word.startswith("tracking.uri=")]
    assert OverridesParser.create().parse_override(word).value() == uri
    named = PreparedJob(Job(0, ("tracking.uri=http://mine",), ""), config)
    assert [word for word in overrides_of(named, assigned, Path("swept")) if "tracking" in word] == [
        "tracking.uri=http://mine"
    ]


def test_a_job_that_is_composed_again_is_told_its_folder():
    config = OmegaConf.create({"tracking": {"uri": "http://mine"}})
    folder = "/home/j. o'neil/übung, 1 & (2)"
    words = overrides_of(
        PreparedJob(Job(0, (), ""), config), Assignment("sweep", "1", "digits", "seed=1"), Path(folder)
    )
    (word,) = [word for word in words if word.startswith("hydra.sweep.dir=")]
    assert OverridesParser.create().parse_override(word).value() == folder


def test_what_slurm_does_not_take_is_a_mistake_and_the_jobs_have_not_begun(tmp_path):
    """The jobs for a CPU are already in the queue, and those for a GPU are not."""
    from submitit.core.utils import FailedJobError

    submitted = []

    def launch(overrides, initial_job_idx):
        if launcher.params["gpus_per_node"]:
            said = "sbatch: error: invalid partition specified: shrt\nsbatch: error: Batch job submission failed"
            raise FailedJobError(said)
        submitted.append(initial_job_idx)
        submitit.AutoExecutor.map_array(None, None)

    params = {"partition": "shrt", "account": None, "gpus_per_node": 8}
    launcher = SimpleNamespace(_EXECUTOR="slurm", params=params, launch=launch)
    with pytest.MonkeyPatch.context() as patch:
        cancelled = []
        job = SimpleNamespace(cancel=lambda check: cancelled.append(1))
        patch.setattr(submitit.AutoExecutor, "map_array", lambda *_: [job])
        scheduled = Scheduled(launcher, OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
        for number, device in enumerate(["cpu", "cuda", "cuda"]):
            config = OmegaConf.create({"device": device, "tracking": {"uri": "sqlite:///mlflow.db"}})
            prepared = PreparedJob(Job(number, (), ""), config, (device,))
            scheduled.start(prepared, Assignment("sweep", "1", "digits", ""))
        with pytest.raises(NotTakenError) as caught:
            scheduled.ended(0.0)
        scheduled.close()
    assert (submitted, caught.value.numbers, cancelled) == ([0], (1, 2), [1])
    (problem,) = caught.value.problems
    assert problem.source == "hydra.launcher.partition=shrt hydra.launcher.gpus_per_node=8"
    assert problem.message == "invalid partition specified: shrt Batch job submission failed"
    assert "sinfo" in problem.help and "sweep.resume=last" in problem.help


@pytest.mark.parametrize("kind", ["local", "slurm"])
@pytest.mark.parametrize("is_safe", [False, True])
def test_what_is_submitted_finds_this_package_first_and_the_persons_modules_where_the_sweep_does(
    is_safe, kind, tmp_path, monkeypatch
):
    (tmp_path / "runner").mkdir()
    (tmp_path / "runner/__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith(("_", "n_"))}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags | {"safe_path": is_safe}))
    told = []

    # like submitit's `python -m`, which also searches the current directory first
    def launch(overrides, initial_job_idx):
        asks = [sys.executable, "-c", "import json, sys, runner.version; print(json.dumps(sys.path))"]
        script = "\n".join([*launcher.params["setup"], shlex.join(asks)])
        told.append(json.loads(subprocess.check_output(["bash", "-c", script], text=True)))
        submitit.AutoExecutor.map_array(None, None)

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", lambda *_: [SimpleNamespace()])
    own = ["export PYTHONPATH=/own"] if kind == "slurm" else []
    launcher = SimpleNamespace(_EXECUTOR=kind, params={"setup": own}, launch=launch)
    scheduled = Scheduled(launcher, OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}))
    prepared = PreparedJob(Job(0, (), ""), OmegaConf.create({"tracking": {"uri": "http://mine"}}))
    before = dict(os.environ)
    assert scheduled._submit([(prepared, Assignment("sweep", "1", "digits", ""))], on_cpu=True) == ""
    assert dict(os.environ) == before and launcher.params["setup"] == own
    assert (str(tmp_path) in told[0]) != is_safe and ("/own" in told[0]) == (kind == "slurm")


def test_without_the_plugin_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = problems_of(check_there, settings(f"{PLUGIN}.submitit_launcher.SlurmLauncher"))
    assert problems[0].source == "hydra/launcher=slurm"
    assert problems[0].help == f"run `{install('slurm')}`"


def test_without_slurm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    problems = problems_of(check_there, settings(f"{PLUGIN}.submitit_launcher.SlurmLauncher"))
    assert "there is no Slurm on this machine" in problems[0].message


@pytest.mark.parametrize("target", ["runner.sweep.Slots", f"{PLUGIN}.submitit_launcher.LocalLauncher"])
def test_what_needs_no_slurm_is_not_asked_for_it(target, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check_there(settings(target))
