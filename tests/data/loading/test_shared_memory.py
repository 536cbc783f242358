import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from own_disks import in_its_own_disks
from refused import problems_of
from torch.utils.data import Dataset
from waiting import LONGEST

from runner.data.loading import streamed
from runner.data.loading.loaders import Loading, load
from runner.data.loading.streamed import free_room, workers_with_room
from runner.data.map_style import STANDARD
from runner.version import PACKAGES


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1024), index


class Broken(Rows):
    def __getitem__(self, index):
        raise ZeroDivisionError


BATCH = 4 * (4096 + 8)


def with_room(workers, free, rows=None, is_set=False):
    return workers_with_room(workers, rows or Rows(), 4, STANDARD, free=free, is_set=is_set)


@pytest.mark.parametrize(("free", "most"), [(9, 4), (8, 3), (7, 3), (3, 1), (2, 0), (0, 0)])
def test_workers_fit_into_the_shared_memory(free, most):
    """Two batches of each, and the one in use."""
    workers, why = with_room(4, free * BATCH)
    assert workers == most
    assert (f"read by {most} processes" if most else "read in this process") in why or most == 4


def test_workers_without_a_limit_stay(messages):
    assert with_room(4, None) == with_room(4, 0, rows=Broken()) == (4, "")
    assert with_room(0, 0, is_set=True) == (0, "")
    messages(problems_of(with_room, 4, 5 * BATCH, is_set=True))


def test_the_loader_says_that_there_is_no_room(monkeypatch):
    monkeypatch.setattr("runner.data.loading.loaders.free_room", lambda: 8192)
    settings = {"batch_size": 4, "device": torch.device("cpu"), "seed": 0}
    batches, why = load(Rows(), Loading(), **settings, shuffle=False)
    assert "read row by row); read in this process: /dev/shm has 0.0 MiB free" in why and batches._num_workers == 0


#: rows that grow: the first tells nothing of the later ones
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
def test_no_room_in_the_midst_of_it_is_told_and_nothing_stands_still(tmp_path):
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


def test_what_others_have_taken_of_it_is_not_free(monkeypatch, tmp_path):
    found = SimpleNamespace(f_bavail=3, f_bfree=4, f_blocks=5, f_frsize=4096, f_bsize=8192)
    monkeypatch.setattr(streamed.sys, "platform", "linux")
    monkeypatch.setattr(streamed, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(streamed.os, "statvfs", lambda place: found)
    assert free_room() == 3 * 4096
    monkeypatch.setattr(streamed, "SHARED_MEMORY", tmp_path / "nowhere")
    assert free_room() is None
