"""Finds likely errors in a finished run: one line each, with a figure, only if it is certain.

A new hint is one entry of HINTS: a function of the finished run. A step knows nothing of them.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.models.with_preprocessing import Prepared
from runner.tasks.classification import Classification
from runner.tasks.language import Language
from runner.tasks.regression import Regression
from runner.tracking.journal_reader import Series
from runner.training.parts import Parts
from runner.training.result import Result

ENOUGH_STEPS = 10  # after which a parameter without a gradient is systematic
MAX_NAMES = 3
MUCH_WORSE = 2.0  # times the loss of a constant prediction
#: a validation loss has risen by this factor, and a training loss is this far below it
RISEN, FAR_BELOW, ENOUGH_EVALUATIONS, EVALUATIONS_SINCE = 1.2, 0.5, 5, 3
WAITING, LEAST_SECONDS = 0.3, 1.0  # of a training that is long enough
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


@dataclass(frozen=True)
class FinishedRun:
    parts: Parts
    result: Result
    series: Mapping[str, Series]
    rows: Any  # a few of the model's inputs; None if they would take a while to read
    time: Mapping[str, float]  # seconds of the training by cause

    @property
    def rate(self) -> float:
        group = self.parts.optimizer.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def values(self, name: str) -> tuple[Any, Any]:
        """Return the steps of a metric, and its values."""
        steps, _, values = self.series.get(name, (np.zeros(0), np.zeros(0), np.zeros(0)))
        return steps, values

    def outputs(self) -> Tensor | None:
        """Return the outputs for a few rows in eval mode, with their graph; None for other tasks and divided models."""
        task, model = self.parts.task, self.parts.model
        if not isinstance(task, Classification | Language):
            return None
        if self.parts.shards is not None or self.rows is None:
            return None
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.enable_grad(), self.parts.precision.autocast():
                outputs: Tensor = task.outputs(model, (self.rows, self.rows))  # only the inputs are used
                return outputs
        finally:
            for module, mode in modes.items():
                module.training = mode


def find(run: FinishedRun) -> list[str]:
    """Return the hints for a finished run, the most important first. Reads the device a few times; takes some ms."""
    found: list[str] = []
    for hint in HINTS:
        try:
            text = hint(run)
        except Exception as error:  # of a custom model or optimizer
            log.info("%s could not be looked for: %s", hint.__name__.strip("_"), error)
            continue
        if text:
            found.append(text)
    return found


def _wrong_outputs(run: FinishedRun) -> str | None:
    outputs = run.outputs()
    last = "" if outputs is None else _last_operation(outputs)
    if last not in WRONG_OUTPUTS:
        return None
    return f"the model ends in a {last}, and {WRONG_OUTPUTS[last]}; write the model without it"


def _without_gradients(run: FinishedRun) -> str | None:
    optimizer, num_steps = run.parts.optimizer, run.result.num_steps
    may_skip_steps = run.parts.precision.scaler.is_enabled()
    if num_steps < ENOUGH_STEPS or run.parts.shards is not None or not optimizer.state or may_skip_steps:
        return None
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    left = [value for value in trained if _has_no_gradient(optimizer.state.get(value))]
    if getattr(run.parts.task, "kind", None) == "generation":  # the critic's last bias cancels out in its loss
        left = [value for value in left if not optimizer.state.get(value)]
    if not left or len(left) == len(trained):
        return None
    prefix = "model." if isinstance(run.parts.model, Prepared) else ""
    names = {value: name.removeprefix(prefix) for name, value in run.parts.model.named_parameters()}
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


def _worse_than_constant(run: FinishedRun) -> str | None:
    task, losses = run.parts.task, run.values("train/loss")[1]
    if len(losses) < ENOUGH_STEPS:
        return None
    constant, last = math.inf, float(losses[-max(5, len(losses) // 5) :].mean())
    reference = "always predicting the same costs"
    if isinstance(task, Classification) and task.class_weights is None:
        constant = math.log(2) if task.kind == "multilabel" else math.log(max(2, task.num_classes))
    elif isinstance(task, Language) and (size := run.parts.card.facts.get("vocab_size")):
        constant = math.log(size)
    elif isinstance(task, Regression):
        constant, reference = float(losses[0]), "it began at"
    if not last > MUCH_WORSE * constant:
        return None
    return (
        f"train/loss is {last:.4g} at the end, and {reference} {constant:.4g}: the rate is too high; "
        f"write optimizer.lr={run.rate / 10:g}, or find one with python -m runner lr-find"
    )


def _overfit(run: FinishedRun) -> str | None:
    (at, measured), (steps, losses) = run.values("val/loss"), run.values("train/loss")
    if len(measured) < ENOUGH_EVALUATIONS or run.parts.limits.patience is not None:
        return None
    if run.parts.best.metric != "val/loss" or not math.isfinite(measured[-1]):
        return None
    is_known = np.isfinite(measured)
    at, measured = at[is_known], measured[is_known]
    best = int(measured.argmin())
    best_step, lowest, now = int(at[best]), float(measured[best]), float(measured[-1])
    recent = losses[steps > at[-2]]
    if len(measured) - 1 - best < EVALUATIONS_SINCE or not len(recent) or lowest <= 0:
        return None
    train = float(recent.mean())
    if now < RISEN * lowest or train > FAR_BELOW * now:
        return None
    return (
        f"val/loss rose from {lowest:.4g} (step {best_step:,}, whose weights are kept) to {now:.4g}, and train/loss is"
        f" {train:.4g}: it overfits; write train.early_stopping.patience=5, and more optimizer.weight_decay, dropout or"
        " data"
    )


def _waiting(run: FinishedRun) -> str | None:
    seconds = sum(run.time.values()) - run.time.get("warm-up", 0.0)  # a longer run has the warm-up once
    data, launch = run.time.get("data", 0.0), run.time.get("launch", 0.0)
    if seconds < LEAST_SECONDS or max(data, launch) < WAITING * seconds:
        return None
    cause = "waiting for data" if data > launch else "the host's calls beyond the device's work"
    share = f"{max(data, launch) / seconds:.0%} of the training was {cause}"
    return f"{share}; python -m runner tune finds faster settings, explain --time shows all causes"


#: in the order in which they are given
HINTS = (_wrong_outputs, _without_gradients, _worse_than_constant, _overfit, _waiting)


def _last_operation(outputs: Tensor) -> str:
    node: Any = outputs.grad_fn
    while node is not None:
        name = str(node.name()).partition("Backward")[0].removesuffix("Alias") or "Alias"
        if not PASSING.fullmatch(name):
            return name
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return ""
