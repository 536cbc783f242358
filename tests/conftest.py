"""Fixtures and checks for every test: `--device`, separate directories, and a search for what the test leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

# before torch is loaded, and lower than in runner/__main__.py: two workers share the cores
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import forked_programs
import psutil
import pytest
import shortcuts
import torch
from snapshots import messages  # noqa: F401  # a fixture
from trained_runs import at_home, home, run, table  # noqa: F401  # fixtures: of tests/runs, and of commands that name a run
from waiting import STAYING
from written_journals import empty_store, patience, server, write  # noqa: F401  # of tests/tracking, and of `sync`

#: a shell's background job ignores Ctrl-C, and processes that the tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: keeps the key that signs run directories out of the home of the user who runs the tests
STATE = tempfile.TemporaryDirectory(prefix="runner-tests-")
os.environ["XDG_STATE_HOME"] = STATE.name


def pytest_configure(config):
    has_gpu = Path("/dev/dxg").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
    if has_gpu and config.getoption("--device") == "cpu":  # tests without a device use the CPU there, too
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shortcuts.compose_once()
    shortcuts.leave_undrawn()


#: the files that take longest, longest first: if one of them started last, the other workers would wait for it
LONGEST_FILES = """
sweep/launchers/test_ray sweep/launchers/test_slurm sweep/test_batched tools/test_try_out whole_runs/test_template
sweep/launchers/test_pretended_gpus whole_runs/test_hostile experiment/test_own_loader runs/test_check
bench/test_peers sweep/test_sweep experiment/test_run cli/test_dispatch whole_runs/test_fuzz tracking/test_faults
whole_runs/test_readme sweep/search/test_sweeper distributed/test_training tools/plan/test_dry_run training/step/test_compiled
tracking/test_mlflow_model runs/test_serve runs/test_export whole_runs/test_resume whole_runs/test_stops
tracking/test_sweeps whole_runs/test_taking_up whole_runs/test_several_processes data/tables/test_rows
whole_runs/test_simulated experiment/test_directory sweep/report/test_page_in_a_browser
whole_runs/test_conf cli/test_answer tools/plan/test_command whole_runs/test_secrets
runs/reproduce/test_reproduce tracking/test_outages tracking/test_publisher whole_runs/test_metrics
tasks/test_language models/test_every_model tracking/test_damage data/language/test_tokens
tools/plan/simulator/test_simulator sweep/search/test_job_source whole_runs/test_signals runs/test_register
tracking/test_uploader tasks/test_metrics whole_runs/test_pairs experiment/test_build_optimizer config/test_allowed
tools/plan/test_memory whole_runs/test_disk_full runs/test_evaluate cli/test_notebook data/hub/test_datasets
experiment/test_build tracking/test_deadline device/test_layers device/test_backends cli/test_options
whole_runs/test_tables sweep/search/test_pruning distributed/test_sharding tools/plan/test_language
training/stacked/test_fit training/step/test_on_device training/stacked/test_check whole_runs/test_turns whole_runs/test_tasks
whole_runs/test_where_time_went training/step/test_turns training/step/test_fused_update
sweep/launchers/test_process_pool runs/test_load config/test_override_errors training/test_cpu_threads
sweep/jobs/test_prepare experiment/plots/test_draw cli/test_unexpected
runs/test_of_tables sweep/report/test_page
"""


def pytest_collection_modifyitems(items):
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST_FILES.split())}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # excludes the imported objects from collections: 1.1 s each
    gc.set_threshold(700, 10, 50)  # also fewer collections of what a test leaves: 0.2 s each, thousands of times


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="real hardware to run the device tests on, e.g. cuda:0 or mps")
    parser.addoption("--update-snapshots", action="store_true", help="rewrite messages.txt and generated files")


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    return torch.device(request.config.getoption("--device"))


#: variables that torch and Triton set after computing on a GPU, and set_switches() for cuBLAS
OF_A_GPU = {"TRITON_CACHE_DIR", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "TORCH_WARM_POOL", "CUDA_MODULE_LOADING"}
OF_A_GPU |= {"CUBLAS_WORKSPACE_CONFIG"}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves a thread, a process or an environment variable."""
    environment, threads = dict(os.environ), set(threading.enumerate())
    children = {child.pid for child in _children()}
    yield
    children |= STAYING
    changed = {name for name in environment.keys() ^ os.environ.keys() if not name.startswith("PYTEST_")}
    changed |= {name for name in environment.keys() & os.environ.keys() if environment[name] != os.environ[name]}
    changed -= {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}
    changed -= {"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"}  # set by torch when it compiles
    changed -= {"_MLFLOW_TELEMETRY_SESSION_ID"}  # set by MLflow when it is imported
    changed -= OF_A_GPU
    assert not changed, f"environment variables left changed: {changed}"
    deadline = time.monotonic() + 60  # on a busy machine, processes end slowly
    while time.monotonic() < deadline:
        left = [thread for thread in threading.enumerate() if thread not in threads and not _is_torchs(thread)]
        started = [child for child in _children() if child.pid not in children]
        running = [child for child in started if child.is_running() and not _is_over(child)]
        if not left and not running:
            return
        gc.collect()  # MLflow's artifact stores end their threads when they are collected
        threading.Event().wait(0.02)  # for threads that are ending
    assert not left, f"threads left: {left}"
    assert not running, f"processes left: {running}"


def _children() -> list[psutil.Process]:
    own = Path("/proc/self/task")
    try:
        if not any((task / "children").read_text() for task in own.iterdir()):
            return []
    except OSError:  # another system, or a thread that has just ended
        pass
    return psutil.Process().children(recursive=True)


def _is_over(child: psutil.Process) -> bool:
    """Return whether a process is a zombie, has just ended, or is kept for later jobs by a Ray node or torch's compiler."""
    try:
        is_kept = child.name() == "ray::IDLE" or any("compile_worker" in word for word in child.cmdline())
        return child.status() == psutil.STATUS_ZOMBIE or is_kept
    except psutil.NoSuchProcess:
        return True


def _is_torchs(thread: threading.Thread) -> bool:
    # tqdm_monitor: MLflow shows its downloads with tqdm if it is installed
    return thread.name.startswith(("Thread-autograd", "pydevd", "QueueFeederThread", "tqdm_monitor")) or (
        thread.daemon and "torch" in repr(thread)
    )


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A user's empty directory as the current one; modules imported from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and file.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def ink():
    """Render plots (shortcuts.py)."""
    with shortcuts.rendered():
        yield


@pytest.fixture(scope="session")
def warm():
    """The preloaded process of the session, from which processes are forked; it starts before the search for leaks."""
    with forked_programs.opened() as process:
        yield process


@pytest.fixture
def warm_jobs(warm, monkeypatch):
    """Sweeps in this process run jobs in separate processes, as always, but without imports that take seconds."""
    warm.replace_popen(monkeypatch, "runner.sweep.launchers.process_pool")


@pytest.fixture
def warm_programs(warm, monkeypatch):
    """The processes for a run or a plan of this process start with preloaded modules. Returns the class that starts them."""
    warm.replace_popen(monkeypatch, "runner.tracking.ahead", "runner.tools.plan.command")
    return warm.program
