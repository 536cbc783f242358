"""Return a value for a read of a tensor without numbers, and report the read.

A number is 1, and a truth value is the usual one: all() is true, any() and isnan() are false. `decides` means that the value
decides what the program does (bool(tensor), int(tensor), nonzero()); the use of a float, of tolist() or of NumPy arrays is
not known.
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

#: calls that turn a value into a number, a size or a choice in Python
DECIDING_CALLS = ("__bool__", "__int__", "__index__", "__contains__", "is_nonzero", "equal", "allclose")
#: results with a usual truth value
USUAL = {aten.all: True, aten.any: False, aten.isnan: False, aten.isinf: False}
BACKWARD_CALLS = ("backward", "grad")
#: text for a result whose size depends on values
SIZED_CALLS = {"__getitem__": "tensor[mask]", "where": "torch.where(mask)"}
#: files of torch between a user's line and the read
PLUMBING = ("overrides.py", "_tensor.py", "_ops.py", "_compile.py", "functional.py")
_TORCH = f"{torch.__path__[0]}/"


@dataclass
class ValueReads:
    """The current torch function, and the function that is called for each read."""

    call: str = ""
    on_read: Callable[[str, bool], None] | None = None


value_reads = ValueReads()


def goes_by(what: str, *, may_be_check: bool = False) -> None:
    """Report that a value decides what the program does. may_be_check: Not if torch itself reads it."""
    if value_reads.on_read is not None and not (may_be_check and _is_torchs_own()):
        value_reads.on_read(what, True)


def goes_by_size(name: str) -> None:
    """Report a result whose size depends on values. Those of C++ in a backward pass are not read by the program."""
    if value_reads.call not in BACKWARD_CALLS:
        goes_by(SIZED_CALLS.get(value_reads.call, f"{value_reads.call or name}()"))


def value(tensor: Tensor) -> Any:
    """Return the value for a read; torch's GradScaler gets 0, for no infinity."""
    if not tensor.is_meta:
        return tensor.item()
    usual = getattr(tensor, "usual", None)
    what = READING_CALLS.get(value_reads.call, f"{value_reads.call}(tensor)")
    if value_reads.call in DECIDING_CALLS:
        goes_by(what, may_be_check=usual is not None)
    elif value_reads.on_read is not None:
        value_reads.on_read(what, False)
    if usual is not None:
        return usual
    if tensor.dtype is torch.bool:
        return True
    if _is_asked_by("grad_scaler.py") or value_reads.call in ("__getitem__", "__setitem__"):
        return 0.0 if tensor.dtype.is_floating_point else 0
    return 1.0 if tensor.dtype.is_floating_point else (1 + 0j if tensor.dtype.is_complex else 1)


def mark_usual(packet: Any, result: Any) -> None:
    """Store the usual truth value of a result."""
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
