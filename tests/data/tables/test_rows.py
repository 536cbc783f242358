"""Rows that stay on the disk: the same as in memory, written once, and shared by processes."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from refused import problems_of
from waiting import LONGEST

from runner.config.instantiate import build
from runner.data import split as data_split
from runner.data.loading.loaders import Loading, load
from runner.data.split import fingerprint, split
from runner.data.tables import table as table_rows
from runner.data.tables.table import MappedRows, table
from runner.device import host_memory
from runner.errors import RunnerError
from runner.version import PACKAGES

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
#: the kernel counts private memory, and enforces a limit on it
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts otherwise there")


@pytest.fixture(autouse=True)
def folder(own_folder, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(own_folder / "cache"))
    draw = np.random.default_rng(0)
    lines = [f"{draw.normal():.4f},{draw.choice(['a', 'b', ''])},{draw.integers(3)}" for _ in range(500)]
    (own_folder / "t.csv").write_text("x,c,y\n" + "\n".join(lines) + "\n")
    return own_folder


def cached(folder):
    return sorted(path.name for path in (folder / "cache" / "tables").iterdir() if path.is_dir())


@pytest.mark.parametrize("settings", [{}, {"target": "x"}, {"target": "y", "kind": "regression"}])
def test_mapped_rows_equal_those_in_memory(settings):
    whole, parts = table("t.csv", **settings), table("t.csv", in_memory=False, **settings)
    assert isinstance(parts.rows, MappedRows)
    assert (parts.facts, parts.classes, parts.reader) == (whole.facts, whole.classes, whole.reader)
    splits = [split(source, val_fraction=0.2, test_fraction=0.1, limit=None, seed=3) for source in (whole, parts)]
    assert whole.around(splits[0].train) == parts.around(splits[1].train)
    loaders = [
        load(s.train, Loading(num_workers=0), batch_size=64, device=torch.device("cpu"), seed=1, shuffle=True)[0]
        for s in splits
    ]
    for one, other in zip(loaders[0].epoch(0), loaders[1].epoch(0), strict=True):
        assert torch.equal(one[0].nan_to_num(-9), other[0].nan_to_num(-9))
        assert torch.equal(one[1], other[1])


def test_single_rows_and_batches():
    rows = table("t.csv", in_memory=False).rows
    batch = rows.__getitems__([4, 2, 4])
    assert batch[0].shape == (3, 2)
    stacked = rows.collate_fn([rows[4], rows[2], rows[4]])
    assert all(torch.equal(one.nan_to_num(-9), other.nan_to_num(-9)) for one, other in zip(batch, stacked, strict=True))
    assert rows.collate_fn(batch) is batch
    batch[0].zero_()  # a copy: the file does not change
    assert rows[4][0][0] != 0


def test_pickled_rows_are_read_from_their_file():
    rows = table("t.csv", in_memory=False).rows
    rows[0]
    sent = pickle.dumps(rows)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent).__getitems__([1, 2])[1], rows.__getitems__([1, 2])[1])


@pytest.mark.parametrize("target", ["y", "x"])
def test_fingerprint_of_mapped_rows_is_the_same(folder, monkeypatch, target):
    """in_memory=auto depends on the free memory at that moment."""
    (folder / "test.csv").write_text("x,c,y\n1,a,0\n2,b,1\n")
    how = {"target": target, "test_path": "test.csv"}
    for most in (2**26, 2**10):
        monkeypatch.setattr(data_split, "FINGERPRINT_BYTES", most)  # as a whole, and in blocks
        prints = {fingerprint(table("t.csv", **how, in_memory=in_memory)) for in_memory in (True, False)}
        assert len(prints) == 1
    assert prints != {fingerprint(table("t.csv", target=target, in_memory=False))}


def test_cache_is_written_again_after_changes(folder, monkeypatch):
    first = table("t.csv", in_memory=False)
    with monkeypatch.context() as patch:
        patch.setattr("runner.data.tables.table.choose", None)  # neither read nor written again
        patch.setattr(table_rows, "_write", None)
        again = table("t.csv", in_memory=False)
    assert (again.reader, again.facts, again.rows.fingerprint) == (first.reader, first.facts, first.rows.fingerprint)
    assert len(cached(folder)) == 1
    table("t.csv", in_memory=False, max_categories=1)
    assert len(cached(folder)) == 2
    with (folder / "t.csv").open("a") as file:
        file.write("1,a,0\n")
    changed = table("t.csv", in_memory=False)
    assert len(changed.rows) == 501
    assert changed.rows.fingerprint != first.rows.fingerprint


def test_nothing_half_is_left(folder):
    (folder / "bad.csv").write_text("x,y\n" + "1,0\n2,1\n" * 50)
    (folder / "later.csv").write_text("x,y\n1,0\nnone of it,1\n")
    with pytest.raises(RunnerError):
        table("bad.csv", test_path="later.csv", in_memory=False)
    assert [name.split("-")[0] for name in cached(folder)] == ["bad"]


def test_a_folder_that_cannot_be_written_to(folder, monkeypatch, messages):
    (folder / "cache").write_text("a file")
    messages(problems_of(table, "t.csv", in_memory=False))


def test_a_disk_without_room(monkeypatch, folder, messages):
    monkeypatch.setattr(table_rows.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
    messages(problems_of(table, "t.csv", in_memory=False))
    assert cached(folder) == []


@pytest.mark.parametrize(
    ("left", "setting", "fits"),
    [(10**9, "auto", True), (4_999, "auto", False), (0, True, True), (10**12, False, False)],
)
def test_memory_decides(left, setting, fits, monkeypatch):
    monkeypatch.setattr(host_memory, "memory_left", lambda: (left, "free"))
    assert isinstance(table("t.csv", in_memory=setting).rows, tuple) is fits


@pytest.mark.parametrize(("target", "num_bytes"), [("c", 30 * 3 * 4), ("x", 30 * 2 * 4)])
def test_size_of_row_counts_its_numbers(folder, monkeypatch, target, num_bytes):
    """A class is one number, for any number of classes."""
    rows = "".join(f"{row}.5,{row}\n" for row in range(30))
    (folder / "u.csv").write_text(f"x,c\n{rows}")
    setting = []
    monkeypatch.setattr(table_rows, "fits_in_memory", lambda size: (setting.append(size) or True, "so"))
    source = table("u.csv", target=target)
    assert setting == [num_bytes] == [sum(part.nbytes for part in source.rows)]


def test_auto_maps_rows_if_memory_is_short(monkeypatch):
    monkeypatch.setattr(host_memory, "memory_left", lambda: (9_000, "left by ulimit -d"))
    source = table("t.csv")
    assert isinstance(source.rows, MappedRows)
    assert "left by ulimit -d" in source.origin
    parts = list(build(source.reader, key="reader")("t.csv"))
    assert torch.equal(torch.cat(parts).nan_to_num(-9), source.rows.__getitems__(range(500))[0].nan_to_num(-9))


def test_a_container_and_a_limit_count(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path)
    assert host_memory.memory_left() == (3000, "left to this container")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.memory_left()[0] > 3000


@LINUX
def test_a_limited_process_knows_it():
    code = (
        "import resource; from runner.device.host_memory import memory_left; import psutil, pathlib\n"
        "now = next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmData')) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (now + 5_000_000, -1)); print(*memory_left(), sep=';')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    left, whose = done.stdout.strip().split(";")
    assert whose == "left by ulimit -d"
    assert 0 < int(left) <= 5_000_000


@pytest.mark.slow
def test_jobs_that_start_together_make_it_once(folder, warm):
    code = (
        "from runner.data.tables.table import table; import runner.data.tables.table as r\n"
        "make = r._write\n"
        "def told(*a): print('made', flush=True); make(*a)\n"
        "r._write = told\n"
        "s = table('t.csv', in_memory=False); print(s.rows.fingerprint)"
    )
    jobs = [
        warm.program(
            [sys.executable, "-c", code],
            env={**ENVIRONMENT, "RUNNER_CACHE": str(folder / "cache")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [job.communicate(timeout=LONGEST)[0].split() for job in jobs]
    assert sum("made" in output for output in outputs) == 1
    assert len({output[-1] for output in outputs}) == 1
    assert len(cached(folder)) == 1


#: reads the table, trains 50 steps, and prints how much private memory it took in addition to that of the imports
TRAINED = """
import json, sys, threading
import torch, torch._dynamo, pandas, pyarrow, pyarrow.csv, pyarrow.compute, numpy as np
from runner.data.split import split
from runner.data.tables.table import table
from runner.data.loading.loaders import Loading, load
from runner.models.preprocessing import Prepared
from runner.models.mlp import MLP
from runner.config.instantiate import build

