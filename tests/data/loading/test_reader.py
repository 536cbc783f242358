"""Processes that read a Dataset: their errors, and the shared memory that they need."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from own_disks import in_its_own_disks
from torch.utils.data import Dataset
from waiting import LONGEST

from runner.data.loading import streamed
from runner.data.loading.loaders import Loading, load
from runner.data.loading.streamed import Reader, free_room
from runner.errors import Problem, RunnerError
from runner.version import PACKAGES

# Python 3.12 and later warn about forks while torch's threads run; torch's workers are made for that
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PLAN = [(1, [0, 2]), (2, [3]), (1, [0, 2])]


class Several(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("one by one")

    def __getitems__(self, indices):
        return [index * 10 for index in indices]


def read(rows, plan=PLAN, num_workers=0):
    reader = Reader(rows, num_workers=num_workers, pin_memory=False)
    found = list(reader.read(iter(plan)))
    reader.close()
    return found


def test_several_rows_are_read_in_one_call():
    assert [batch.tolist() for batch in read(Several())] == [[0, 20], [30], [0, 20]]


class Raising(Several):
    def __init__(self, error):
        self.error = error

    def __getitems__(self, indices):
        raise self.error


FAULTS = (
    Problem("data.path=a", "3.png can't be read", "a whole file"),
    Problem("data.path=a", "no 4.png", "that file"),
)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [ZeroDivisionError("row 0 is broken"), SystemExit(), RunnerError(*FAULTS)])
def test_error_of_a_row_is_raised(error, num_workers):
    reader = Reader(Raising(error), num_workers=num_workers, pin_memory=False)
    is_exit = isinstance(error, SystemExit) and num_workers  # this would end the process without a reason
    with pytest.raises(RuntimeError if is_exit else type(error)) as caught:
        next(reader.read(iter(PLAN)))
    reader.close()
    assert getattr(caught.value, "problems", FAULTS) == FAULTS
    said = {
        "ZeroDivisionError": "row 0 is broken",
        "RuntimeError": "SystemExit: it would end the program, with exit code 0",
    }
    assert said.get(type(caught.value).__name__, "") in str(caught.value)


CAN_NOT_BE_SENT = """
import multiprocessing
from torch.utils.data import Dataset
from runner.data.loading.streamed import Reader
from runner.errors import RunnerError

def make():
    class Local(Dataset):
        def __len__(self): return 4
    return Local()

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    reader = Reader(make(), num_workers=1, pin_memory=False)
    try:
        reader.read(iter([(1, [0])]))
    except RunnerError as error:
        print(error)
    reader.close()
"""


def test_dataset_that_cannot_be_pickled_is_refused(tmp_path):
    """macOS and Windows start processes by spawn, which pickles their arguments."""
    (tmp_path / "mine.py").write_text(CAN_NOT_BE_SENT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-W", "error", str(tmp_path / "mine.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    so, setting, write = done.stdout.strip().splitlines()
    assert setting == "  --> data.num_workers=1"
    assert "make.<locals>.Local" in so
    assert "use `data.num_workers=0`, or a Dataset without lambdas" in write
    assert "Got pickle error" not in done.stderr


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1024), index


def test_workers_need_shared_memory(monkeypatch):
    settings = {"batch_size": 4, "device": torch.device("cpu"), "seed": 0, "shuffle": True}
    monkeypatch.setattr("runner.data.loading.loaders.free_room", lambda: 64 * 2**20)
    batches, why = load(Rows(), Loading(), **settings)
    assert "; read in this process: /dev/shm has 64 MiB, use a larger /dev/shm (docker run --shm-size=8g)" in why
    assert batches._num_workers == 0 and load(Rows(), Loading(num_workers=2), **settings)[0]._num_workers == 2
    monkeypatch.setattr("runner.data.loading.loaders.free_room", lambda: 2**30)
    batches, why = load(Rows(), Loading(), **settings)
    assert batches._num_workers >= 1 and why == "streamed (a Dataset is read row by row)"


#: rows that grow: the first one says nothing about the size of later ones
SCRIPT = """
import torch
from torch.utils.data import Dataset
from runner.data.loading.streamed import Reader
from runner.errors import RunnerError

class Growing(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.zeros(1 + index * 2**20)

reader = Reader(Growing(), num_workers=1, pin_memory=False)
try:
    for batch in reader.read(iter([(1, [index]) for index in range(8)])):
        print(tuple(batch.shape))
except RunnerError as error:
    print(error)
reader.close()
"""


@pytest.mark.slow
def test_full_shared_memory_ends_the_run(tmp_path):
    command = in_its_own_disks()
    if command is None:
        pytest.skip("no mount namespaces for this account")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    words = f"mount -t tmpfs -o size=2m tmpfs /dev/shm && exec {sys.executable} -W ignore {tmp_path}/script.py"
    done = subprocess.run(
        [*command, "bash", "-c", words], env=environment, capture_output=True, text=True, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(1, 1)"), done.stdout
    assert done.stdout.count("--> data.num_workers=1") == 1, done.stdout
    assert done.stdout.count("no space in /dev/shm") == done.stdout.count("--shm-size") == 1


def test_free_room_leaves_out_memory_in_use(monkeypatch, tmp_path):
    found = SimpleNamespace(f_bavail=3, f_bfree=4, f_blocks=5, f_frsize=4096, f_bsize=8192)
    monkeypatch.setattr(streamed.sys, "platform", "linux")
    monkeypatch.setattr(streamed, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(streamed.os, "statvfs", lambda place: found)
    assert free_room() == 3 * 4096
    monkeypatch.setattr(streamed, "SHARED_MEMORY", tmp_path / "nowhere")
    assert free_room() is None
