"""Gives a value for a tensor without numbers that the program reads, and reports where it reads one.

1 stands for a number, and for the truth whatever is usual: all() is true, any() and isnan() are not. `decides` says that
the program goes one way or another by the value (bool(tensor), int(tensor), nonzero()); what it does with a float it has
read, with tolist() or with numpy's arrays is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.inspection import call_site
from runner.inspection.host_reads import READING_CALLS

aten = torch.ops.aten

#: calls that turn a value into a number, a size or a choice of Python's own
DECIDING_CALLS = ("__bool__", "__int__", "__index__", "__contains__", "is_nonzero", "equal", "allclose")
#: results whose truth is what is usual, and that truth
USUAL = {aten.all: True, aten.any: False, aten.isnan: False, aten.isinf: False}
BACKWARD_CALLS = ("backward", "grad")
#: how a result whose size only the values tell is written
SIZED_CALLS = {"__getitem__": "tensor[mask]", "where": "torch.where(mask)"}
#: torch's files that a user's call comes through
PLUMBING = ("overrides.py", "_tensor.py", "_ops.py", "_compile.py", "functional.py")
_TORCH = f"{torch.__path__[0]}/"


@dataclass
class Asking:
    """The torch function that Python has called, and who hears of each value that is read, as it is written."""

    call: str = ""
    on_read: Callable[[str, bool], None] | None = None


asking = Asking()


def goes_by(what: str, *, may_be_check: bool = False) -> None:
    """Report that the program goes one way or another by a value. may_be_check: not where torch itself looks."""
    if asking.on_read is not None and not (may_be_check and _is_torchs_own()):
        asking.on_read(what, True)


def goes_by_size(name: str) -> None:
    """Report a result whose size only the values tell. What C++ makes in a backward pass, it uses again itself."""
    if asking.call not in BACKWARD_CALLS:
        goes_by(SIZED_CALLS.get(asking.call, f"{asking.call or name}()"))


def value(tensor: Tensor) -> Any:
    """Return what stands for a value that is read; torch's own GradScaler gets 0, for no infinity."""
    if not tensor.is_meta:
        return tensor.item()
    usual = getattr(tensor, "usual", None)
    what = READING_CALLS.get(asking.call, f"{asking.call}(tensor)")
    if asking.call in DECIDING_CALLS:
        goes_by(what, may_be_check=usual is not None)
    elif asking.on_read is not None:
        asking.on_read(what, False)
    if usual is not None:
        return usual
    if tensor.dtype is torch.bool:
        return True
    if _is_asked_by("grad_scaler.py") or asking.call in ("__getitem__", "__setitem__"):
        return 0.0 if tensor.dtype.is_floating_point else 0
    return 1.0 if tensor.dtype.is_floating_point else (1 + 0j if tensor.dtype.is_complex else 1)


def mark_usual(packet: Any, result: Any) -> None:
    """Remember what the truth of a result is usually."""
    if packet in USUAL and isinstance(result, Tensor):
        result.usual = USUAL[packet]  # type: ignore[attr-defined]


def _is_torchs_own() -> bool:
    for frame in call_site.frames():
        file = frame.f_code.co_filename
        inside = file.removeprefix(_TORCH)
        if inside == file:
            return False
        if inside not in PLUMBING and not inside.startswith(("_dynamo/", "utils/_")):
            return True
    return False


def _is_asked_by(file: str) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        if frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False
