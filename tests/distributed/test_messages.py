"""Final messages of processes that failed."""

import pytest

from runner.distributed import messages
from runner.errors import Problem

FAULT = Problem("data.path=a.csv", "there is no such file", "data.path=FILE.csv")


@pytest.fixture
def attempt(monkeypatch):
    return lambda number: monkeypatch.setenv(messages.RESTARTS, str(number))


def test_first_failure_is_an_attempts_first_cause(tmp_path, attempt):
    attempt(0)
    messages.record(tmp_path, 2, messages.LOST)
    messages.record(tmp_path, 1, "ValueError: mine")
    messages.record(tmp_path, 1, "a consequence")
    messages.record(tmp_path, 0, "another one")
    failure = messages.first_failure(tmp_path)
    assert (failure.rank, failure.text) == (1, "ValueError: mine")
    attempt(1)
    assert messages.first_failure(tmp_path) is None
    assert messages.first_failure(tmp_path, of=0) == failure


def test_problem_of_two_ranks_is_reported_once(tmp_path, attempt):
    attempt(0)
    messages.record(tmp_path, 0, str(FAULT), problems=[FAULT])
    messages.record(tmp_path, 1, str(FAULT), problems=[FAULT])
    assert messages.problems_of(tmp_path) == [FAULT]
