"""Sweeps on a real Ray node, which the test starts on a free port and stops by process id."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import sweeps_in_a_shell
from forked_programs import DOOR
from sweeps_in_a_shell import finish, interrupt, jobs_in, person, read_until, start, states, summary, sweep
from waiting import LONGEST, wait_for

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
#: no workers before a job requests them
RAY |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
#: a node's helpers and workers may start slowly on a busy machine (default: 30 and 60 s)
RAY |= {"RAY_agent_register_timeout_ms": f"{LONGEST * 1000:.0f}"}
RAY |= {"RAY_worker_register_timeout_seconds": f"{LONGEST:.0f}"}
SUPPORT = Path(sweeps_in_a_shell.__file__).parent


@pytest.fixture(autouse=True)
def forked(warm, monkeypatch):
    monkeypatch.setattr(sweeps_in_a_shell, "STARTED", warm.program)


@pytest.fixture(scope="module")
def cluster(warm) -> Iterator[str]:
    """The address of a node with two CPUs and a simulated GPU: `ray start --block`, ended with its processes."""
    folder = tempfile.mkdtemp(prefix="r")  # a short path, as it contains sockets
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SUPPORT / "ray_node.py"), "start", "--node-name=one", "--num-cpus=2", "--num-gpus=1"]
    command += ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false", "--no-monitor"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    command += ["--include-log-monitor=false", "--block"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # not in the user's directory; the server at the socket forks the workers
    place = {"cwd": tempfile.gettempdir(), "env": {**os.environ, **RAY, DOOR: warm.door}}
    process = subprocess.Popen(command, **place, **streams)
    try:
        read_until(process, "Ray runtime started")
        yield f"127.0.0.1:{port}"
    finally:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        _, left = psutil.wait_procs(family, timeout=20)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=10)
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def on(address: str) -> tuple[str, str]:
    return "hydra/launcher=ray", f"hydra.launcher.address={address}"


def test_ray_jobs_run_or_die_as_rows(cluster, tmp_path, empty_store):
    """A job sees only its device, has the user's directory and variables, and the other jobs continue."""
    shutil.copy(empty_store, person(tmp_path) / "mlflow.db")
    np.savez(tmp_path / "a.npz", x=np.zeros((32, 4), np.float32), y=np.zeros(32, np.int64))
    pairs = [*((device, "fine") for device in ("cpu", "auto", "cuda:7", "mps")), ("cpu", "SIGSEGV"), ("cpu", "site")]
    devices, ends = (",".join(f"'{each}'" for each in column) for column in zip(*pairs, strict=True))
    words = (f"sweep.zip={{device:[{devices}],model.how:[{ends}]}}", "model=dying", "train.num_steps=1")
    words += ("data=arrays", "data.path=${oc.env:ARRAYS}", "task.plots=false", "tracking.log_model=false")
    code, text = sweep(tmp_path, *on(cluster), *words, **RAY, ARRAYS="a.npz")
    assert code == 1, text
    assert "1 node, 2 CPUs, 1 GPU" in text
    rows = dict(zip(pairs, states(tmp_path).values(), strict=True))
    assert rows["cpu", "fine"][0] == "finished", text
    assert rows["auto", "fine"][:2] == ("finished", "cuda at one")
    assert rows["cuda:7", "fine"][0] == rows["mps", "fine"][0] == "skipped"
    assert "skipped  device=cuda:7 on Ray: Ray chooses which GPU a job gets" in text
    assert rows["cpu", "SIGSEGV"][::2] == ("failed", "its process crashed: SIGSEGV, segmentation fault")
    state, _, error = rows["cpu", "site"]
    assert state == "killed" and "was lost: The actor is dead because its worker process has died" in error
    for number, visible in enumerate(("''", "'0'")):
        log = (tmp_path / f"swept/{number}/console.log").read_text()
        assert f"sees {visible} in {tmp_path}" in log and "finished in" in log
        assert summary(tmp_path, number)["run_id"], "it is not in MLflow"
    assert not (tmp_path / "swept/.ray").exists()
    wait_for(lambda: not jobs_in(tmp_path))


def test_ray_killed_sweep_resumes_until_ctrl_c(cluster, tmp_path):
    words = ("device=cpu", "model=linear", "seed=1,2,3", "train.num_epochs=1000000", "tracking.enabled=false")
    words += ("train.checkpoint_every_steps=50", "train.max_seconds=60")
    both = [tmp_path / f"swept/{number}" for number in (0, 1)]
    process = start(tmp_path, *on(cluster), *words, **RAY)
    read_until(process, " started on", 2)
    wait_for(lambda: all((job / "checkpoints/last.pt").exists() for job in both))
    process.kill()
    finish(process)
    wait_for(lambda: not jobs_in(tmp_path))
    assert [summary(tmp_path, number)["status"] for number in (0, 1)] == ["killed"] * 2
    stood = [summary(tmp_path, number)["num_steps"] for number in (0, 1)]

    process = start(tmp_path, *on(cluster), *words, "sweep.resume=swept", **RAY)
    text = read_until(process, " started on", 2)
    wait_for(lambda: all((job / "console.log").read_text().count("run      ") == 2 for job in both))
    interrupt(process)
    code, rest = finish(process)
    assert code == 130, text + rest
    assert sorted(state for state, _, _ in states(tmp_path).values()) == ["interrupted", "interrupted", "planned"]
    assert [summary(tmp_path, number)["status"] for number in (0, 1)] == ["killed"] * 2
    assert all(summary(tmp_path, number)["num_steps"] >= stood[number] > 0 for number in (0, 1))
    wait_for(lambda: not jobs_in(tmp_path))


def test_ray_actor_imports_this_package_first(cluster, warm, tmp_path):
    script = f"""
import json, sys
from runner.sweep.launchers.ray import RayCluster

class Paths:
    def path(self):
        return sys.path

cluster = RayCluster("{cluster}")
actor = cluster.actor(Paths, {{"CPU": 1}})
ray = cluster.connect()
print(json.dumps(ray.get(actor.path.remote())))
ray.kill(actor)
ray.shutdown()
"""
    ours, users = str(sweeps_in_a_shell.ROOT), str(tmp_path)
    environment = {**os.environ, **RAY, "PYTHONPATH": ours}
    command = [sys.executable, "-c", script]
    with warm.program(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        path = json.loads(process.stdout.read())
    assert path.index(ours) < path.index(users)
