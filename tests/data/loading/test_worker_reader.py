import multiprocessing
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from runner.data.loading.streamed import Reader
from runner.errors import Problem, RunnerError
from runner.version import PACKAGES

# Python 3.12 and later warn of forks beside torch's own threads; torch's workers are made for that
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PLAN = [(1, [0, 2]), (2, [3]), (1, [0, 2])]


class Drawing(Dataset):
    """Rows with three random numbers each."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(1), np.random.rand(), random.random()


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


def test_a_dataset_that_gives_several_rows_is_asked_for_them():
    assert [batch.tolist() for batch in read(Several())] == [[0, 20], [30], [0, 20]]


def plain(batches):
    return [[part.flatten().tolist() for part in batch] for batch in batches]


def test_what_rows_draw_depends_on_the_batch_alone():
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    here = plain(read(Drawing()))
    assert here[0] == here[2], "the same seed draws the same"
    assert here[0][1:] != here[1][1:]
    assert len(set(here[0][1])) == 2, "two rows of a batch draw apart"
    random.seed(6), np.random.seed(6), torch.manual_seed(6)
    assert plain(read(Drawing(), num_workers=2)) == here
    assert plain(read(Drawing(), PLAN[1:])) == here[1:]


def test_reading_leaves_the_runs_random_numbers_alone():
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = random.random(), np.random.rand(), torch.rand(1)
    for num_workers in (0, 2):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        read(Drawing(), num_workers=num_workers)
        assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_processes_stay_from_plan_to_plan():
    class Process(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.utils.data.get_worker_info().id, os.getpid()

    reader = Reader(Process(), num_workers=2, pin_memory=False)
    ids = [{int(pid) for _, pids in reader.read(iter(PLAN)) for pid in pids} for _ in range(3)]
    assert len(ids[0]) == 2
    assert ids[0] == ids[1] == ids[2]
    reader.close()
    assert not multiprocessing.active_children()


def test_processes_end_also_in_the_middle_of_a_plan():
    reader = Reader(Several(), num_workers=2, pin_memory=False)
    assert len(next(reader.read(iter(PLAN * 20)))) == 2
    reader.close()
    reader.close()
    assert not multiprocessing.active_children()


class Broken(Drawing):
    def __getitem__(self, index):
        raise ZeroDivisionError("row 0 is broken")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_a_row_is_told_where_it_is_read(num_workers):
    reader = Reader(Broken(), num_workers=num_workers, pin_memory=False)
    with pytest.raises(ZeroDivisionError, match="row 0 is broken"):
        next(reader.read(iter(PLAN)))
    reader.close()


class Ending(Drawing):
    def __getitem__(self, index):
        raise SystemExit


@pytest.mark.parametrize(("num_workers", "told"), [(0, SystemExit), (1, RuntimeError)])
def test_a_row_that_ends_the_program_is_told(num_workers, told):
    reader = Reader(Ending(), num_workers=num_workers, pin_memory=False)
    with pytest.raises(told) as caught:
        next(reader.read(iter(PLAN)))
    reader.close()
    assert not num_workers or "SystemExit: it would end the program, with exit code 0" in str(caught.value)


FAULTS = (
    Problem("data.path=a", "3.png can't be read", "a whole file"),
    Problem("data.path=a", "no 4.png", "that file"),
)


class Faulty(Drawing):
    def __getitem__(self, index):
        raise RunnerError(*FAULTS)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_problems_of_a_row_are_those_that_were_found(num_workers):
    reader = Reader(Faulty(), num_workers=num_workers, pin_memory=False)
    with pytest.raises(RunnerError) as caught:
        next(reader.read(iter(PLAN)))
    reader.close()
    assert caught.value.problems == FAULTS


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


def test_a_dataset_that_can_not_be_sent_to_other_processes(tmp_path):
    """macOS and Windows start processes by spawn, which pickles what they get."""
    (tmp_path / "mine.py").write_text(CAN_NOT_BE_SENT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-W", "error", str(tmp_path / "mine.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    so, asked, write = done.stdout.strip().splitlines()
    assert asked == "  --> data.num_workers=1"
    assert "make.<locals>.Local" in so
    assert "use `data.num_workers=0`, or a Dataset without lambdas" in write
    assert "Got pickle error" not in done.stderr
