"""Gives a device's second stream and events, so that copies go on beside its steps; None for a device without.

For batches that are brought to the device, windows of metrics and snapshots of checkpoints; and for clocked steps, what
tells the time on the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from runner.device import torch_private
from runner.device.capabilities import ONLY_BLOCKING

#: of a second of a GPU that is faster than most: a pause is rather too long than too short
CYCLES_A_SECOND = 2e9


def side_stream(device: torch.device) -> torch.Stream | None:
    """A second stream of the device; None where it has none, or no pinned memory or events to go with it."""
    if device.type in ONLY_BLOCKING:
        return None
    if device.type == "cuda":
        return torch.cuda.Stream(device)
    try:
        torch.empty(1, pin_memory=True)
        event(device)
        return torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):  # an accelerator that has registered no such thing with torch
        return None


def use(stream: torch.Stream) -> AbstractContextManager[Any]:
    """What is launched within goes to the stream."""
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream


def current(device: torch.device) -> torch.Stream:
    """The stream that the steps are on."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else torch.accelerator.current_stream(device)


def event(device: torch.device) -> torch.Event:
    """An event that the host waits for asleep, where the device can do that."""
    return torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.Event(device=device, blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all of its work; the CPU is done when a call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def has_clock(device: torch.device) -> bool:
    """Whether its events tell the time."""
    return device.type in ("cuda", "xpu")


def time_event(device: torch.device) -> torch.Event:
    """An event that tells when the device, with a clock, got to what was queued so far."""
    timed: torch.Event = (
        torch.cuda.Event(enable_timing=True)
        if device.type == "cuda"
        else torch.Event(device=device, enable_timing=True)
    )
    timed.record(current(device))
    return timed


def pause(device: torch.device, seconds: float) -> bool:
    """Has the device do nothing for about so long, while the host queues more; False where it can't be told to."""
    if device.type != "cuda":
        return False
    torch_private.cuda_sleep(int(seconds * CYCLES_A_SECOND))
    return True
