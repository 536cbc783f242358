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

BENCH = Path(__file__).parent
TOLD = {
    "num_steps",
    "seconds",
    "seconds_steady",
    "num_steps_steady",
    "points",
    "loss",
    "peak_memory_bytes",
    "import_seconds",
}
#: file, required package, points per logged step
PEERS = [
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
        command = [sys.executable, str(BENCH / file), f"--store={tmp_path}/mlflow.db", *words]
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}
        streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        with warm.program(command, **streams, text=True, cwd=tmp_path, env=os.environ | quiet) as process:
            said, complained = process.communicate()
        assert process.returncode == 0, said + complained
        return json.loads(said.strip().splitlines()[-1])

    return told


@pytest.mark.slow
@pytest.mark.parametrize(("file", "package", "points"), PEERS, ids=[file for file, _, _ in PEERS])
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
    assert result["seconds"] > 0


@pytest.mark.parametrize("size", ["mlp", "cnn", "transformer"])
def test_size_rows_fit_network(size, bench):
    work = bench("work")
    asked = work.parsed([f"--size={size}", "--store=x"])
    inputs, targets = work.tensors(asked)
    model = work.network(asked)
    assert model(inputs[:3]).shape == (3, 10)
    assert targets.unique().tolist() == list(range(10))
    assert torch.equal(work.tensors(asked)[0], inputs)
    assert all(map(torch.equal, work.network(asked).parameters(), model.parameters()))


def test_epochs_are_permutations_of_requested_steps(bench):
    work = bench("work")
    asked = work.parsed(["--size=transformer", "--steps=130", "--store=x"])
    rows = list(work.sampler(range(work.NUM_MADE_ROWS), asked))
    assert len(rows) == 130 * 32
    assert sorted(rows[: work.NUM_MADE_ROWS]) == list(range(work.NUM_MADE_ROWS))


def test_imports_are_timed_from_process_start(bench):
    assert bench("work").parsed(["--store=x"]).import_seconds > 1  # the import time of this test's process


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


def result_of(**fields):
    points = {"points": 0, "loss": 1.0, "process_seconds": 9.0, "peak_memory_bytes": 2**20}
    return {**points, "num_steps": 100, "num_steps_steady": 50, **fields}


def test_table_compares_with_limit_of_turn(bench):
    table = bench("table")
    peer = table.PEERS["textbook"]
    seconds = [(1.0, 5.0), (2.0, 4.0), (4.0, 12.0)]  # of the limit and of the peer, in each turn
    turns = [
        {
            (table.REFERENCE, 0): result_of(seconds=limit + 1, seconds_steady=limit),
            (peer, 1): result_of(seconds=mine + 2, seconds_steady=mine),
        }
        for limit, mine in seconds
    ]
    head, _, line = table.table([(peer, 1)], turns)
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert cells["logged"] == "every step"
    assert cells["µs a step, median"] == "100,000"
    assert cells["lowest to highest"] == "80,000 to 240,000"
    assert cells["times the limit that logs nothing, median of the turns"] == "3.00"  # not 5 / 2
    assert cells["first steps, s"] == "2.00"


def test_failing_peer_is_reported_others_measured(bench, monkeypatch, capsys):
    table = bench("table")

    def measure(file, words, threads):
        if file == "textbook.py":
            raise RuntimeError("it broke")
        return result_of(seconds=2.0, seconds_steady=1.0)

    monkeypatch.setattr(table, "measure", measure)
    rows = [(table.PEERS[name], 50) for name in ("textbook", "ours")]
    turns = [
        table.turn(
            [(table.REFERENCE, 0), *rows], "cnn", SimpleNamespace(steps=7, most_steps=300, device="cpu", threads=1)
        )
    ]
    _, _, broken, whole = table.table(rows, turns)
    assert "it broke" in capsys.readouterr().err
    assert broken.startswith(f"| {rows[0][0].name} | every 50 steps | failed |")
    assert whole.startswith("| runner | every 50 steps | 20,000 |")
    assert broken.count("|") == whole.count("|")


def test_short_run_step_equals_whole(bench):
    assert bench("table").step_us({"seconds": 2.0, "seconds_steady": None, "num_steps": 4}) == 5e5


def test_rows_fit_installation_device_and_logging(bench, monkeypatch):
    table = bench("table")
    monkeypatch.setattr(table, "find_spec", lambda package: package != "lightning")
    peers = [table.PEERS[name] for name in ("limit_compiled", "ours_graph", "textbook", "lightning")]
    named = {
        (device, every): [peer.name for peer, _ in table.rows_of(peers, every, device)]
        for device in ("cpu", "cuda:0")
        for every in (0, 1)
    }
    limit, graph, textbook = (peer.name for peer in peers[:3])
    assert named == {
        ("cpu", 0): [limit, textbook],
        ("cpu", 1): [textbook],
        ("cuda:0", 0): [limit, textbook],
        ("cuda:0", 1): [graph, textbook],
    }


def test_each_turn_begins_with_another(bench):
    orders = bench("table").orders
    assert orders("abbc", 3) == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert orders("abcd", 2) == [["a", "b", "c", "d"], ["c", "d", "a", "b"]]
    assert orders("ab", 5)[0] == ["a", "b"]


def test_slow_peer_is_shortened(bench, monkeypatch):
    table = bench("table")
    asked = []

    def measure(file, words, threads):
        asked.append((file, words["steps"], words["log-every"]))
        return result_of(seconds=2.0, seconds_steady=1.0)

    monkeypatch.setattr(table, "measure", measure)
    given = SimpleNamespace(steps=None, most_steps=300, device="cpu", threads=1)
    rows = [(table.PEERS[name], every) for name in ("limit", "ours", "textbook") for every in (1, 0)]
    table.turn(*table.orders([(table.REFERENCE, 0), *rows], 1), "mlp", given)
    assert asked == [
        ("limit.py", 2345, 0),
        ("limit.py", 2345, 1),
        ("ours.py", 2345, 1),
        ("ours.py", 2345, 0),
        ("textbook.py", 300, 1),
        ("textbook.py", 2345, 0),
    ]
