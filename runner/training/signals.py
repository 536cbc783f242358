"""Turns a signal (Ctrl-C, SIGTERM, ...) into a Stop, which the loop checks after steps. For runs, other ranks and sweeps.

A thread ends the process after a second Ctrl-C or the grace period, if the caller passes a function that does so.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

#: Slurm sends SIGUSR1 some time before the end (--signal=USR1@60), a closed terminal SIGHUP
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
CLOSED = b"\0"
_listening: Stop | None = None  # receives the signals
_open: set[int] = set()  # the sockets that signals are written to


class StoppedError(Exception):
    """An evaluation was interrupted by a signal."""


class Stop:
    """The signal that asks this run to end; None: no signal."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.deadline = math.inf  # of time.monotonic()

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for the other signals, 0 without one."""
        if self.signal is None:
            return 0
        return 128 + (signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM)

    @property
    def seconds_left(self) -> float:
        """Until the process must have ended; infinite without a signal."""
        return max(0.0, self.deadline - time.monotonic())


@contextmanager
def listening(*, grace_seconds: float = math.inf, end_now: Callable[[Stop, str], Any] | None = None) -> Iterator[Stop]:
    """Turn SIGINT, SIGTERM, SIGUSR1 and SIGHUP (except under nohup) into a Stop in the block.

    Outside the main thread Python allows no handlers, and nothing is caught. A nested call yields the outer Stop.

    Args:
        end_now: Ends the process and doesn't return. A second thread calls it with the reason after a second Ctrl-C, and
            `grace_seconds` after the first signal, even if the main thread hangs in a driver. None (a notebook): a
            second Ctrl-C is a KeyboardInterrupt, and there is no deadline.
    """
    global _listening
    if _listening is not None:
        yield _listening
        return
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None and end_now is None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = stop.signal or signal.Signals(number)

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    with _handled(ask):
        _listening = stop
        try:
            with nullcontext() if end_now is None else _watching(stop, grace_seconds, end_now):
                yield stop
        finally:
            _listening = None


@contextmanager
def collected() -> Iterator[list[signal.Signals]]:
    """Collect the signals of the block in order, instead of their effect."""
    received: list[signal.Signals] = []
    with _handled(lambda number, _: received.append(signal.Signals(number))):
        yield received


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in SIGNALS if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers} if is_main else {}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def _watching(stop: Stop, grace_seconds: float, end_now: Callable[[Stop, str], Any]) -> Iterator[None]:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _open.add(writer.fileno())
    thread = threading.Thread(
        target=_watch, args=(reader, stop, grace_seconds, end_now), name="runner-signals", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _open.discard(writer.fileno())
        writer.setblocking(True)
        writer.send(CLOSED)
        thread.join()
        reader.close()
        writer.close()


def _watch(reader: socket.socket, stop: Stop, grace_seconds: float, end_now: Callable[[Stop, str], Any]) -> None:
    while True:
        reader.settimeout(None if stop.deadline == math.inf else max(stop.seconds_left, 0.001))
        try:
            received = reader.recv(64)
        except TimeoutError:
            name = stop.signal.name if stop.signal else "a signal"
            end_now(stop, f"it had not ended {grace_seconds:g} s after {name} (train.grace_seconds)")
        for number in received:
            if number == signal.SIGINT and stop.deadline < math.inf:
                end_now(stop, "by a second Ctrl-C")
            if number in SIGNALS and stop.deadline == math.inf:
                stop.signal = stop.signal or signal.Signals(number)
                stop.deadline = time.monotonic() + grace_seconds
        if CLOSED in received:
            return


def _forget_in_a_fork() -> None:
    global _listening
    _listening = None
    if _open:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_a_fork)
