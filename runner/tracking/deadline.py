"""A deadline and a size limit for complete answers to MLflow's requests.

A socket's time-out is one between two bytes: a server that sends a byte every five seconds would never be late.
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests
import urllib3.connection
from mlflow.utils import request_utils

from runner.tracking.mlflow_names import TOO_LONG

MAX_BYTES = 32 << 20  # a page of 25,000 points, the largest request, has 3 MB
ADAPTER = "TCPKeepAliveHTTPAdapter"  # MLflow makes its sessions with it

_limits = threading.local()  # `seconds` of the current request in this thread; None for a download


class _Timed(io.RawIOBase):
    """Reads from a socket until a deadline. Raises: TimeoutError."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, seconds: float) -> None:
        self._raw, self._sock, self._until = raw, sock, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        seconds: float | None = getattr(_limits, "seconds", None)
        if seconds is not None:
            self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, seconds))


class _Adapter(request_utils.TCPKeepAliveHTTPAdapter):
    def send(self, request: requests.PreparedRequest, stream: bool = False, timeout: Any = None, **how: Any) -> Any:  # type: ignore[override]
        _limits.seconds = timeout if isinstance(timeout, int | float) and not stream else None
        try:
            response = super().send(request, stream=True, timeout=timeout, **how)
            if not stream:
                _read(response)
        finally:
            _limits.seconds = None
        return response


def _read(response: requests.Response) -> None:
    """Read the content as Session.send() does, up to MAX_BYTES of decoded bytes."""
    content = bytearray()
    for part in response.iter_content(1 << 16):
        content += part
        if len(content) > MAX_BYTES:
            response.close()
            raise requests.exceptions.ContentDecodingError(TOO_LONG, response=response)
    response._content = bytes(content)


@contextmanager
def deadlines() -> Iterator[None]:
    """Apply the limits to all requests of MLflow in the block, from any thread. Can be nested."""
    connection: Any = urllib3.connection.HTTPConnection
    before = request_utils.TCPKeepAliveHTTPAdapter, connection.response_class
    setattr(request_utils, ADAPTER, _Adapter)
    connection.response_class = _Response
    request_utils._cached_get_request_session.cache_clear()
    try:
        yield
    finally:
        setattr(request_utils, ADAPTER, before[0])
        connection.response_class = before[1]
        request_utils._cached_get_request_session.cache_clear()
