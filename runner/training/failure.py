"""Turns an error that ended a training into the result's status, its words, and what to do. For fit.py and the session."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch import Tensor, nn

from runner.errors import DeletedError, RunnerError, in_words, is_full_disk
from runner.inspection import call_site
from runner.inspection.device_mismatch import PlacementError
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
        result.error = "; ".join(f"{fault.asked}: {fault.problem}; write: {fault.fix}" for fault in error.faults)
        log.error("the run failed: %s", result.error)
        return
    if isinstance(error, PlacementError):
        result.error = str(error)
        log.error("tensors on two devices met", exc_info=error)
        return
    if is_full_disk(error):
        result.ending = "disk_full"
        result.error = f"the disk is full ({error}); what was saved before is there: make room and resume"
        return
    if isinstance(error, DeletedError):
        result.ending, result.error = "deleted", str(error)
        return
    result.error = words_of(error)
    log.error("the run failed", exc_info=error)
    if not isinstance(error, Exception | SystemExit):
        raise error  # not ours to keep; sys.exit() is of a person's code: what asks the runner to stop says so otherwise


def words_of(error: BaseException) -> str:
    """What a person's code raised: its words, their last line that it passed through, the layer, and a mend where one is known.

    The runner's own lines and torch's are in the log alone: nobody can mend anything there.
    """
    stack = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    own = next(((frame, line) for frame, line in stack if call_site.is_own(frame.f_code.co_filename)), None)
    layer = call_site.module([frame for frame, _ in stack]).removeprefix("Prepared.")
    line = f"{Path(own[0].f_code.co_filename).name}:{own[1]}" if own else ""
    place = " in ".join(filter(None, (line, layer)))
    fix = _mend(error, [frame for frame, _ in stack])
    return f"{in_words(error)}{f' ({place})' if place else ''}{f'; {fix}' if fix else ''}"


def _mend(error: BaseException, stack: Sequence[FrameType]) -> str:
    """For what torch says in words that lead nowhere."""
    text = str(error)
    if "does not require grad" in text and isinstance(error, RuntimeError):
        problem = (
            "the loss has lost its way back to the weights in forward (.detach(), .numpy(), .item(), torch.no_grad())"
        )
        return f"{problem}; write: torch operations from the first layer to the loss"
    if isinstance(error, NotImplementedError) and "for the MPS device" in text:
        return "write: export PYTORCH_ENABLE_MPS_FALLBACK=1 before the command, for the CPU to compute it, or another operation"
    if "Can't call numpy()" in text:
        return "numpy knows no gradients, and .detach() would train nothing before it; write: the torch operation of that name"
    if isinstance(error, IndexError) and "index out of range in self" in text:
        for frame in stack:
            layer, ids = frame.f_locals.get("self"), frame.f_locals.get("input")
            if isinstance(layer, nn.Embedding) and isinstance(ids, Tensor) and ids.device.type == "cpu" and ids.numel():
                rows, low, high = layer.num_embeddings, int(ids.min()), int(ids.max())
                problem = f"its ids go from {low:,} to {high:,}, and this nn.Embedding has {rows:,} rows"
                return f"{problem}; write: a vocabulary of {high + 1:,} or more, e.g. '${{facts.vocab_size}}'"
    return ""
