"""Sweeps on a real Ray cluster of two nodes, which the test starts on free ports and stops by process id."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import sweeps_in_a_shell
from sweeps_in_a_shell import finish, interrupt, jobs_in, person, read_until, start, states, summary, sweep
from waiting import LONGEST, wait_for
from warm_door import DOOR

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SMALL = ("model=linear", "train.num_epochs=1", "tracking.enabled=false")
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
#: no workers before a job requests them
RAY |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
#: a node's helpers and workers may start slowly on a busy machine (default: 30 and 60 s)
RAY |= {"RAY_agent_register_timeout_ms": f"{LONGEST * 1000:.0f}"}
RAY |= {"RAY_worker_register_timeout_seconds": f"{LONGEST:.0f}"}
SUPPORT = Path(sweeps_in_a_shell.__file__).parent
IS_ROOT = hasattr(os, "getuid") and os.getuid() == 0
HIDING = ["unshare", *([] if IS_ROOT else ["--user", "--map-root-user"]), "--mount"]


@pytest.fixture(autouse=True)
def forked(warm, monkeypatch):
    monkeypatch.setattr(sweeps_in_a_shell, "STARTED", warm.program)


@contextmanager
def node(name: str, *words: str, door: str = "", before: tuple[str, ...] = ()) -> Iterator[psutil.Process]:
    """Run `ray start --block`, yield once it is ready, and end it with its processes. door: The server that forks its workers."""
    command = [sys.executable, str(SUPPORT / "ray_node.py"), "start", f"--node-name={name}", "--num-cpus=1"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats", "--dashboard-agent-listen-port=0"]
    command += ["--include-log-monitor=false", "--block"]
    process = subprocess.Popen(
        [*before, *command, *words],
        env={**os.environ, **RAY, DOOR: door},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tempfile.gettempdir(),  # not the user's directory
    )
    try:
        read_until(process, "Ray runtime started")
        yield psutil.Process(process.pid)
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


@pytest.fixture(scope="module")
def cluster(warm_door) -> Iterator[tuple[str, list[psutil.Process]]]:
    """The address, and the processes of its two nodes: one with a CPU, the other with a CPU and a simulated GPU."""
    folder = tempfile.mkdtemp(prefix="r")  # a short path, as it contains sockets
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    head = ("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false", "--no-monitor")
    try:
        with (
            node("one", *head, door=warm_door) as one,
            node("two", f"--address={address}", "--num-gpus=1", door=warm_door) as two,
        ):
            yield address, [one, two]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def on(address: str) -> tuple[str, str]:
    return "hydra/launcher=ray", f"hydra.launcher.address={address}"


def test_the_same_sweep_on_two_nodes(cluster, tmp_path, empty_store):
    address, _ = cluster
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    words = ("device=cpu,cuda:7,mps", "model=linear,mlp", "train.num_epochs=1", "task.plots=false")
    code, text = sweep(tmp_path, *on(address), *words, **RAY)
    assert code == 0, text
    assert "2 nodes, 2 CPUs, 1 GPU" in text
    assert "skipped  device=cuda:7 on Ray: Ray chooses which GPU a job gets" in text
    assert "skipped  device=mps on Ray: Ray supports only CPUs and NVIDIA GPUs" in text
    found = states(tmp_path)
    assert sorted(state for state, _, _ in found.values()) == ["finished"] * 2 + ["skipped"] * 4
    assert {device for state, device, _ in found.values() if state == "finished"} == {"cpu at one", "cpu at two"}
    for number in range(2):
        told = summary(tmp_path, number)
        assert told["status"] == "finished"
        assert told["run_id"], "it is not in MLflow"
        assert "finished in" in (tmp_path / f"swept/{number}/console.log").read_text()
    assert {file.name for file in (tmp_path / "swept").glob("*.html")} == {"report.html"}
    assert (tmp_path / "mlflow.db").is_file()
    assert not (tmp_path / "swept/.ray").exists()


def test_the_device_decides_what_a_job_sees(cluster, tmp_path):
    address, _ = cluster
    words = ("device=cpu,cuda,auto", "model=dying", "train.num_epochs=1", "tracking.enabled=false", "data=arrays")
    np.savez(person(tmp_path) / "a.npz", x=np.zeros((32, 4), np.float32), y=np.zeros(32, np.int64))
    code, text = sweep(tmp_path, *on(address), *words, "data.path=${oc.env:ARRAYS}", **RAY, ARRAYS="a.npz")
    found = states(tmp_path)
    assert code == 1, text
    assert found["device=cpu"][0] == "finished", text
    assert found["device=cuda"][:2] == ("failed", "cuda at two")
    assert "CPU-only build" in found["device=cuda"][2]
    assert found["device=auto"][:2] == ("finished", "cuda at two")
    assert f"sees '' in {tmp_path}" in (tmp_path / "swept/0/console.log").read_text()
    assert f"sees '0' in {tmp_path}" in (tmp_path / "swept/2/console.log").read_text()


def test_each_death_is_a_row_with_its_cause_and_the_others_go_on(cluster, tmp_path):
    address, _ = cluster
    words = ("device=cpu", "model=dying", "model.how=fine,SIGSEGV,SIGKILL,exit,site", "train.num_epochs=1")
    code, text = sweep(person(tmp_path), *on(address), *words, "tracking.enabled=false", **RAY)
    found = {name.partition("=")[2]: (state, error) for name, (state, _, error) in states(tmp_path).items()}
    assert code == 1, text
    assert found["fine"] == ("finished", None), text
    assert found["SIGSEGV"] == ("failed", "its process crashed: SIGSEGV, segmentation fault")
    assert found["SIGKILL"][0] == "killed" and found["SIGKILL"][1].startswith("SIGKILL")
    assert found["exit"] == ("failed", "its process ended with exit code 7 and left no summary")
    lost = "was lost: The actor is dead because its worker process has died"
    assert found["site"][0] == "killed" and lost in found["site"][1]
    wait_for(lambda: not jobs_in(tmp_path))


def test_a_sweep_that_is_killed_takes_its_jobs_along_and_goes_on_where_they_stood_until_ctrl_c(cluster, tmp_path):
    address, _ = cluster
    words = ("device=cpu", "model=linear", "seed=1,2,3", "train.num_epochs=1000000", "tracking.enabled=false")
    words += ("train.checkpoint_every_steps=50", "train.max_seconds=60")
    both = [tmp_path / f"swept/{number}" for number in (0, 1)]
    process = start(tmp_path, *on(address), *words, **RAY)
    read_until(process, " started on", 2)
    wait_for(lambda: all((job / "checkpoints/last.pt").exists() for job in both))
    process.kill()
    finish(process)
    wait_for(lambda: not jobs_in(tmp_path))
    assert [summary(tmp_path, number)["status"] for number in (0, 1)] == ["killed"] * 2
    stood = [summary(tmp_path, number)["num_steps"] for number in (0, 1)]

    process = start(tmp_path, *on(address), *words, "sweep.resume=swept", **RAY)
    text = read_until(process, " started on", 2)
    wait_for(lambda: all((job / "console.log").read_text().count("run      ") == 2 for job in both))
    interrupt(process)
    code, rest = finish(process)
    assert code == 130, text + rest
    assert sorted(state for state, _, _ in states(tmp_path).values()) == ["interrupted", "interrupted", "planned"]
    assert [summary(tmp_path, number)["status"] for number in (0, 1)] == ["killed"] * 2
    assert all(summary(tmp_path, number)["num_steps"] >= stood[number] > 0 for number in (0, 1))
    wait_for(lambda: not jobs_in(tmp_path))


def test_a_machine_that_shares_no_files_gets_the_job_and_what_it_has_and_sends_its_folder_back(
    cluster, empty_store, tmp_path
):
    """A node in a separate mount namespace, where an empty directory hides the user's directory.

    Ray's worker and the job start there without forks, as a process that is forked outside would not be in the namespace.
    """
    address, _ = cluster
    hidden = person(tmp_path / "home")
    hide = (*HIDING, "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden))
    if subprocess.run([*hide, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces for this account")
    shutil.copy(empty_store, hidden / "mlflow.db")
    words = ("device=cpu", "model=linear", "task.plots=false", "train.num_epochs=2")
    code, text = sweep(hidden, *on(address), *words, **RAY)
    assert code == 0, text
    # as if the job had been interrupted before it sent anything
    job, ledger = hidden / "swept/0", hidden / "swept/ledger.jsonl"
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join([*lines[:-1], json.dumps({**json.loads(lines[-1]), "state": "interrupted"})]) + "\n")
    (job / "summary.json").unlink()
    (job / "journal/ack.json").unlink()

    away = (f"--address={address}", '--resources={"away": 1}')
    with node("away", *away, before=hide):
        there = ("+hydra.launcher.resources.away=1", "sweep.resume=swept")
        code, text = sweep(hidden, *on(address), *words, *there, **RAY)
    assert code == 0, text
    ((state, device, _),) = states(hidden).values()
    assert (state, device) == ("finished", "cpu at away")
    told = summary(hidden, 0)
    assert told["status"] == "finished"
    assert (job / "checkpoints/last.pt").is_file()
    said = (job / "console.log").read_text()
    assert said.count("device   cpu (as asked)") == 2, said
    assert said.count("finished in") == 2
    sent = json.loads((job / "journal/ack.json").read_text())
    assert told["run_id"] == sent["run_id"], "nobody sent its journal when it was home"


@pytest.mark.parametrize(("flags", "has_persons"), [((), True), (("-P",), False)])
def test_a_place_finds_this_package_first_and_the_persons_modules_where_the_sweep_does(
    cluster, tmp_path, flags, has_persons
):
    asks = f"""
