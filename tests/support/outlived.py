"""Processes that tests start (servers, ranks, runs) end with the tests, even if SIGKILL ends the tests.

A watching process that is not a child of the tests waits for their end, and then kills every process with their mark. Only on
Linux.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil

#: in the environment of every process that a test process starts: that process
MARK = "RUNNER_TESTS_OF"
#: processes that remain for later tests, and are not reported as leaks
STAY: set[int] = set()


def start() -> None:
    """Mark the processes that this process starts from now on, and start the watching process."""
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
    for _ in range(3):  # a process may be starting another one
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    process.kill()
        time.sleep(0.2)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
