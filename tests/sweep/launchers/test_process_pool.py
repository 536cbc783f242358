"""Processes of every kind that jobs start: each test checks which of them remain."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs_for_nursery
import psutil
import pytest
from waiting import LONGEST, wait_for

from runner.sweep.launchers import local
from runner.sweep.launchers.process_pool import FORKS, Ended, ProcessPool, call
from runner.sweep.launchers.worker import Request
from runner.sweep.search import preload as search_preload
from runner.version import PACKAGES

SUPPORT = str(Path(jobs_for_nursery.__file__).parent)
KINDS = [True, False] if FORKS else [False]
PATHS = {"PYTHONPATH": os.pathsep.join([SUPPORT, str(PACKAGES)])}
forking = pytest.mark.skipif(not FORKS, reason="each job is a separate process")


@pytest.fixture(params=KINDS, ids=lambda forks: "fork" if forks else "spawn")
def pool(request):
    with ProcessPool(PATHS | {"CUDA_VISIBLE_DEVICES": "3"}, preload=["statistics"], forks=request.param) as opened:
        yield opened


def request(function, payload, log, number=0, **fields):
    return Request(number, f"jobs_for_nursery:{function}", str(payload).encode(), str(log), **fields)


def all_ended(pool, count):
    ended = []
    deadline = time.monotonic() + LONGEST
    while len(ended) < count and time.monotonic() < deadline:
        select.select([pool], [], [], 0.1)
        ended += pool.ended()
    return sorted(ended, key=lambda each: each.number)


def read_pids(path):
    wait_for(path.exists)
    return [int(pid) for pid in path.read_text().split()]


def are_gone(*pids):
    def is_gone(pid):
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(lambda: all(map(is_gone, pids)))
    return True


def test_pool_forks_from_preloaded_process(pool, tmp_path):
    for number in range(3):
        pool.start(request("report", tmp_path / f"{number}.json", tmp_path / f"{number}.log", number))
    assert all_ended(pool, 3) == [Ended(number, 0) for number in range(3)]
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    assert len({facts["pid"] for facts in found}) == 3
    for facts in found:
        assert facts["warm"] and facts["visible"] == "3" and facts["stdin"] == ""
        assert facts["session"] == facts["pid"]
    assert (tmp_path / "1.log").read_text() == "hello from the job\nand from its stderr\n"
    pool.start(request("report", tmp_path / "x.json", tmp_path / "x.log", environment={"CUDA_VISIBLE_DEVICES": ""}))
    all_ended(pool, 1)
    assert json.loads((tmp_path / "x.json").read_text())["visible"] == ""


def test_pool_reports_each_end(pool, tmp_path):
    ends = {"0": 0, "3": 3, "raise": 1, "sys.exit": 7, "os._exit": 9, "SIGSEGV": -11, "SIGKILL": -9}
    for number, what in enumerate(ends):
        pool.start(request("end_as_told", what, tmp_path / f"{what}.log", number))
    assert all_ended(pool, len(ends)) == [Ended(number, code) for number, code in enumerate(ends.values())]
    assert pool.running == [] and "ValueError: no" in (tmp_path / "raise.log").read_text()


def test_pool_reports_end_of_unforked_job(tmp_path, monkeypatch):
    with ProcessPool(PATHS, forks=False) as pool:
        pool.start(request("end_as_told", "3", tmp_path / "log"))
        assert are_gone(pool._pids[0])
        assert select.select([pool], [], [], 0)[0], "it is found to have ended by looking now and then"
        assert pool.ended() == [Ended(0, 3)]
        with monkeypatch.context() as patch:  # its last event comes late
            patch.setattr(pool, "_news", list)
            pool.start(request("end_as_told", "3", tmp_path / "log"))
            assert all_ended(pool, 1) == [Ended(0, 3)]
        assert pool.ended() == []


def test_pool_signal_reaches_child_processes(pool, tmp_path):
    pool.start(request("wait", f"{tmp_path / 'pids'}:yes", tmp_path / "log"))
    pids = read_pids(tmp_path / "pids")
    pool.ended()
    pool.signal(0, signal.SIGKILL, whole_group=True)
    pool.start(request("wait", f"{tmp_path / 'others'}:no", tmp_path / "log", 1))
    pool.signal(1, signal.SIGKILL)  # before its fork
    assert all_ended(pool, 2) == [Ended(0, -signal.SIGKILL), Ended(1, -signal.SIGKILL)]
    assert are_gone(*pids)


def test_pool_close_ends_jobs(pool, tmp_path):
    pool.start(request("wait", f"{tmp_path / 'pids'}:no", tmp_path / "log", grace_seconds=0.2))
    pids = read_pids(tmp_path / "pids")
    pool.close()
    assert are_gone(*pids)
    pool.__init__({})  # for the fixture's close


@pytest.mark.parametrize("forks", KINDS)
def test_pool_close_waits_for_no_import(forks, tmp_path):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(600)")
    pool = ProcessPool({"PYTHONPATH": str(tmp_path)}, preload=["slow_to_import"], forks=forks)
    pool.close()
    assert pool._warm.returncode == -signal.SIGTERM


def test_pool_preload_leaves_no_directory(tmp_path):
    script = (
        "import os\nfrom runner.sweep.launchers import worker\n"
        "with worker.folder_for_now() as folder:\n"
        "    (folder / 'x').touch()\n"
        "    os.kill(os.getpid(), 15)\n"
        "    assert (folder / 'x').exists()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment).returncode == -signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_preloading_queries_no_gpu():
    """A forked process could not use it then."""
    code = f"""
