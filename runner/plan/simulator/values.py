"""Gives what stands for a value that is asked of a tensor without numbers, and tells of a program that goes by it.

1 stands for a number, and for the truth whatever is usual: all() is true, any() and isnan() are not. A number that
item() gives is watched in Python: adding, scaling and printing it is no matter, comparing it or using it as a size is.
Not seen: what is done with float(tensor) and with numpy's arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runner.device.placement import leaves
from runner.device.torch_private import tree_map
from runner.inspection import call_site
from runner.inspection.host_reads import READING_CALLS

aten = torch.ops.aten

#: calls that read a value on their way and give a tensor of the same size whatever it is, or text
FREE_CALLS = {"", "__float__", "__complex__", "__format__", "__repr__", "item", "numpy", "tolist"}
FREE_CALLS |= {"__getitem__", "__setitem__", "tensor", "as_tensor", "new_tensor", "full", "full_like", "new_full"}
FREE_CALLS |= {"fill_", "masked_fill", "masked_fill_", "clamp", "clamp_", "index_fill", "index_fill_"}
ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "true_divide", "floor_divide", "rsub")
FREE_CALLS |= {f"{mark}{name}{end}" for name in ARITHMETIC for mark, end in (("", ""), ("", "_"))}
FREE_CALLS |= {f"__{mark}{name}__" for name in ARITHMETIC for mark in ("", "i", "r")}
#: results whose truth is what is usual, and that truth
USUAL = {aten.all: True, aten.any: False, aten.isnan: False, aten.isinf: False}
BACKWARD_CALLS = ("backward", "grad")
#: how a result whose size only the values tell is written
SIZED_CALLS = {"__getitem__": "tensor[mask]", "where": "torch.where(mask)"}
#: torch's files that a person's call comes through
PLUMBING = ("overrides.py", "_tensor.py", "_ops.py", "_compile.py", "functional.py")
_TORCH = f"{torch.__path__[0]}/"


@dataclass
class Asking:
    """Who asks. told: of each value that a program goes by, as it is written: bool(tensor)."""

    call: str = ""  # the torch function that Python has called
    told: Callable[[str], None] | None = None
    has_whole: bool = False  # whether a whole number was read so far


asking = Asking()


def goes_by(what: str, *, may_be_check: bool = False) -> None:
    """Tells that the program goes one way or another by a value. may_be_check: not where torch itself looks."""
    if asking.told is not None and not (may_be_check and _is_torchs_own()):
        asking.told(what)


def goes_by_size(name: str) -> None:
    """Tells of a result whose size only the values tell. What C++ makes in a backward pass, it takes up again itself."""
    if asking.call in BACKWARD_CALLS:
        return
    goes_by(SIZED_CALLS.get(asking.call, f"{asking.call or name}()"))


def value(tensor: Tensor) -> Any:
    """What stands for a value that is read; torch's own GradScaler hears that no infinity was found."""
    if not tensor.is_meta:
        return tensor.item()
    usual = getattr(tensor, "usual", None)
    if asking.call not in FREE_CALLS:
        goes_by(READING_CALLS.get(asking.call, f"{asking.call}(tensor)"), may_be_check=usual is not None)
    if usual is not None:
        return usual
    if tensor.dtype is torch.bool:
        return True
    if _is_asked_by("grad_scaler.py") or asking.call in ("__getitem__", "__setitem__"):
        return 0.0 if tensor.dtype.is_floating_point else 0
    return 1.0 if tensor.dtype.is_floating_point else (1 + 0j if tensor.dtype.is_complex else 1)


def mark_usual(packet: Any, result: Any) -> None:
    """Remembers what the truth of a result is usually."""
    if packet in USUAL and isinstance(result, Tensor):
        result.usual = USUAL[packet]  # type: ignore[attr-defined]


def watched(result: Any) -> Any:
    """What item() or tolist() gave, as numbers that tell when they are gone by."""
    if any(type(leaf) is bool for leaf in leaves(result)):  # nobody can watch a bool
        goes_by(READING_CALLS[asking.call], may_be_check=True)
        return result
    if any(type(leaf) is int for leaf in leaves(result)) and _caller_has_range():
        goes_by(READING_CALLS[asking.call])
    return tree_map(_watch, result)


def look_for_sizes(name: str, args: Any, kwargs: Any) -> None:
    """Tells of a watched whole number that a torch function takes other than to reckon with it."""
    if not asking.has_whole or (name in FREE_CALLS and name not in ("__getitem__", "__setitem__", "full", "new_full")):
        return
    if name in ("full", "new_full"):  # the last is what they are filled with
        args = args[:-1]
    if any(type(leaf) is Whole or _is_sliced(leaf) for leaf in leaves((args, kwargs))):
        goes_by("tensor.item() as a size", may_be_check=True)


def _is_sliced(leaf: Any) -> bool:
    if not isinstance(leaf, slice):
        return False
    return any(type(bound) is Whole for bound in (leaf.start, leaf.stop, leaf.step))


def _watch(number: Any) -> Any:
    if type(number) is int:
        asking.has_whole = True
        return Whole(number)
    return Real(number) if type(number) is float else number


class Real(float):
    """A float that was read from a tensor."""


class Whole(int):
    """An int that was read from a tensor."""


def _reckoning(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)
    return lambda self, *others: _watch(plain(self, *others))


def _telling(base: type, name: str) -> Callable[..., Any]:
    plain = getattr(base, name)

    def tell(self: Any, *others: Any) -> Any:
        if name not in ("__round__",) or not others:
            goes_by("tensor.item()", may_be_check=True)
        return plain(self, *others)

    return tell


for _kind, _base in ((Real, float), (Whole, int)):
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        for _side in ("", "r"):
            setattr(_kind, f"__{_side}{_name}__", _reckoning(_base, f"__{_side}{_name}__"))
    for _name in ("__neg__", "__abs__", "__pos__"):
        setattr(_kind, _name, _reckoning(_base, _name))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "round", "floor", "ceil", "trunc"):
        setattr(_kind, f"__{_name}__", _telling(_base, f"__{_name}__"))
    _kind.__hash__ = _base.__hash__  # type: ignore[method-assign]  # __eq__ above takes it away


def _caller_has_range() -> bool:
    frame = call_site.person(list(call_site.frames()))
    return frame is not None and "range" in frame.f_code.co_names


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
