"""`python -m runner serve`: a real server, tested over HTTP and ended by its process id."""

import json
import signal
import socket
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from trained_runs import model_of
from waiting import LONGEST

from runner.errors import RunnerError
from runner.runs import serve as serving
from runner.training import signals

RUN = "outputs/digits/run"


def a_free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_lost_terminal_leaves_nohup_server():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.collected() as got:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_serve_on_taken_port_raises(run):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, out, err = run("serve", RUN, "--port", str(port))
    assert code == 2 and f"127.0.0.1:{port} can't be used" in err and "which is free" in err
    assert out == ""


def answers(process, port):
    """Wait for the server; fail if it ends before."""
    until = time.monotonic() + 200
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    return False


def ask(port, rows):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        json.dumps({"inputs": rows.tolist()}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LONGEST) as answer:
        return np.array(json.loads(answer.read())["predictions"])


@pytest.mark.parametrize("words", [(), ("--predictions",)])
def test_serve_exports_predictions_on_request(run, monkeypatch, words):
    def export_to(trained, form, target, *, predictions):
        raise RunnerError.of(form, f"predictions={predictions}", "")

    monkeypatch.setattr(serving, "export_to", export_to)
    assert f"predictions={bool(words)}" in run("serve", RUN, "--port", str(a_free_port()), *words)[2]


@pytest.mark.slow
def test_serve_answers_as_the_model_until_a_signal(home, warm):
    port, rows = a_free_port(), np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    with torch.no_grad():
        expected = model_of(RUN)(torch.from_numpy(rows))
    expected = expected.softmax(-1)
    before = set(Path(tempfile.gettempdir()).glob("runner-serve-*"))
    with warm.command(Path.cwd(), "serve", RUN, "--port", str(port), "--predictions") as process:
        try:
            output = ""
            while "\nask " not in output and (line := process.stdout.readline()):  # the line that users wait for, too
                output += line
            assert "\nask " in output, output
            assert answers(process, port)
            np.testing.assert_allclose(ask(port, rows), expected.numpy(), rtol=1e-4, atol=1e-5)
            assert ask(port, rows[:1]).shape == (1, 10)
            children = psutil.Process(process.pid).children(recursive=True)
            assert all(each.laddr.ip == "127.0.0.1" for child in children for each in child.net_connections("tcp"))
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=LONGEST)
        finally:
            process.kill() if process.poll() is None else None
    out = output + out
    assert process.returncode == 130 and "Traceback" not in out
    assert f"serving http://127.0.0.1:{port}/invocations" in out
    assert "probabilities by class" in out
    assert not [child for child in children if child.is_running()]
    assert set(Path(tempfile.gettempdir()).glob("runner-serve-*")) <= before
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
