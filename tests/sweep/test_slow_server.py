"""Sweeps whose MLflow server is slow: missing information never delays the results."""

import re
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from fault_proxy import Proxy, always
from waiting import wait_for

from runner import cli
from runner.sweep.jobs import ledger
from runner.sweep.mlflow_parent import acks
from runner.tracking.ack import read_ack
from runner.tracking.publisher import Publisher

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]

SWEEP = Path("swept")
WORDS = ("-m", "model=linear", "data=synthetic", "data.num_rows=500", "device=cpu", "train.num_steps=5")
WORDS += ("sweep.batch=off", "task.plots=false", "tracking.log_model=false", "seed=1,2,3", f"hydra.sweep.dir={SWEEP}")


def test_signal_ends_the_wait_for_mlflow(own_folder, server, warm):
    words = (*WORDS, "sweep.slots.cpu=2")
    with Proxy(server.port, always("delay"), delay_seconds=1.0) as proxy:
        process = warm.command(own_folder, *words, f"tracking.uri={proxy.uri}")
        output = ""
        while "are not complete there yet" not in output:
            line = process.stdout.readline()
            assert line, output
            output += line
        assert "report   swept/report.html\n" in output and "over seeds" in output
        uploader = [child for child in psutil.Process(process.pid).children() if "runner.tracking" in child.cmdline()]
        process.send_signal(signal.SIGTERM)
        rest = process.communicate()[0]
        assert process.returncode == 143
        incomplete = r"mlflow   http://\S+  \(\d of 4 runs are incomplete.*\)\nsync     python -m runner sync swept"
        assert re.search(incomplete, rest), rest
        wait_for(lambda: not any(map(psutil.Process.is_running, uploader)))
        proxy.choose = always("pass")
        assert cli.main(["sync", "swept", f"tracking.uri={proxy.uri}"]) == 0
    assert len(found := acks(ledger.read(SWEEP.absolute()))) == 4 and all(ack.is_complete for ack in found)


def test_finished_runs_send_files_last(own_folder, server, warm):
    (untracked := warm.command(own_folder, *WORDS, "tracking.enabled=false")).communicate()
    assert untracked.returncode == 0
    jobs = [SWEEP / str(number) for number in range(3)]
    requests = []
    with (
        Proxy(server.port, lambda request: requests.append(request) or "pass") as proxy,
        Publisher.start(SWEEP, proxy.uri) as publisher,
    ):
        for job in jobs:
            publisher.follow(job)
            publisher.gone(job)
        assert publisher.finish().is_complete
    files = [bool(re.search(r"artifacts|logged-models|/outputs|runs/get\?", request.line)) for request in requests]
    assert 0 < files.count(False) <= 8 * (len(jobs) + 1), Counter(request.line for request in requests)
    for job in jobs:
        run_id = read_ack(job).run_id.encode()
        at = [number for number, request in enumerate(requests) if run_id in request.line.encode() + request.body]
        ended = next(number for number in at if "runs/update" in requests[number].line)
        assert ended < next(number for number in at if files[number])
        assert read_ack(job).is_complete
