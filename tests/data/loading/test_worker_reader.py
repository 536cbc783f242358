import os
import subprocess
import sys

import pytest
from torch.utils.data import Dataset

from runner.data.loading.streamed import Reader
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


def test_a_dataset_that_gives_several_rows_is_asked_for_them():
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


def test_a_dataset_that_can_not_be_sent_to_other_processes(tmp_path):
    """macOS and Windows start processes by spawn, which pickles their arguments."""
    (tmp_path / "mine.py").write_text(CAN_NOT_BE_SENT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    command = [sys.executable, "-W", "error", str(tmp_path / "mine.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    so, asked, write = done.stdout.strip().splitlines()
    assert asked == "  --> data.num_workers=1"
    assert "make.<locals>.Local" in so
    assert "use `data.num_workers=0`, or a Dataset without lambdas" in write
    assert "Got pickle error" not in done.stderr