import importlib, os, torch
from torch._subclasses.fake_tensor import FakeTensorMode
torch.cuda.is_available = torch.cuda.device_count = FakeTensorMode.__enter__ = lambda *args: os._exit(3)
for name in {(*local.PRELOAD, search_preload.__name__)}:
    importlib.import_module(name)
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment).returncode == 0


@pytest.mark.slow
@forking
def test_a_forked_job_computes_on_the_device(device, warm_jobs):
    with ProcessPool({}) as process_pool:
        assert call(process_pool, jobs_for_nursery.on_device, str(device)) == 3.0


def test_call_returns_or_raises(pool):
    assert call(pool, jobs_for_nursery.add, 2, 3) == 5
    with pytest.raises(ValueError, match="it does not work"):
        call(pool, jobs_for_nursery.fail)
    with pytest.raises(RuntimeError, match="last words"):
        call(pool, jobs_for_nursery.die)
    assert call(pool, jobs_for_nursery.add, "a", "b") == "ab"


@forking
def test_pool_replaces_killed_preloaded_process(tmp_path):
    with ProcessPool(PATHS) as pool:
        pool.start(request("wait", f"{tmp_path / 'pids'}:yes", tmp_path / "log"))
        pids = read_pids(tmp_path / "pids")
        pool.ended()
        os.kill(pool._warm.pid, signal.SIGKILL)
        assert all_ended(pool, 1) == [Ended(0, None)]
        assert are_gone(*pids)
        assert call(pool, jobs_for_nursery.add, 1, 1) == 2


@forking
@pytest.mark.parametrize("is_known", [True, False], ids=["after a look", "before one"])
def test_pool_start_reports_lost_jobs(tmp_path, is_known):
    with ProcessPool(PATHS) as pool:
        pool.start(request("wait", f"{tmp_path / 'pids'}:yes", tmp_path / "log"))
        pids = read_pids(tmp_path / "pids")
        select.select([pool], [], [], LONGEST)  # it has reported the pid
        assert pool.ended() == [] if is_known else pool._pids == {0: 0}
        os.kill(pool._warm.pid, signal.SIGKILL)
        pool._warm.wait()
        pool.start(request("end_as_told", "3", tmp_path / "log", 1))
        assert pool.running == [1]
        assert all_ended(pool, 2) == [Ended(0, None), Ended(1, 3)]
        assert are_gone(*pids)


@forking
def test_pool_lost_job_loses_its_signal(tmp_path):
    with ProcessPool(PATHS) as pool:
        assert call(pool, jobs_for_nursery.add, 1, 1) == 2
        os.kill(pool._warm.pid, signal.SIGSTOP)  # it no longer reads requests
        pool.start(request("end_as_told", "0", tmp_path / "log"))
        os.kill(pool._warm.pid, signal.SIGKILL)
        pool._warm.wait()
        assert pool.ended() == [Ended(0, None)]
        pool.start(request("end_as_told", "3", tmp_path / "log"))
        assert all_ended(pool, 1) == [Ended(0, 3)]


@pytest.mark.parametrize(("forks", "cares"), [(forks, cares) for forks in KINDS for cares in ("yes", "no")][1:])
def test_a_killed_owner_leaves_no_process(tmp_path, forks, cares):
    script = (
        "import sys, time; from runner.sweep.launchers.process_pool import ProcessPool; from runner.sweep.launchers.worker import Request\n"
        "pool = ProcessPool({}, forks=sys.argv[1] == 'True')\n"
        "pool.start(Request(0, 'jobs_for_nursery:wait', sys.argv[2].encode(), sys.argv[3], grace_seconds=0.3))\n"
        "print(pool._warm.pid, flush=True)\n"
        "time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([SUPPORT, str(PACKAGES)])}
    command = [sys.executable, "-c", script, str(forks), f"{tmp_path / 'pids'}:{cares}", str(tmp_path / "log")]
    owner = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    pids = [*read_pids(tmp_path / "pids"), int(owner.stdout.readline())]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    if not forks and cares == "yes":  # a job that ends in time by its own handler does not end its child processes
        os.kill(pids.pop(1), signal.SIGKILL)
    assert are_gone(*pids)
