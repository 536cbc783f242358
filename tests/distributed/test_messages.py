"""Final messages of processes that failed."""

import pytest

from runner.distributed import messages
from runner.errors import Problem

FAULT = Problem("data.path=a.csv", "there is no such file", "data.path=FILE.csv")


@pytest.fixture
def attempt(monkeypatch):
    return lambda number: monkeypatch.setenv(messages.RESTARTS, str(number))


def test_the_first_words_count(tmp_path, attempt):
    attempt(0)
    messages.record(tmp_path, 1, "ValueError: mine")
    messages.record(tmp_path, 1, "what came of it")
    messages.record(tmp_path, 0, "another one")
    assert (messages.first_failure(tmp_path).rank, messages.first_failure(tmp_path).text) == (1, "ValueError: mine")


def test_one_that_misses_another_knows_less_than_that_other(tmp_path, attempt):
    attempt(0)
    messages.record(tmp_path, 0, messages.LOST)
    messages.record(tmp_path, 1, "ValueError: mine")
    assert messages.first_failure(tmp_path).text == "ValueError: mine"


def test_an_attempt_has_words_of_its_own(tmp_path, attempt):
    attempt(0)
    messages.record(tmp_path, 1, "the first time")
    attempt(1)
    assert messages.first_failure(tmp_path) is None
    assert messages.first_failure(tmp_path, of=0).text == "the first time"


def test_problem_of_two_ranks_is_reported_once(tmp_path, attempt):
    attempt(0)
    messages.record(tmp_path, 0, str(FAULT), problems=[FAULT])
    messages.record(tmp_path, 1, str(FAULT), problems=[FAULT])
    assert messages.problems_of(tmp_path) == [FAULT]
