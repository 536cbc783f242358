"""What tests start (servers, ranks, runs) ends with the tests, even when those are killed by SIGKILL.

A process beside them, no child of theirs, waits for their end and then kills whatever bears their mark. On Linux; elsewhere
nothing is watched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

#: in the environment of all that a process of tests starts: that process
MARK = "RUNNER_TESTS_OF"
#: processes that stay for the tests that follow: those may find them, and none is blamed for one
STAY: set[int] = set()


def start() -> None:
    """Marks what this process starts from now on, and has it watched."""
    if sys.platform != "linux":
        return
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    me = psutil.Process()
    os.environ[MARK] = f"{me.pid}-{me.create_time()}"
    shell = '"$@" </dev/null >/dev/null 2>&1 &'
    words = [sys.executable, __file__, str(me.pid), os.environ[MARK]]
    subprocess.run(["sh", "-c", shell, "sh", *words], env=unmarked, start_new_session=True, check=True)


def _watch(pid: int, mark: str) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        tests = psutil.Process(pid)
        while f"{pid}-{tests.create_time()}" == mark and tests.is_running() and tests.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.5)
    for _ in range(3):  # one may have been about to start another
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    process.kill()
        time.sleep(0.2)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
