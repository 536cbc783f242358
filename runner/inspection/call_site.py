"""Finds the current line of the user's code in the stack, and the module whose forward pass is running.

For findings and error messages (training/result.py).
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import numpy as np
import torch

from runner.device import layers, torch_private

UNKNOWN = "an unknown line"
_RUNNER = str(Path(__file__).parents[1])
_TOOLS = Path(_RUNNER, "tools")
#: code that only watches a step
_WATCHING = tuple(map(str, (Path(__file__).parent, _TOOLS / "plan", _TOOLS / "explain" / "not_finite.py")))
#: Hydra's frames are below each run of the command line
_HYDRA = str(Path(importlib.util.find_spec("hydra").origin or "").parent)  # type: ignore[union-attr]
#: and layers.py replaces a part of torch
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(np.__file__).parent), layers.__file__, _HYDRA, "<frozen ")
#: with Homebrew sysconfig has a link to the directory of os
_STDLIB = (sysconfig.get_path("stdlib"), str(Path(os.__file__).parent))


def frames(outermost: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frames from the innermost to `outermost`, without those of code that only watches."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is outermost or not frame.f_code.co_filename.startswith(_WATCHING):
            yield frame
        if frame is outermost:
            return
        frame = frame.f_back


def line(stack: Sequence[FrameType]) -> str:
    """Return the innermost line of the user's code, `my_models.py:42`; without one, the runner's innermost line."""
    frame = user_frame(stack)
    return UNKNOWN if frame is None else _location(frame, frame.f_lineno)


def user_frame(stack: Sequence[FrameType]) -> FrameType | None:
    """Return the frame of that line."""
    own = [frame for frame in stack if not _is_library(frame.f_code.co_filename)]
    users = [frame for frame in own if not frame.f_code.co_filename.startswith(_RUNNER)]
    return next(iter(users or own), None)


def is_own(file: str) -> bool:
    """Return whether a file is the user's: not the runner's, and not installed."""
    return not _is_library(file) and not file.startswith(_RUNNER) and "-packages" not in file and file[:1] != "<"


def is_user_code() -> bool:
    """Return whether the user's code is running, not only the runner's and libraries' code."""
    frame = user_frame(list(frames()))
    return frame is not None and not frame.f_code.co_filename.startswith(_RUNNER)


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code that raised an exception."""
    lines = dict(traceback.walk_tb(error.__traceback__))
    frame = user_frame(list(lines)[::-1])
    return UNKNOWN if frame is None else _location(frame, lines[frame])


def module(stack: Sequence[FrameType]) -> str:
    """Return the path of the innermost module whose forward pass is running, after the class of the outermost.

    Each module is in a frame of torch's `_call_impl`, so the model needs no hooks.
    """
    running = modules(stack)
    if not running:
        return ""
    inner, outer = running[0], running[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), type(inner).__name__)
    return f"{type(outer).__name__}.{path}".rstrip(".")


def modules(stack: Sequence[FrameType]) -> list[torch.nn.Module]:
    """Return the modules whose forward pass is running, the innermost first."""
    calls = (frame.f_locals.get("self") for frame in stack if frame.f_code.co_name == "_call_impl")
    return [module for module in calls if isinstance(module, torch.nn.Module)]


class Lines:
    """Finds the line of each operation of a step; in backward, the line of the operation's forward pass."""

    def __init__(self, outermost: FrameType | None = None) -> None:
        """outermost: The frame that calls what is watched; None: the first of the process."""
        self._outermost = outermost
        self._by_sequence: dict[int, tuple[str, str]] = {}

    def now(self) -> tuple[str, str]:
        """Return the line and the module of the running operation. Takes about 10 us."""
        node = torch_private.current_autograd_node()
        if node is not None and (forward := self._by_sequence.get(node._sequence_nr())):
            return forward
        stack = list(frames(self._outermost))
        here = line(stack), module(stack)
        is_in_product = any(frame.f_code is layers.OneDNNProduct.forward.__code__ for frame in stack)
        if node is None and (torch.is_grad_enabled() or is_in_product):
            self._by_sequence[torch_private.sequence_number() - 1] = here
        return here


def _location(frame: FrameType, number: int) -> str:
    path, here = Path(frame.f_code.co_filename), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path.name}:{number}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or (file.startswith(_STDLIB) and "-packages" not in file)
