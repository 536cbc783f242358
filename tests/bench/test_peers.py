"""The speed tables: every peer's command line works and prints all fields, and the figures are computed as named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

PEERS = Path(__file__).parent / "peers"
TOLD = {"num_steps", "seconds", "seconds_steady", "num_steps_steady", "points", "loss", "peak_memory_bytes"}
TOLD |= {"import_seconds"}
#: file, required package, points per logged step
CASES = [
    ("textbook.py", "torch", 2),
    ("limit.py", "torch", 2),
    ("limit.py --variant=graph", "torch", 2),
    ("with_lightning.py", "lightning", 3),  # also the epoch
    ("with_transformers.py", "accelerate", 3),  # also the epoch
]


@pytest.fixture
def told(tmp_path, empty_store, warm):
    """Run a file of tests/bench with a new store; return its JSON line."""

    def told(file: str, *words: str) -> dict[str, float]:
        shutil.copy(empty_store, tmp_path)
        command = [sys.executable, str(PEERS / file), f"--store={tmp_path}/mlflow.db", *words]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
        streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        with warm.program(command, **streams, text=True, cwd=tmp_path, env=os.environ | quiet) as process:
            said, complained = process.communicate()
        assert process.returncode == 0, said + complained
        return json.loads(said.strip().splitlines()[-1])

    return told


@pytest.mark.slow
@pytest.mark.parametrize(("file", "package", "points"), CASES, ids=[file for file, _, _ in CASES])
def test_peer_trains_logs_and_reports(file, package, points, told, device):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed here (pip install -c .constraints.txt -e '.[bench]')")
    result = told(*file.split(), "--steps=60", "--log-every=20", f"--device={device}")
    assert set(result) == TOLD
    assert (result["num_steps"], result["num_steps_steady"], result["points"]) == (60, 10, 3 * points)
    assert 0 < result["seconds_steady"] < result["seconds"]
    assert 0.5 < result["loss"] < 1.6  # starts at 2.3; all peers do the same work
    assert result["peak_memory_bytes"] > 1e8
    # forked from a process that has already imported most modules: close to 0
    assert abs(result["import_seconds"]) < 300


@pytest.mark.slow
def test_ours_reports_same_and_uploader_time(told, device):
    result = told("ours.py", "--steps=150", f"--device={device}", "--words=metrics.pull_every=50")
    of_points = {"process_seconds", "publisher_cpu_seconds", "seconds_after_last_step"}
    assert set(result) == TOLD | of_points
    assert (result["num_steps"], result["num_steps_steady"]) == (150, 50)
    assert result["points"] >= 300  # also the learning rate and the speed
    assert 0 < result["seconds_steady"] < result["seconds"]
    assert result["loss"] < 0.6
    assert result["publisher_cpu_seconds"] > 0
    assert 0 < result["seconds_after_last_step"] < result["process_seconds"]


@pytest.mark.slow
def test_bare_script_logs_each_step(told, tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", x=draw.random((300, 64), np.float32), y=draw.integers(10, size=300))
    result = told("bare.py", "--data=rows.npz", "--steps=7")
    assert (result["num_steps"], result["points"]) == (7, 14)


@pytest.mark.parametrize("size", ["mlp", "cnn", "transformer"])
def test_size_rows_fit_network(size, bench):
    work = bench("work")
    given = work.parsed([f"--size={size}", "--steps=130", "--store=x"])
    assert given.import_seconds > 1  # the import time of this test's process
    inputs, targets = work.tensors(given)
    model = work.network(given)
    assert model(inputs[:3]).shape == (3, 10)
    assert targets.unique().tolist() == list(range(10))
    assert torch.equal(work.tensors(given)[0], inputs)
    assert all(map(torch.equal, work.network(given).parameters(), model.parameters()))
    rows = list(work.sampler(range(500), given))
    assert len(rows) == 130 * given.batch_size and sorted(rows[:500]) == list(range(500))


def test_the_clock_leaves_out_the_first_steps(bench, monkeypatch):
    work = bench("work")
    now = iter([10.0, 15.0, 15.5])
    clock = work.Clock(work.parsed(["--store=x"]))
    monkeypatch.setattr(work.Clock, "_now", lambda self: next(now))
    clock.tick()  # a forward pass before the training
    clock.begin()
    for _ in range(60):
        clock.tick()
    clock.end()
    assert (clock.num_steps, clock.seconds, clock.seconds_steady) == (60, 5.5, 0.5)


RESULT = {"points": 0, "loss": 1.0, "process_seconds": 9.0, "peak_memory_bytes": 2**20, "num_steps": 100}
RESULT |= {"num_steps_steady": 50, "seconds": 2.0, "seconds_steady": 1.0}


@pytest.fixture
def table(bench, monkeypatch):
    """table.py, whose peers are measured at once; the textbook loop fails. Also the measured files, steps and intervals."""
    module, measured = bench("table"), []

    def measure(file, words, threads):
        measured.append((file, words["steps"], words["log-every"]))
        if file == "textbook.py":
            raise RuntimeError("it broke")
        return RESULT

    monkeypatch.setattr(module, "measure", measure)
    return module, measured


def test_failing_peer_is_reported_others_measured(table, capsys):
    module, measured = table
    given = SimpleNamespace(steps=None, most_steps=300, device="cpu", threads=1)
    rows = [(module.LOOPS[name], every) for name in ("ours", "textbook") for every in (1, 50)]
    turn = module.turn([(module.REFERENCE, 0), *rows], "mlp", given)
    head, _, _, whole, broken, _ = module.table(rows, [turn])
    assert "it broke" in capsys.readouterr().err
    assert broken.startswith(f"| {rows[2][0].name} | every step | failed |")
    assert whole.startswith("| runner | every 50 steps | 20,000 | 20,000 to 20,000 | 1.00 |")
    assert broken.count("|") == whole.count("|") == head.count("|")
    # a slow peer that logs each step takes fewer
    assert measured == [
        ("limit.py", 2345, 0),
        *(("ours.py", 2345, every) for every in (1, 50)),
        *(("textbook.py", steps, every) for steps, every in ((300, 1), (2345, 50))),
    ]


def test_short_run_step_equals_whole(bench):
    assert bench("table").step_us({"seconds": 2.0, "seconds_steady": None, "num_steps": 4}) == 5e5


def test_rows_fit_installation_device_and_logging(bench, monkeypatch):
    table = bench("table")
    monkeypatch.setattr(table, "find_spec", lambda package: package != "lightning")
    peers = [table.LOOPS[name] for name in ("limit_compiled", "ours_graph", "textbook", "lightning")]
    cases = [(device, every) for device in ("cpu", "cuda:0") for every in (0, 1)]
    limit, graph, textbook = (peer.name for peer in peers[:3])
    assert [[peer.name for peer, _ in table.rows_of(peers, every, device)] for device, every in cases] == [
        [limit, textbook],
        [textbook],
        [limit, textbook],
        [graph, textbook],
    ]


def test_readme_rows_exist_when_measured(bench):
    table = bench("table")
    rows = [(table.LOOPS[name], every) for name in table.SHORT for every in table.SHORT_EVERY]
    turns = [{row: RESULT | {"seconds_steady": seconds, "points": 7} for row in rows} for seconds in (1.0, 3.0)]
    lines = table.short(turns)
    heads = "µs per step, every step logged | points in MLflow | µs per step, every 50 steps logged | points in MLflow"
    assert lines[0] == f"| loop | {heads} |"
    assert lines[2] == "| hand-written limit | 40,000 (20,000 to 60,000) | 7 | 40,000 (20,000 to 60,000) | 7 |"
    assert len(lines) == 2 + len(table.SHORT)
    del turns[1][rows[0]]
    assert table.short(turns) == []
