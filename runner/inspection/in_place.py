"""Finds the line that changes a tensor in place which a gradient needs, by a repeated forward pass. For training/result.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.inspection import call_site
from runner.inspection.host_reads import HostReads, Operation


@dataclass(frozen=True)
class Change:
    """An operation in place, and the one that made the tensor; a line is `my_models.py:12`."""

    name: str
    line: str
    made_by: str
    made_at: str


class _Changes:
    def __init__(self) -> None:
        self.found: list[Change] = []
        self._lines = call_site.Lines()
        self._makers: dict[int, tuple[str, str]] = {}  # by the address of the memory

    def after(self, done: Operation) -> None:
        line = self._lines.now()[0]
        changed = done.args[0] if done.op._schema.is_mutable and done.args else None
        if isinstance(changed, Tensor):
            if (maker := self._makers.get(changed.untyped_storage().data_ptr())) is not None:
                self.found.append(Change(done.name, line, *maker))
        elif not done.op.is_view:
            self._makers |= {one.untyped_storage().data_ptr(): (done.name, line) for one in done.outputs}

    def failed(self, what: str, inputs: object, error: Exception) -> None:
        """See HostReads."""


def find_change(forward: Callable[[], object], device: torch.device, error: BaseException) -> Change | None:
    """Return the change that matches torch's error, else the last one, or None. Runs the forward pass."""
    changes = _Changes()
    with torch.enable_grad(), HostReads(device, observers=(changes,)):
        forward()
    node = re.search(r"of (\w+?)Backward\d", str(error))
    fits = [one for one in changes.found if node and one.made_by.replace("_", "") == node[1].lower()]
    return next(reversed(fits or changes.found), None)
