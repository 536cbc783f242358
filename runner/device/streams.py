"""Gives a device's second stream, its events and its clock, so that copies overlap with steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from runner.device import torch_private
from runner.device.capabilities import ONLY_BLOCKING

#: of a fast GPU: a pause may be too long, not too short
CYCLES_A_SECOND = 2e9


def side_stream(device: torch.device) -> torch.Stream | None:
    """Return a second stream of the device, or None without streams."""
    if device.type in ONLY_BLOCKING:
        return None
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.Stream(device=device)


def use(stream: torch.Stream) -> AbstractContextManager[Any]:
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream


def current(device: torch.device) -> torch.Stream:
    return torch.cuda.current_stream(device) if device.type == "cuda" else torch.accelerator.current_stream(device)


def event(device: torch.device) -> torch.Event:
    """Return an event for which the host sleeps, if the device supports that."""
    return torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device=device, blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all of its work; the CPU is done when a call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def has_clock(device: torch.device) -> bool:
    return device.type in ("cuda", "xpu")


def time_event(device: torch.device) -> torch.Event:
    """Record an event with the time at which the device has done what is queued so far."""
    timed: torch.Event = (
        torch.cuda.Event(enable_timing=True)
        if device.type == "cuda"
        else torch.Event(device=device, enable_timing=True)
    )
    timed.record(current(device))
    return timed


def pause(device: torch.device, seconds: float) -> bool:
    """Keep the device idle for about this time, while the host queues work; return whether it can."""
    if device.type != "cuda":
        return False
    torch_private.cuda_sleep(int(seconds * CYCLES_A_SECOND))
    return True
