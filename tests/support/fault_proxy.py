"""A real `mlflow server`, and a proxy in front of it that disturbs requests on a test's schedule."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: the faults of a request. drop: cut before the server receives it; lost: cut after the server has answered; delay: the
#: answer is late; slow: it arrives byte by byte; 500, 503: an error without the server; forbid: 403;
#: unknown: 404 in HTML, as MLflow 2.22 answers requests that only MLflow 3 supports
FAULTS = ("drop", "lost", "delay", "slow", "500", "503")
DELAY_SECONDS = 0.3
TRICKLE_SECONDS = 0.0002  # per byte


@dataclass(frozen=True)
class Request:
    """A request on its way to the server."""

    line: str  # "POST /api/2.0/mlflow/runs/log-batch HTTP/1.1"
    head: bytes
    body: bytes


Choose = Callable[[Request], str]


def at_random(seed: int, *faults: str, share: float) -> Choose:
    """Return one of these faults for this share of the requests, the same for the same seed and order of requests."""
    draw, turn = random.Random(seed), threading.Lock()

    def choose(request: Request) -> str:
        with turn:
            return draw.choice(faults) if draw.random() < share else "pass"

    return choose


def always(fault: str) -> Choose:
    return lambda request: fault


class Server:
    """An MLflow server over a sqlite store, always on the same port. start_process: subprocess.Popen, or a compatible function."""

    def __init__(self, folder: Path, start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self.folder, self._start_process = folder, start_process
        self.store = f"sqlite:///{folder}/mlflow.db"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        artifacts = ["--artifacts-destination", str(self.folder / "artifacts")]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        stores = ["--backend-store-uri", self.store, *artifacts]
        with (self.folder / "server.log").open("ab") as log:
            self._process = self._start_process(
                [sys.executable, "-W", "ignore", "-m", "mlflow", "server", *stores, *place],
                stdout=log,
                stderr=log,
                # four processes that no test needs
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                start_new_session=True,
            )
        limit = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                assert answer.read() == b"OK"
                return
            assert time.monotonic() < limit and self._process.poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # the server and its workers: it leads the session
            self._process.wait()
            self._process = None


class Proxy:
    """Forwards one request per connection to the server's port. `met` counts the faults; `choose` may be changed at any time."""

    def __init__(
        self, port: int, choose: Choose = lambda request: "pass", *, delay_seconds: float = DELAY_SECONDS
    ) -> None:
        self.choose = choose
        self.met: Counter[str] = Counter()
        self._to, self._delay_seconds = port, delay_seconds
        self._ends = threading.Event()
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1", 0))
        self._address = self._listener.getsockname()
        self.uri = f"http://127.0.0.1:{self._address[1]}"
        self._threads = [threading.Thread(target=self._serve, name="fault-proxy")]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(30)
        self.go_down()

    def go_down(self) -> None:
        """Refuse connections from now on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def come_up(self) -> None:
        self._listener = socket.create_server(self._address)

    def _serve(self) -> None:
        while not self._ends.is_set():
            listener = self._listener
            try:
                if listener is None or not select.select([listener], [], [], 0.05)[0]:
                    self._ends.wait(0.0 if listener else 0.02)
                    continue
                near, _ = listener.accept()
            except (OSError, ValueError):  # closed in the meantime
                continue
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._carry, args=(near,), name="fault-proxy"))
            self._threads[-1].start()

    def _carry(self, near: socket.socket) -> None:
        near.settimeout(30)
        with near, contextlib.suppress(OSError):
            request = _read(near)
            if request is None:
                return
            fault = self.choose(request)
            self.met[fault] += 1
            if fault == "drop":
                return
            if fault in _ANSWERS:
                near.sendall(_ANSWERS[fault])
                return
            answer = self._ask(request)
            if fault == "delay":
                self._ends.wait(self._delay_seconds)
            if fault == "slow":
                for byte in answer:
                    near.sendall(bytes([byte]))
                    self._ends.wait(TRICKLE_SECONDS)
            elif fault != "lost":
                near.sendall(answer)

    def _ask(self, request: Request) -> bytes:
        with socket.create_connection(("127.0.0.1", self._to), timeout=600) as far:
            far.sendall(request.head + request.body)
            answer = b""
            while chunk := far.recv(1 << 16):
                answer += chunk
        return answer


def _read(near: socket.socket) -> Request | None:
    """Return the whole request, changed to be the only one on the connection; None if there is no request."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (chunk := near.recv(1 << 16)):
            return None
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    given = {name.strip().lower(): value.strip() for name, _, value in (field.partition(b":") for field in fields)}
    length, chunked = int(given.get(b"content-length", b"0")), b"transfer-encoding" in given
    while len(body) < length or (chunked and not body.endswith(b"0\r\n\r\n")):
        if not (chunk := near.recv(1 << 16)):
            return None
        body += chunk
    kept = [field for field in fields if not field.lower().startswith((b"connection:", b"keep-alive:"))]
    return Request(line.decode(), b"\r\n".join([line, *kept, b"Connection: close", b"", b""]), body)


def _answer(status: str, kind: str, body: str) -> bytes:
    fields = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return f"HTTP/1.1 {status}\r\n{fields}{body}".encode()


def _json(**fields: str) -> tuple[str, str]:
    return "application/json", json.dumps(fields)


_ANSWERS = {
    "unknown": _answer("404 NOT FOUND", "text/html; charset=utf-8", "<!doctype html>\n<title>404 Not Found</title>\n"),
    "500": _answer("500 Internal Server Error", *_json(error_code="INTERNAL_ERROR", message="something broke")),
    "503": _answer("503 Service Unavailable", "text/plain", "busy"),
    "forbid": _answer("403 Forbidden", *_json(error_code="PERMISSION_DENIED", message="Permission denied")),
}