def size(name):
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith(name))

torch.set_num_threads(1)
pyarrow.set_cpu_count(1)
torch.manual_seed(0)
nn = torch.nn.Linear(2, 2); nn(torch.zeros(4, 2)).sum().backward()
before = size("RssAnon")
most, end = [0], threading.Event()
def watch():
    while not end.wait(0.01):
        most[0] = max(most[0], size("RssAnon"))
watcher = threading.Thread(target=watch); watcher.start()
try:
    source = table("big.csv", "y", in_memory=json.loads(sys.argv[1]))
    splits = split(source, val_fraction=0.1, test_fraction=0.1, limit=None, seed=0)
    around = source.around(splits.train)
    model = Prepared(MLP(source.facts["in_features"], 2, [32]), before=build(around.before, key="before"))
    optimizer = torch.optim.Adam(model.parameters())
    batches, reason = load(splits.train, Loading(num_workers=0), batch_size=256, device=torch.device("cpu"), seed=0, shuffle=True)
    losses = []
    for (inputs, targets), _ in zip(batches.epoch(0), range(50)):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    batches.close()
finally:
    end.set(); watcher.join()
print(json.dumps({"rows": splits.sizes["train"], "first": losses[0], "last": losses[-1], "grown_mib": most[0] - before}))
"""


@LINUX
@pytest.mark.slow
def test_mapped_rows_train_in_little_memory(folder, warm):
    """46 MiB of float32 would take three times that in memory, with the splits' copies.

    Pages of a mapped file are not private: the kernel can reclaim them at any time.
    """
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    draw = np.random.default_rng(0)
    values = draw.normal(size=(200_000, 60)).astype(np.float32).round(1)
    columns = {f"x{index}": values[:, index] for index in range(60)}
    pa_csv.write_csv(pa.table({**columns, "y": (values[:, 0] > 0).astype(np.int8)}), "big.csv")
    process = warm.program(
        [sys.executable, "-c", TRAINED, "false"],
        env={**ENVIRONMENT, "RUNNER_CACHE": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    told = json.loads(output)
    assert told["rows"] == 160_000
    assert told["last"] < 0.9 * told["first"]
    assert told["grown_mib"] < 92, told
