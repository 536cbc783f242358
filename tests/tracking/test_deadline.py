"""Servers whose answers never end are treated like silent ones."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable

import pytest

from runner.tracking import mlflow_store
from runner.tracking.journal import Journal
from runner.tracking.publisher import Publisher
from runner.tracking.sync import sync

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


class OddServer:
    """A server with a thread per connection. `answer(server, connection)` responds; `lines` are the requests' first lines."""

    def __init__(self, answer: Callable[[OddServer, socket.socket], None]) -> None:
        self.lines: list[str] = []
        self.ends = threading.Event()
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, name="odd-server")]
        self._threads[0].start()

    def __enter__(self) -> OddServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.ends.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)

    def trickle(self, near: socket.socket, data: bytes, *, seconds: float) -> None:
        """Send one byte every `seconds`, until the server ends."""
        for byte in data:
            near.sendall(bytes([byte]))
            if self.ends.wait(seconds):
                return

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while not self.ends.is_set():
                near, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._talk, args=(near,), name="odd-server"))
                self._threads[-1].start()

    def _talk(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            near.settimeout(30)
            head = b""
            while not head.endswith(b"\r\n\r\n"):  # byte by byte: the answer reads what follows
                byte = near.recv(1)
                if not byte:
                    return
                head += byte
            self.lines.append(head.split(b"\r\n")[0].decode())
            self._answer(self, near)


@pytest.fixture
def run(folder, write, monkeypatch):
    monkeypatch.setenv(mlflow_store.TIMEOUT, "1")
    with Journal(folder) as journal:
        write.start(journal)
        write.rows(journal, 1, 5)
        write.end(journal)
    return folder


def trickle_body(server, near):
    near.sendall(HEAD % 100_000)
    server.trickle(near, b" " * 100_000, seconds=0.2)


def trickle_head(server, near):
    server.trickle(near, HEAD % 2 + b"{}" * 1000, seconds=0.2)


@pytest.mark.parametrize("answer", [trickle_body, trickle_head])
def test_answer_byte_by_byte_times_out(run, answer):
    with OddServer(answer) as server:  # 20,000 s, or 400 s
        ack = sync(run, server.uri, grace_seconds=0.5)
        assert ack.error == f"{server.uri} does not answer in time" and ack.points_pending == 10
    assert len(server.lines) == 1


def test_huge_answer_is_read_to_the_limit(run):
    sent = 0

    def blanks(server, near):
        nonlocal sent
        near.sendall(HEAD % (300 << 20))
        for _ in range(300):
            near.sendall(b" " * (1 << 20))
            sent += 1

    with OddServer(blanks) as server:
        ack = sync(run, server.uri, grace_seconds=0.0)
        assert ack.error == f"{server.uri} sent an answer of more than 32 MiB: it is not an MLflow server"
    assert 32 <= sent < 64


@pytest.mark.usefixtures("warm_programs")
def test_run_end_waits_one_request_and_grace(run):
    with OddServer(trickle_body) as server, Publisher.start(run, server.uri, grace_seconds=1) as publisher:
        ack = publisher.finish()
        assert publisher._process.returncode == 3
    assert ack.error == f"{server.uri} does not answer in time" and ack.points_pending == 10


def test_file_transfer_in_progress_has_no_deadline():
    def slowly(server, near):
        if server.lines[-1].startswith("PUT"):
            left = 16 << 20
            while left and (chunk := near.recv(min(left, 1 << 19))):
                left -= len(chunk)
                # 10 MiB per second: the data in socket buffers is transferred quickly
                server.ends.wait(0.05 * len(chunk) / (1 << 19))
            near.sendall(HEAD % 2 + b"{}")
        else:
            near.sendall(HEAD % 20)
            server.trickle(near, b"x" * 20, seconds=0.1)

    with mlflow_store.settings(), OddServer(slowly) as server:
        from mlflow.utils.request_utils import cloud_storage_http_request as ask

        began = time.monotonic()
        put = ask("put", f"{server.uri}/file", data=io.BytesIO(b"x" * (16 << 20)), timeout=1)
        assert put.json() == {} and time.monotonic() - began > 1.5
        with ask("get", f"{server.uri}/file", stream=True, timeout=1) as got:
            assert b"".join(got.iter_content(8)) == b"x" * 20


def test_settings_restore_the_session_of_mlflow():
    from mlflow.utils import request_utils

    before = request_utils.TCPKeepAliveHTTPAdapter
    with mlflow_store.settings():
        with mlflow_store.settings():
            pass
        assert request_utils.TCPKeepAliveHTTPAdapter is not before
    assert request_utils.TCPKeepAliveHTTPAdapter is before


@pytest.mark.parametrize("body", [b"{}", b""])
def test_server_without_ids_gets_few_requests(run, body):
    def agree(server, near):
        near.sendall(HEAD % len(body) + body)

    with OddServer(agree) as server:
        ack = sync(run, server.uri, grace_seconds=0.5)
        assert "without an id of the experiment digits: is it an MLflow server?" in ack.error
        assert ack.run_id is None and ack.points_pending == 10 and len(server.lines) < 10, server.lines
