"""A server of one thread a connection that answers whatever a test's function sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


class OddServer:
    """`answer` gets the connection and the request's first line; `lines` are those of all requests."""

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
        """A byte each so many seconds, until somebody has enough."""
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
            while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows is the answer's to read
                byte = near.recv(1)
                if not byte:
                    return
                head += byte
            self.lines.append(head.split(b"\r\n")[0].decode())
            self._answer(self, near)
