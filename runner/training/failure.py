"""Turns an error that ended a training into the result's status, its words, and what to do. For fit.py and the session."""

from __future__ import annotations

import errno
import logging
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from runner.device.placement import tensors
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
from runner.inspection.device_mismatch import PlacementError
from runner.inspection.in_place import find_change
from runner.training.evaluate import Evaluation
from runner.training.metric_buffer import NotFiniteError
from runner.training.result import Result

log = logging.getLogger("runner")


def fail(result: Result, error: BaseException) -> None:
    """Makes an error the result's. Raises: what is not an Exception."""
    if isinstance(error, KeyboardInterrupt):
        result.status, result.error = "killed", "interrupted"
        return
    result.status = "failed"
    if isinstance(error, NotFiniteError):
        result.ending = "not_finite"
        result.error = f"{error}; try a smaller optimizer.lr, train.clip_grad_norm=1, or look at the data of that step"
        return
    if isinstance(error, RunnerError):  # of a part that finds out late that it does not suit
        result.error = on_a_line(error)
        log.error("the run failed: %s", result.error)
        return
    if isinstance(error, PlacementError):
        result.error = without_password(str(error))
        log.error("tensors on two devices met\n%s", traceback_of(error))
        return
    if is_full_disk(error):
        result.ending = "disk_full"
        result.error = f"the disk is full ({error}); what was saved before is there: make room and resume"
        return
    if isinstance(error, DeletedError):
        result.ending, result.error = "deleted", str(error)
        return
    result.error = without_password(words_of(error))
    log.error("the run failed\n%s", traceback_of(error))
    if not isinstance(error, Exception | SystemExit):
        raise error  # not ours to keep; sys.exit() is of a person's code: what asks the runner to stop says so otherwise


def words_of(error: BaseException) -> str:
    """Say what your code raised, the last line of it that the error passed through, the layer, and a fix if one is known.

    Lines of the runner and of torch are only in the log.
    """
    stack = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    own = next(((frame, line) for frame, line in stack if call_site.is_own(frame.f_code.co_filename)), None)
    if "modified by an inplace operation" in str(error) and (words := _in_place(error, [frame for frame, _ in stack])):
        return words
    layer = call_site.module([frame for frame, _ in stack]).removeprefix("Prepared.")
    line = f"{Path(own[0].f_code.co_filename).name}:{own[1]}" if own else ""
    place = " in ".join(filter(None, (line, layer)))
    fix = _fix(error, [frame for frame, _ in stack])
    return f"{in_words(error)}{f' ({place})' if place else ''}{f'; {fix}' if fix else ''}"


def _in_place(error: BaseException, stack: Sequence[FrameType]) -> str:
    for frame in stack:  # of train_step.make_step()
        if frame.f_code.co_name != "forward_backward" or torch.distributed.is_initialized():
            continue
        predict, batch = frame.f_locals["predict"], frame.f_locals["batch"]
        device = next((tensor.device for tensor in tensors(batch)), torch.device("cpu"))
        with suppress(Exception):  # it has failed once already
            if change := find_change(partial(predict, batch), device, error):
                problem = (
                    f"{change.line} changes a tensor in place ({change.name}), and the gradient needs its old values"
                )
                made = f"{change.made_by} at {change.made_at} made it"
                return f"{problem}: {made}; help: make a new tensor at {change.line}, e.g., `x = x + 1` instead of `x += 1`"
    return ""


def _fix(error: BaseException, stack: Sequence[FrameType]) -> str:
    text = str(error)
    if moves_itself(error):
        return f"help: {NO_MOVES}"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "help: run `ulimit -n 4096` before the command, or use `data.num_workers=0`"
    if "does not require grad" in text and any(frame.f_code is Evaluation.measure.__code__ for frame in stack):
        problem = "validation and test run under torch.no_grad(), and this task needs gradients"
        return f"{problem}; help: put `with torch.enable_grad():` around `torch.autograd.grad(...)` in the task"
    if "does not require grad" in text and isinstance(error, RuntimeError):
        problem = (
            "nothing connects the loss with the weights: .detach(), .numpy(), .item() or torch.no_grad() cuts it off"
        )
        return f"{problem}; help: use torch operations from the first layer to the loss"
    if isinstance(error, NotImplementedError) and "for the MPS device" in text:
        return "help: run `export PYTORCH_ENABLE_MPS_FALLBACK=1` before the command, so that the CPU computes it, or use another operation"
    if "Can't call numpy()" in text:
        return "numpy knows no gradients, and .detach() would train nothing before it; help: use the torch operation of that name"
    if isinstance(error, IndexError) and "index out of range in self" in text:
        for frame in stack:
            layer, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
            if isinstance(layer, nn.Embedding) and isinstance(ids, Tensor) and ids.device.type == "cpu" and ids.numel():
                rows, low, high = layer.num_embeddings, int(ids.min()), int(ids.max())
                problem = f"its ids go from {low:,} to {high:,}, and this nn.Embedding has {rows:,} rows"
                return f"{problem}; help: use a vocabulary of {high + 1:,} or more, e.g., `'${{facts.vocab_size}}'`"
    return ""
