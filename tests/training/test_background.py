import threading

import pytest

from runner.training import background as module
from runner.training.background import Background


def test_background_runs_jobs_in_order():
    background, seen = Background(), []
    for number in range(20):
        background.do(lambda number=number: seen.append((number, threading.current_thread().name)))
    background.wait()
    background.close()
    assert seen == [(number, "runner-background") for number in range(20)]


def test_background_first_job_runs_in_thread():
    seen = []
    background = Background(begin=lambda: seen.append(threading.current_thread().name))
    background.do(lambda: seen.append("a job"))
    background.close()
    assert seen == ["runner-background", "a job"]


def test_background_first_error_is_raised_once():
    background, seen = Background(), []

    def fail():
        raise OSError("disk full")

    background.do(fail)
    with pytest.raises(OSError, match="disk full"):
        background.wait()
    background.do(lambda: seen.append(1))
    background.close()
    assert seen == [1]


def test_background_close_raises_pending_error():
    background = Background()
    background.do(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.close()
    assert not any(thread.name == "runner-background" for thread in threading.enumerate())
    background.close()


def slow_disk():
    """A settle() that takes the waiting items and blocks until the gate opens; it notes what each call took."""
    gate, waiting, settled = threading.Event(), [], []

    def settle():
        if waiting:
            settled.append([*waiting])
            waiting.clear()
            assert gate.wait(30)

    return gate, waiting, settled, settle


def test_background_jobs_share_slow_disks_next_turn():
    gate, waiting, settled, settle = slow_disk()
    background = Background(settle)
    for number in range(200):
        background.do(lambda number=number: waiting.append(number))
    gate.set()
    background.wait()
    assert [number for turn in settled for number in turn] == list(range(200))
    assert len(settled) <= 2
    background.close()


def test_close_settles_what_is_left():
    gate, waiting, settled, settle = slow_disk()
    gate.set()
    background = Background(settle)
    background.do(lambda: waiting.append(1))
    background.close()
    assert settled == [[1]]


def test_background_settles_under_endless_jobs(monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", -1.0)
    begin, (gate, waiting, settled, settle) = threading.Event(), slow_disk()
    gate.set()
    background = Background(settle)
    background.do(begin.wait)
    for number in range(5):
        background.do(lambda number=number: waiting.append(number))
    begin.set()
    background.close()
    assert settled == [[number] for number in range(5)]


def test_background_dependent_job_waits_for_disk():
    full, waiting, seen = [True], [1], []

    def settle():
        if waiting and full[0]:
            raise OSError("disk full")
        seen.extend(waiting)
        waiting.clear()

    background = Background(settle)
    with pytest.raises(OSError, match="disk full"):
        background.do_settled(lambda: seen.append("checkpoint"))
        background.wait()
    assert seen == []
    full[0] = False
    background.do(lambda: seen.append("a window"))
    background.do_settled(lambda: seen.append("checkpoint"))
    background.close()
    assert seen == ["a window", 1], "what failed is missing before it, whatever came after"
