import threading

import pytest

from runner.background import Background


def test_jobs_run_in_order_beside_the_caller():
    background, seen = Background(), []
    for number in range(20):
        background.do(lambda number=number: seen.append((number, threading.current_thread().name)))
    background.wait()
    background.close()
    assert seen == [(number, "runner-background") for number in range(20)]


def test_the_first_error_comes_up_once_and_later_jobs_still_run():
    background, seen = Background(), []

    def fail():
        raise OSError("disk full")

    background.do(fail)
    with pytest.raises(OSError, match="disk full"):
        background.wait()
    background.do(lambda: seen.append(1))
    background.close()
    assert seen == [1]


def test_close_raises_what_nobody_has_seen_and_ends_the_thread():
    background = Background()
    background.do(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        background.close()
    assert not any(thread.name == "runner-background" for thread in threading.enumerate())
    background.close()