import json, sys
from runner.sweep.launchers.ray import RayCluster

class Place:
    def path(self):
        return sys.path

cluster = RayCluster("{cluster[0]}")
place = cluster.actor(Place, {{"CPU": 1}})
ray = cluster.connect()
print(json.dumps(ray.get(place.path.remote())))
ray.kill(place)
ray.shutdown()
"""
    ours, persons = str(sweeps_in_a_shell.ROOT), str(tmp_path)
    environment = {**os.environ, **RAY, "PYTHONPATH": ours}
    told = subprocess.check_output([sys.executable, *flags, "-c", asks], cwd=tmp_path, env=environment, text=True)
    path = json.loads(told)
    assert (persons in path) == has_persons
    assert path.index(ours) < (path.index(persons) if has_persons else len(path))


def test_what_ray_can_not_place_is_said(cluster, tmp_path):
    address, _ = cluster
    process = start(tmp_path, *on(address), *SMALL, "device=cpu", "+hydra.launcher.resources.moon=1", **RAY)
    text = read_until(process, "waiting:")
    interrupt(process)
    code, rest = finish(process)
    assert "waiting: no node of the cluster has 1 CPU, 1 moon" in text
    assert code == 130, rest
    assert [state for state, _, _ in states(tmp_path).values()] == ["planned"]


def test_an_address_where_nothing_listens_is_a_mistake_at_once(tmp_path):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        code, text = sweep(tmp_path, *on(f"127.0.0.1:{taken.getsockname()[1]}"), *SMALL, "device=cpu", **RAY)
    assert code == 2
    assert "error: Ray doesn't answer at" in text
    assert not (tmp_path / "swept").exists()
