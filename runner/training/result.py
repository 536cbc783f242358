"""The result of a training, and how an error becomes its status and message. For fit.py and the session."""

from __future__ import annotations

import errno
import logging
import re
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from runner.errors import (
    NO_MOVES,
    DeletedError,
    RunnerError,
    in_words,
    is_full_disk,
    moves_itself,
    on_a_line,
    traceback_of,
    without_password,
)
from runner.inspection import call_site
from runner.inspection.findings import Finding
from runner.inspection.guard import PlacementError
from runner.inspection.operations import Operation, OperationObserver, observe
from runner.training.evaluate import Evaluation
from runner.training.loop import Best
from runner.training.metric_buffer import NotFiniteError
from runner.training.step.clock import StepTimes

log = logging.getLogger("runner")

NO_GRADIENT = "does not require grad"
#: by a part of an error's text: what it means, and what helps
FIXES = {
    "modified by an inplace operation": "help: make a new tensor, e.g., `x = x + 1` instead of `x += 1`",
    NO_GRADIENT: "nothing connects the loss with the weights: .detach(), .numpy(), .item() or torch.no_grad() cuts it off;"
    " help: use torch operations from the first layer to the loss",
    "for the MPS device": "help: run `export PYTORCH_ENABLE_MPS_FALLBACK=1` before the command, or use another operation",
    "same dtype, but got (Long|Int) and": "the layer computes with floats, and its input has integers;"
    " help: use `x.float()` before it, or give floats as inputs",
    r"Can't call numpy\(\)": ".detach() would train nothing before it; help: use the torch operation of that name",
    "index out of range in self": "an nn.Embedding has too few rows; help: use a larger `vocab_size`",
    "more than 1 value per channel": "batch normalization needs two rows; help: use another `train.batch_size`",
}


@dataclass
class Result:
    """How a training ended, and what it reached."""

    best: Best
    status: str = "failed"  # or finished, pruned, killed
    error: str | None = None
    ending: str = ""  # why it ended (loop.Loop), or the machine's problem: out_of_memory, disk_full, ...
    num_steps: int = 0
    num_epochs: int = 0
    num_samples: int = 0
    num_processes: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})
    steps: StepTimes | None = None  # of this part; None if no step was timed
    other_seconds: dict[str, float] = field(default_factory=dict)  # of this part, not spent on steps, by name
    times: dict[str, int] = field(default_factory=dict)  # how often something was done, by name
    pulls: int = 0  # of metrics from the device
    peak_memory: tuple[int, str] | None = None  # see backends.peak_memory(); None if the end was not reached
    findings: list[Finding] = field(default_factory=list)


def fail(result: Result, error: BaseException) -> None:
    """Make an error the result's status and message. Raises: what is not an Exception."""
    if isinstance(error, KeyboardInterrupt):
        result.status, result.error = "killed", "interrupted"
        return
    result.status = "failed"
    if isinstance(error, NotFiniteError):
        result.ending = "not_finite"
        result.error = f"{error}; try a smaller optimizer.lr, train.clip_grad_norm=1, or look at the data of that step"
    elif isinstance(error, RunnerError):  # found late: at the first step
        result.error = on_a_line(error)
        log.error("the run failed: %s", result.error)
    elif isinstance(error, PlacementError):
        result.error = without_password(str(error))
        log.error("tensors on two devices met\n%s", traceback_of(error))
    elif is_full_disk(error):
        result.ending = "disk_full"
        result.error = f"the disk is full ({error}); what was saved before is there: make room and resume"
    elif isinstance(error, DeletedError):
        result.ending, result.error = "deleted", str(error)
    else:
        result.error = without_password(words_of(error))
        log.error("the run failed\n%s", traceback_of(error))
        if not isinstance(error, Exception | SystemExit):
            raise error  # SystemExit comes from user code; a request to stop is a signal


def words_of(error: BaseException) -> str:
    """The error, the last line of your code that it passed through, the layer, and a fix if one is known.

    Lines of the runner and of torch are only in the log.
    """
    stack = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    frames = [frame for frame, _ in stack]
    own = next(((frame, line) for frame, line in stack if call_site.is_own(frame.f_code.co_filename)), None)
    if "modified by an inplace operation" in str(error) and (words := _in_place(error, frames)):
        return words
    layer = call_site.module(frames).removeprefix("Prepared.")
    line = f"{Path(own[0].f_code.co_filename).name}:{own[1]}" if own else ""
    place = " in ".join(filter(None, (line, layer)))
    in_evaluation = any(frame.f_code is Evaluation.measure.__code__ for frame in frames)
    fix = _fix(error, in_evaluation=in_evaluation)
    return f"{in_words(error)}{f' ({place})' if place else ''}{f'; {fix}' if fix else ''}"


def _in_place(error: BaseException, stack: Sequence[FrameType]) -> str:
    for frame in stack:  # of train_step.make_step()
        if frame.f_code.co_name != "forward_backward" or torch.distributed.is_initialized():
            continue
        predict, batch = frame.f_locals["predict"], frame.f_locals["batch"]
        with suppress(Exception):  # the step failed once already
            changes = _Changes()
            with torch.enable_grad(), observe(changes):
                predict(batch)
            node = re.search(r"of (\w+?)Backward\d", str(error))
            fits = [seen for seen in changes.seen if node and seen[2].replace("_", "") == node[1].lower()]
            if change := next(reversed(fits or changes.seen), None):
                name, line, made_by, made_at = change
                problem = f"{line} changes a tensor in place ({name}), and the gradient needs its old values"
                fix = f"help: make a new tensor at {line}, e.g., `x = x + 1` instead of `x += 1`"
                return f"{problem}: {made_by} at {made_at} made it; {fix}"
    return ""


class _Changes(OperationObserver):
    """Observes the operations in place of a block: for each its name and line, and those of what made the tensor."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, str]] = []
        self._lines = call_site.Lines()
        self._makers: dict[int, tuple[str, str]] = {}  # by the address of the memory

    def after(self, done: Operation) -> None:
        line = self._lines.now()[0]
        changed = done.args[0] if done.op._schema.is_mutable and done.args else None
        if isinstance(changed, Tensor):
            if (maker := self._makers.get(changed.untyped_storage().data_ptr())) is not None:
                self.seen.append((done.name, line, *maker))
        elif not done.op.is_view:
            self._makers |= {one.untyped_storage().data_ptr(): (done.name, line) for one in done.outputs}


def _fix(error: BaseException, *, in_evaluation: bool) -> str:
    text = str(error)
    if moves_itself(error):
        return f"help: {NO_MOVES}"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "help: run `ulimit -n 4096` before the command, or use `data.num_workers=0`"
    if in_evaluation and NO_GRADIENT in text:
        problem = "validation and test run under torch.no_grad(), and this task needs gradients"
        fix = "set `needs_grad = True` in the task's class, or `loss.needs_grad = True` after a function `loss`"
        return f"{problem}; help: {fix}"
    return next((fix for part, fix in FIXES.items() if re.search(part, text)), "")
