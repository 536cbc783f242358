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
from runner.data.loading.streamed import bytes_of_a_batch, free_room, most_workers, with_room
from runner.errors import RunnerError
from runner.version import PACKAGES

MIB = 2**20


@pytest.mark.parametrize(
    ("free", "batch", "most"),
    [(0, 1, 0), (5, 1, 2), (4, 1, 1), (3, 1, 1), (2, 1, 0), (64 * MIB, 10 * MIB, 2), (9, 0, 4)],
)
def test_there_is_room_for_what_each_reads_ahead_and_the_one_in_use(free, batch, most):
    assert most_workers(free, batch, prefetch=2) == most


def test_fewer_processes_read_and_it_is_said_why():
    assert with_room(4, MIB, 64 * MIB, is_asked=False) == (4, "")
    assert with_room(4, MIB, None, is_asked=True) == (4, "")
    assert with_room(0, MIB, 0, is_asked=True) == (0, "")
    workers, why = with_room(4, MIB, 6 * MIB, is_asked=False)
    assert workers == 2 and why.startswith("; read by 2 processes: /dev/shm has 6.0 MiB free")
    workers, why = with_room(4, MIB, MIB, is_asked=False)
    assert workers == 0 and "read in this process" in why and "for 4 processes take 9.0 MiB" in why


def test_a_number_that_was_asked_for_is_refused(messages):
    messages(problems_of(with_room, 4, MIB, 6 * MIB, is_asked=True))


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(1024), index


class Broken(Rows):
    def __getitem__(self, index):
        raise ZeroDivisionError


def test_a_batchs_bytes_are_those_of_its_rows():
    assert bytes_of_a_batch({"x": torch.zeros(8, 256)}, 4) == 4096
    assert bytes_of_a_batch(Rows(), 4) == 4 * (4096 + 8)
    assert bytes_of_a_batch(Broken(), 4) == 0


def test_the_loader_says_that_there_is_no_room(monkeypatch):
    monkeypatch.setattr("runner.data.loading.loaders.free_room", lambda: 8192)
    settings = {"batch_size": 4, "device": torch.device("cpu"), "seed": 0}
    batches, why = load(Rows(), Loading(), **settings, shuffle=False)
    assert "read row by row); read in this process: /dev/shm has 0.0 MiB free" in why and batches._num_workers == 0
    with pytest.raises(RunnerError, match=r"data\.num_workers=2"):
        load(Rows(), Loading(num_workers=2), **settings, shuffle=False)


#: rows that grow: the first tells nothing of the later ones
SCRIPT = """
import torch
from torch.utils.data import Dataset
from runner.data.loading.streamed import Reader
from runner.errors import RunnerError

class Growing(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.zeros(1 + index * 2**20)

for rows in (Growing(), torch.zeros(8, 2**20)):
    reader = Reader(rows, num_workers=1, pin_memory=False)
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
    assert done.stdout.count("--> data.num_workers=1") == 2, done.stdout
    assert done.stdout.count("no space in /dev/shm") == done.stdout.count("--shm-size") == 2


def test_what_others_have_taken_of_it_is_not_free(monkeypatch, tmp_path):
    found = SimpleNamespace(f_bavail=3, f_bfree=4, f_blocks=5, f_frsize=4096, f_bsize=8192)
    monkeypatch.setattr(streamed.sys, "platform", "linux")
    monkeypatch.setattr(streamed, "PLACE", tmp_path)
    monkeypatch.setattr(streamed.os, "statvfs", lambda place: found)
    assert free_room() == 3 * 4096
    monkeypatch.setattr(streamed, "PLACE", tmp_path / "nowhere")
    assert free_room() is None
