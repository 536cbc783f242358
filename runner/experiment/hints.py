"""Finds likely errors in a finished run, each in one line with a figure. A hint appears only if it is certain.

The checks run after training and cost its steps nothing.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.device.precision import SkippingScaler
from runner.errors import CODE_ERRORS
from runner.models.preprocessing import Prepared
from runner.tasks.classification import Classification
from runner.tasks.language import Language
from runner.tasks.regression import Regression
from runner.tracking.journal_reader import Series
from runner.training.parts import Parts
from runner.training.result import Result

ENOUGH_STEPS = 10  # after which a parameter without a gradient is systematic
MAX_NAMES = 3
MUCH_WORSE = 2.0  # times the loss of a constant prediction
RANDOM = 1e-4  # difference of two forward passes, of the largest output
WAITING, MIN_SECONDS = 0.3, 1.0  # of a training that is long enough
#: operations that change no values
PASSING = re.compile("View|UnsafeView|Reshape|Squeeze|Unsqueeze|Select|Slice|ToCopy|Alias|Clone|Stack")
#: last operations of a model that its loss makes wrong, and why
WRONG_OUTPUTS = {
    "Softmax": "the loss takes a softmax of its outputs again",
    "LogSoftmax": "the loss takes a log_softmax of its outputs again, which only adds rounding",
    "Sigmoid": "the loss takes a softmax or a sigmoid of its outputs again",
    "Relu": "no score is below 0",
}
#: in an optimizer's state, zero only if every gradient was
SQUARES = ("exp_avg_sq", "momentum_buffer")

log = logging.getLogger("runner")


def find(
    parts: Parts, result: Result, *, series: Mapping[str, Series], rows: Any, time: Mapping[str, float]
) -> list[str]:
    """Return the hints for a finished run, the most important first.

    Takes a few forward passes of a few rows, and reads the device a few times.

    series: The points of each metric. rows: A few of the model's inputs; None if they would take a while to read.
    time: Seconds of the training by cause.
    """
    checks: dict[str, Callable[[], str | None]] = {
        "random outputs": lambda: _random_outputs(parts, rows),
        "wrong outputs": lambda: _wrong_outputs(parts, rows),
        "skipped steps": lambda: _skipped(parts, result.num_steps),
        "no gradients": lambda: _without_gradients(parts, result.num_steps),
        "a high loss": lambda: _worse_than_constant(parts, series),
        "waiting": lambda: waiting(time),
    }
    hints: list[str] = []
    for name, check in checks.items():
        try:
            hints += filter(None, [check()])
        except CODE_ERRORS as error:  # of a custom model or optimizer
            log.info("no hint about %s: %s", name, error)
    return hints


def _outputs(parts: Parts, rows: Any) -> Tensor | None:
    """Return the outputs for a few rows in eval mode, with their graph; None for other tasks and divided models."""
    task, model = parts.task, parts.model
    if not isinstance(task, Classification | Language | Regression) or parts.shards is not None or rows is None:
        return None
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad(), parts.precision.autocast():
            outputs: Tensor = task.outputs(model, (rows, rows))  # only the inputs are used
            return outputs
    finally:
        for module, mode in modes.items():
            module.training = mode


def _random_outputs(parts: Parts, rows: Any) -> str | None:
    if (first := _outputs(parts, rows)) is None or (second := _outputs(parts, rows)) is None:
        return None
    difference = float((first - second).detach().abs().max())
    if not difference > RANDOM * float(first.detach().abs().max()):
        return None
    return (
        f"two passes over the same rows differ by up to {difference:.2g} in eval mode, so the validation is random; "
        "make each layer in __init__(), and write F.dropout(x, training=self.training)"
    )


def _wrong_outputs(parts: Parts, rows: Any) -> str | None:
    if isinstance(parts.task, Regression) or (outputs := _outputs(parts, rows)) is None:
        return None
    if (last := _last_operation(outputs)) not in WRONG_OUTPUTS:
        return None
    return f"the model ends in a {last}, and {WRONG_OUTPUTS[last]}; write the model without it"


def _skipped(parts: Parts, num_steps: int) -> str | None:
    scaler = parts.precision.scaler
    num = scaler.num_skipped() if isinstance(scaler, SkippingScaler) else 0
    if not num:
        return None
    return (
        f"{num:,} of {num_steps:,} steps were skipped, as a gradient was not finite; train/skipped says which, and "
        "train.on_nonfinite=fail ends a run at the first one, for `python -m runner explain`"
    )


def _without_gradients(parts: Parts, num_steps: int) -> str | None:
    optimizer, may_skip_steps = parts.optimizer, parts.precision.scaler.is_enabled()
    if num_steps < ENOUGH_STEPS or parts.shards is not None or not optimizer.state or may_skip_steps:
        return None
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    left = [value for value in trained if _has_no_gradient(optimizer.state.get(value))]
    if getattr(parts.task, "kind", None) == "generation":  # the critic's last bias cancels out in its loss
        left = [value for value in left if not optimizer.state.get(value)]
    if not left or len(left) == len(trained):
        return None
    prefix = "model." if isinstance(parts.model, Prepared) else ""
    names = {value: name.removeprefix(prefix) for name, value in parts.model.named_parameters()}
    shown = [names.get(value, "?") for value in left]
    first, more = shown[:MAX_NAMES], f" and {len(shown) - MAX_NAMES} more" if len(shown) > MAX_NAMES else ""
    return (
        f"{len(left)} of {len(trained)} parameters never got a gradient other than 0 in {num_steps:,} steps: "
        f"{', '.join(first)}{more}; use them in forward() without detach(), or write model.freeze=[{','.join(first)}]"
    )


def _has_no_gradient(state: Mapping[str, Any] | None) -> bool:
    if not state:
        return True
    squares = [state[key] for key in SQUARES if isinstance(state.get(key), Tensor)]
    # in float16 a small square is 0
    return any(square.dtype is not torch.float16 and not square.any() for square in squares)


def _worse_than_constant(parts: Parts, series: Mapping[str, Series]) -> str | None:
    every = series["train/loss"][2] if "train/loss" in series else np.zeros(0)
    losses, task = every[np.isfinite(every)], parts.task  # others were skipped, or rolled back
    if len(losses) < ENOUGH_STEPS:
        return None
    constant, last = math.inf, float(losses[-max(5, len(losses) // 5) :].mean())
    reference = "always predicting the same costs"
    if isinstance(task, Classification) and task.class_weights is None:
        constant = math.log(2) if task.kind == "multilabel" else math.log(max(2, task.num_classes))
    elif isinstance(task, Language) and (size := parts.card.facts.get("vocab_size")):
        constant = math.log(size)
    elif isinstance(task, Regression):
        constant, reference = float(losses[0]), "it began at"
    if not last > MUCH_WORSE * constant:
        return None
    group = parts.optimizer.param_groups[0]
    rate = float(group.get("initial_lr", group["lr"]))
    return (
        f"train/loss is {last:.4g} at the end, and {reference} {constant:.4g}: the rate is too high; write "
        f"optimizer.lr={rate / 10:g}, or find one with python -m runner lr-find"
    )


def waiting(time: Mapping[str, float]) -> str | None:
    """Return the hint for a training that mostly waited, for data or for the host."""
    seconds = sum(time.values()) - time.get("warm-up", 0.0)  # a longer run has the warm-up once
    data, launch = time.get("data", 0.0), time.get("launch", 0.0)
    if seconds < MIN_SECONDS or max(data, launch) < WAITING * seconds:
        return None
    cause = "waiting for data" if data > launch else "the host's calls beyond the device's work"
    share = f"{max(data, launch) / seconds:.0%} of the training was {cause}"
    return f"{share}; python -m runner tune finds faster settings, explain --time shows all causes"


def _last_operation(outputs: Tensor) -> str:
    node: Any = outputs.grad_fn
    while node is not None:
        name = str(node.name()).partition("Backward")[0].removesuffix("Alias") or "Alias"
        if not PASSING.fullmatch(name):
            return name
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return ""
