"""Finds the current line of the user's code in the stack, and the module whose forward pass is running.

For findings and error messages (training/result.py). Lines keeps where each operation was written, for its backward pass.
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
#: what only looks at a step
_WATCHING = tuple(map(str, (Path(__file__).parent, _TOOLS / "plan", _TOOLS / "explain" / "not_finite.py")))
#: hydra's frames are below each run of the command line
_HYDRA = str(Path(importlib.util.find_spec("hydra").origin or "").parent)  # type: ignore[union-attr]
#: and layers.py replaces a part of torch
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(np.__file__).parent), layers.__file__, _HYDRA, "<frozen ")
#: Homebrew's paths lead over a link to what os says
_STDLIB = (sysconfig.get_path("stdlib"), str(Path(os.__file__).parent))


def frames(outermost: FrameType | None = None) -> Iterator[FrameType]:
    """From the innermost frame out to `outermost`, without those that only look."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is outermost or not frame.f_code.co_filename.startswith(_WATCHING):
            yield frame
        if frame is outermost:
            return
        frame = frame.f_back


def line(stack: Sequence[FrameType]) -> str:
    """The innermost line that is neither a library's nor the runner's, `my_models.py:42`; else the runner's innermost."""
    frame = user_frame(stack)
    return UNKNOWN if frame is None else _place(frame, frame.f_lineno)


def user_frame(stack: Sequence[FrameType]) -> FrameType | None:
    """The frame of that line."""
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
    return UNKNOWN if frame is None else _place(frame, lines[frame])


def module(stack: Sequence[FrameType]) -> str:
    """The path of the innermost module whose forward pass is under way, led by the class of the outermost.

    Read off the stack, where torch's `_call_impl` holds each module: so nothing has to be hooked into the model.
    """
    running = modules(stack)
    if not running:
        return ""
    inner, outer = running[0], running[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), type(inner).__name__)
    return f"{type(outer).__name__}.{path}".rstrip(".")


def modules(stack: Sequence[FrameType]) -> list[torch.nn.Module]:
    """The modules whose forward pass is under way, the innermost first."""
    calls = (frame.f_locals.get("self") for frame in stack if frame.f_code.co_name == "_call_impl")
    return [module for module in calls if isinstance(module, torch.nn.Module)]


class Lines:
    """Where each operation of a step was written; in backward, the line of the forward pass that it belongs to."""

    def __init__(self, outermost: FrameType | None = None) -> None:
        """outermost: the frame that calls what is watched; None: the first of the process."""
        self._outermost = outermost
        self._by_sequence: dict[int, tuple[str, str]] = {}

    def now(self) -> tuple[str, str]:
        """The line and the module of the operation under way. Some 10 us."""
        node = torch_private.current_autograd_node()
        if node is not None:
            forward = self._by_sequence.get(node._sequence_nr())
            if forward is not None:
                return forward
        stack = list(frames(self._outermost))
        here = line(stack), module(stack)
        is_in_product = any(frame.f_code is layers.OneDNNProduct.forward.__code__ for frame in stack)
        if node is None and (torch.is_grad_enabled() or is_in_product):
            self._by_sequence[torch_private.sequence_number() - 1] = here
        return here


def _place(frame: FrameType, number: int) -> str:
    path, here = Path(frame.f_code.co_filename), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path.name}:{number}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or (file.startswith(_STDLIB) and "-packages" not in file)
