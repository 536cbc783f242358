import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

CODE = """
import subprocess, sys, time
import outlived
outlived.start()
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at environments, as Linux shows them")
def test_what_killed_tests_have_started_ends():
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, cwd=Path(__file__).parent) as tests:
        started = psutil.Process(int(tests.stdout.readline()))
        tests.kill()
    until = time.monotonic() + 60
    while started.is_running() and started.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.1)
