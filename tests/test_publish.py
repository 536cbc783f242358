import os
import threading
import time

import pytest

from runner import publish
from runner.publish import Line, follow


@pytest.fixture
def pipe():
    read, write = os.pipe()
    open_ends = {read, write}

    class Pipe:
        def line(self, grace_seconds=0.0):
            return Line(read, grace_seconds=grace_seconds)

        def say(self, words):
            os.write(write, words)

        def close(self):
            open_ends.discard(write)
            os.close(write)

    yield Pipe()
    if write in open_ends:
        os.close(write)
    for thread in threading.enumerate():
        if thread.name == "runner-line":
            thread.join(5)
            assert not thread.is_alive()
    os.close(read)


class Store:
    """An uploader that needs no store: a journal of numbers, and how each attempt goes."""

    def __init__(self, *goes, has_run=True, wants_model=False):
        self.goes, self._has_run, self.wants_model = list(goes), has_run, wants_model
        self.attempts, self.postponed, self.abandoned, self.samples = 0, [], 0, 0
        self.ack = self
        self.offset = 0

    def has_run(self):
        return self._has_run

    def attempt(self, *, postponed):
        self.attempts += 1
        self.postponed.append(postponed)
        went = self.goes.pop(0) if self.goes else True
        self.offset += went is True
        return went is True

    def abandon(self):
        self.abandoned += 1
        return True

    def sample(self):
        self.samples += 1


def never():
    raise AssertionError("nothing to warm up for")


def wait_for(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_it_looks_when_it_is_told_and_ends_with_the_training(pipe, monkeypatch):
    monkeypatch.setattr(publish, "LOOK_SECONDS", 60.0)
    store, codes = Store(), []
    line = pipe.line()
    thread = threading.Thread(target=lambda: codes.append(follow(store, line, warm_up=never)))
    thread.start()
    for attempts in (1, 2, 3):
        wait_for(lambda attempts=attempts: store.attempts == attempts)
        pipe.say(b"\n")
    wait_for(lambda: store.attempts == 4)
    pipe.close()
    thread.join(10)
    assert codes == [0] and store.abandoned == 1 and store.samples == 4
    assert store.postponed == [False, False, False, False, True]


def test_it_looks_by_itself_too(pipe, monkeypatch):
    monkeypatch.setattr(publish, "LOOK_SECONDS", 0.01)
    store, line = Store(), pipe.line()
    thread = threading.Thread(target=lambda: follow(store, line, warm_up=never))
    thread.start()
    wait_for(lambda: store.attempts >= 5)
    pipe.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_goodbye_is_an_end_even_while_a_copy_of_the_pipe_stays_open(pipe):
    line = pipe.line(grace_seconds=10)
    pipe.say(b"\n\nbye 2.5\n")
    assert follow(Store(), line, warm_up=never) == 0
    assert line.grace_seconds == 2.5 and line.closed_at is not None


def test_a_goodbye_without_a_number_keeps_the_grace(pipe):
    line = pipe.line(grace_seconds=7)
    pipe.say(b"by")
    pipe.say(b"e\n")
    assert follow(Store(), line, warm_up=never) == 0 and line.grace_seconds == 7


def test_a_store_that_does_not_answer_is_given_up_after_the_grace(pipe):
    line = pipe.line(grace_seconds=0.3)
    pipe.close()
    store, began = Store(*[False] * 1000), time.monotonic()
    assert follow(store, line, warm_up=never) == 3
    assert 0.3 < time.monotonic() - began < 5 and store.attempts > 2 and store.abandoned == 0


def test_progress_renews_the_grace(pipe, monkeypatch):
    monkeypatch.setattr(publish, "LOOK_SECONDS", 0.01)
    line = pipe.line(grace_seconds=0.5)
    pipe.close()
    store = Store(*[False, False, True] * 5)
    store.abandon = lambda: not store.goes  # the end does not get through either, before the last
    began = time.monotonic()
    assert follow(store, line, warm_up=never) == 0
    assert time.monotonic() - began > 0.5 and store.attempts == 15


def test_a_training_that_never_began_leaves_nothing(pipe):
    line = pipe.line()
    pipe.close()
    store = Store(has_run=False)
    assert follow(store, line, warm_up=never) == 0 and store.attempts == 0


def test_wakes_do_not_hurry_a_store_that_does_not_answer(pipe):
    store, line = Store(*[False] * 1000), pipe.line(grace_seconds=0.0)
    thread = threading.Thread(target=lambda: follow(store, line, warm_up=never))
    thread.start()
    for _ in range(200):
        pipe.say(b"\n")
        time.sleep(0.001)
    attempts = store.attempts
    pipe.close()
    thread.join(10)
    assert attempts <= 4  # at 0, 0.2, 0.6, 1.4 s


def test_it_warms_up_once_when_there_is_nothing_else_to_do(pipe, monkeypatch):
    monkeypatch.setattr(publish, "WARM_UP_AFTER_SECONDS", 0)
    line, warm = pipe.line(), []

    def warm_up():
        warm.append(store.attempts)
        pipe.close()

    store = Store(False, True, wants_model=True)
    assert follow(store, line, warm_up=warm_up) == 0
    assert warm == [2]


def test_what_is_written_is_masked(capsys, monkeypatch):
    import sys

    masked = publish._Masked(sys.stdout, lambda text: text.replace("secret", "***"))
    print("a secret", file=masked, flush=True)
    assert capsys.readouterr().out == "a ***\n" and masked.fileno


def test_it_rests_between_two_sendings_until_the_training_is_over(pipe):
    line = pipe.line()
    began = time.monotonic()
    line.rest(0.02)
    assert time.monotonic() - began >= 0.02 * publish.RESTS_PER_WORK
    pipe.close()
    line.rest(60)
    assert time.monotonic() - began < 60
