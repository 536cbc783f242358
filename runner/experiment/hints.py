"""Finds likely errors in a finished run: one line each, with a figure, only if it is certain.

Called by session.py. It looks at what is there by then: points, weights, the optimizer's state, a few rows. A step knows nothing of it.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.config.settings import Settings
from runner.data.split import rows_of
from runner.models.with_preprocessing import Prepared
from runner.tasks.classification import Classification
from runner.tasks.language import Language
from runner.tasks.regression import Regression
from runner.tracking.journal_reader import Series
from runner.training.parts import Parts
from runner.training.result import Result

NUM_SAMPLED = 256  # values of each parameter that are kept from the start
MOST_NAMED = 3
#: steps after which a parameter without a gradient or a constant loss (10), or a poor regression (50), is systematic
ENOUGH_STEPS, MANY_STEPS = 10, 50
TINY_CHANGE = 1e-4  # of the weights: Adam's default rate moves them further in a step or two
MUCH_WORSE = 2.0  # times the loss of a constant prediction
TINY_RATE, LATE = 1e-6, 0.75  # of the first learning rate, of all steps
#: causes of a parameter without a gradient
UNUSED = " (not used in forward()): use them, or write {freeze}"
CUT = " (used, but cut off from the loss): remove the .detach() or torch.no_grad() after them"
ZEROS = " (used, but multiplied by 0 later): look for weights that are all 0, or a ReLU that gives only 0"
FAR_AWAY = 100  # targets so large, or so small, are far from the first outputs of a model
#: a validation loss has risen by this factor, and a training loss is this far below it
RISEN, FAR_BELOW, ENOUGH_MEASURED, MEASURED_SINCE = 1.2, 0.5, 5, 3
#: distance of sums of probabilities from 1, where the last operation is a softmax, and where it is not
LOOSE, EXACT = 0.05, 1e-4
#: operations that change no values
PASSING = re.compile("View|UnsafeView|Reshape|Squeeze|Unsqueeze|Select|Slice|ToCopy|Alias|Clone|Stack")
#: in an optimizer's state, zero only if every gradient was
SQUARES = ("exp_avg_sq", "momentum_buffer")

log = logging.getLogger("runner")


@dataclass(frozen=True)
class Ended:
    """A finished run."""

    parts: Parts
    settings: Settings
    result: Result
    series: Mapping[str, Series]
    before: Mapping[str, Tensor]  # sample() of its model, from the start
    rows: Any  # a few of the model's inputs; None if they would take a while to read

    @property
    def rate(self) -> float:
        group = self.parts.optimizer.param_groups[0]
        return float(group.get("initial_lr", group["lr"]))

    def values(self, name: str) -> tuple[Any, Any]:
        """Return the steps of a metric, and its values."""
        steps, _, values = self.series.get(name, (np.zeros(0), np.zeros(0), np.zeros(0)))
        return steps, values

    def validation_targets(self) -> Tensor | None:
        """Return the numbers of a validation split that is in memory, (N, T) in float64."""
        rows = rows_of(self.parts.splits.val)
        is_pair = isinstance(rows, tuple) and len(rows) == 2 and isinstance(rows[1], Tensor)
        return rows[1].double().reshape(len(rows[1]), -1) if is_pair else None

    def outputs(self) -> Tensor | None:
        """Return the outputs for a few rows in eval mode, with their graph; None for other tasks and divided models."""
        task, model = self.parts.task, self.parts.model
        if not isinstance(task, Classification | Language | Regression):
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


def sample(parts: Parts) -> dict[str, Tensor]:
    """Copy a few values of each trained parameter on its device, without waiting. {} for a divided model."""
    if parts.shards is not None:
        return {}
    return {name: _some(value) for name, value in parts.model.named_parameters() if value.requires_grad}


def find(run: Ended) -> list[str]:
    """Return the hints for a finished run, the most important first. Reads the device a few times; takes some ms."""
    hints: list[str] = []
    for look in LOOKS:
        try:
            said = look(run)
        except Exception as error:  # of a custom model or optimizer
            log.info("%s could not be looked for: %s", look.__name__.strip("_"), error)
            continue
        if said and not (look is _stood_still and hints):  # what is said already is why
            hints.append(said)
    return hints


def _wrong_outputs(run: Ended) -> str | None:
    task = run.parts.task
    if not isinstance(task, Classification | Language) or (outputs := run.outputs()) is None:
        return None
    last, values = _last_operation(outputs), outputs.detach().float()
    dim, is_multilabel = -1 if task.kind == "language" else 1, task.kind == "multilabel"
    sums = (values.exp() if last == "LogSoftmax" else values).sum(dim)
    least, most, away = torch.stack([values.min(), values.max(), (sums - 1).abs().max()]).tolist()
    if last in ("Softmax", "LogSoftmax") and not is_multilabel and away > LOOSE:
        return f"the model's {last.lower()} is not over the classes; write dim={dim} for it, or leave it out"
    if last == "LogSoftmax" and not is_multilabel:
        problem = "the loss takes a log_softmax of them again: the values are the same, but rounding grows"
        return f"the model's outputs are log_softmax's, and {problem}; write the model without its last log_softmax"
    if last == "Relu":
        return "the model ends in a ReLU, so no score is below 0; write the model without its last relu"
    if least < 0 or most > 1:
        return None
    if last == "Sigmoid" and is_multilabel:
        problem = "the loss takes a sigmoid of them again: a label that is 0 costs 0.69 at least"
    elif last == "Sigmoid":
        problem = f"the loss takes a softmax of them: {least:.2g} to {most:.2g} are not logits"
    elif not is_multilabel and away < (LOOSE if last == "Softmax" else EXACT):
        last, lowest = "Softmax", math.log1p((values.shape[dim] - 1) / math.e)
        problem = f"the loss takes a softmax of them again: for no row it comes below {lowest:.2f}"
    else:
        return None
    return f"the model's outputs are a {last.lower()}'s, and {problem}; write the model without its last {last.lower()}"


def _random_forward(run: Ended) -> str | None:
    if (first := run.outputs()) is None or (second := run.outputs()) is None:
        return None
    known = set(map(id, run.parts.model.parameters()))
    if made := [value for value in _leaves(first) if id(value) not in known]:
        shape = tuple(max(made, key=Tensor.numel).shape)
        return (
            f"forward() makes a layer with weights {shape}, new at each step and never trained; make it in __init__()"
        )
    first, second = first.detach(), second.detach()
    apart = float((first - second).abs().max())
    if not apart > EXACT * float(first.abs().max()):
        return None
    problem = f"two passes over the same rows differ by up to {apart:.2g} in eval mode, so the validation is random"
    return f"{problem}; write F.dropout(x, training=self.training), or nn.Dropout in __init__()"


def _worse_than_constant(run: Ended) -> str | None:
    task, facts = run.parts.task, run.parts.card.facts
    losses = run.values("train/loss")[1]
    if len(losses) < ENOUGH_STEPS:
        return None
    constant, last = math.inf, float(losses[-max(5, len(losses) // 5) :].mean())
    if isinstance(task, Classification) and task.class_weights is None:
        constant = math.log(2) if task.kind == "multilabel" else math.log(max(2, task.num_classes))
    elif isinstance(task, Language) and facts.get("vocab_size"):
        constant = math.log(facts["vocab_size"])
    elif (
        isinstance(task, Regression) and task.loss == "mse" and last > MUCH_WORSE * losses[0]
    ):  # else it may only need more steps
        targets = run.validation_targets()
        constant = math.inf if targets is None else float(targets.var(0, correction=0).mean())
    if not last > MUCH_WORSE * constant:
        return None
    rate = run.rate
    return (
        f"train/loss is {last:.4g} at the end, and always predicting the same costs {constant:.4g}: the rate is too high; "
        f"write optimizer.lr={rate / 10:g}, or find one with python -m runner lr-find"
    )


def _vanished_rate(run: Ended) -> str | None:
    (steps, rates), num_steps, schedule = run.values("train/lr"), run.result.num_steps, run.parts.schedule
    is_tiny = rates < TINY_RATE * run.rate
    if not len(rates) or not is_tiny[-1] or schedule.scheduler is None:
        return None
    at = int(steps[len(rates) - int((~is_tiny[::-1]).argmax())]) if not is_tiny.all() else 1
    if at > LATE * num_steps:
        return None
    fix = "stretch the schedule" if schedule.every > 1 else "if it counts epochs, write scheduler.interval=epoch"
    problem = f"the learning rate was below {TINY_RATE:g} of its start from step {at:,} of {num_steps:,} on"
    return f"{problem} ({schedule.words}); {fix}"


def _without_gradients(run: Ended) -> str | None:
    model, state, optimizer = run.parts.model, run.parts.optimizer.state, run.parts.optimizer
    may_skip_steps = run.parts.precision.scaler.is_enabled()
    if run.result.num_steps < ENOUGH_STEPS or run.parts.shards is not None or not state or may_skip_steps:
        return None
    trained = [value for group in optimizer.param_groups for value in group["params"]]
    kept = {value: state.get(value) or {} for value in trained}
    squares = {value: kept[value][key] for value in trained for key in SQUARES if _is_square(kept[value].get(key))}
    largest = [square.abs().max().to(run.parts.device) for square in squares.values()]
    maxima = torch.stack(largest).tolist() if largest else []
    zero = {value for value, most in zip(squares, maxima, strict=True) if most == 0}
    if getattr(run.parts.task, "kind", None) == "generation":
        zero = set()  # its losses compare two outputs of the critic, whose last bias is in both
    left = [value for value in trained if not kept[value] or value in zero]
    if not left or len(left) == len(trained):
        return None
    names = {value: name for name, value in model.named_parameters()}
    prefix = "model." if isinstance(model, Prepared) else ""
    causes: dict[str, list[str]] = {}
    for value, cause in zip(left, _causes(run, [names.get(value, "?") for value in left]), strict=True):
        causes.setdefault(cause, []).append(names.get(value, "?").removeprefix(prefix))
    found = []
    for cause, shown in causes.items():
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        frozen = f"model.freeze=[{','.join(shown[:MOST_NAMED])}]"
        found.append(f"{', '.join(shown[:MOST_NAMED])}{more}{cause.format(freeze=frozen)}")
    steps = f"in {run.result.num_steps:,} steps"
    return f"{len(left)} of {len(trained)} parameters never got a gradient other than 0 {steps}: {'; '.join(found)}"


def _causes(run: Ended, names: Sequence[str]) -> list[str]:
    model, called = run.parts.model, set[nn.Module]()
    hooks = [one.register_forward_pre_hook(lambda module, _: called.add(module)) for one in model.modules()]
    try:
        outputs = run.outputs()
    finally:
        for hook in hooks:
            hook.remove()
    if outputs is None:
        return [UNUSED] * len(names)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    reached, found = set(map(id, _leaves(outputs))), []
    for name in names:
        owner = modules.get(name.rpartition(".")[0])
        is_cut = owner in called and owner is not None and not list(owner.children())
        is_cut = is_cut and not any(id(value) in reached for value in owner.parameters())  # type: ignore[union-attr]
        found.append(ZEROS if id(parameters.get(name)) in reached else CUT if is_cut else UNUSED)
    return found


def _far_off(run: Ended) -> str | None:
    task = run.parts.task
    if not isinstance(task, Regression) or task.spreads is not None or run.result.num_steps < MANY_STEPS:
        return None
    measured, targets = run.values("val/loss" if task.loss == "mse" else "val/mse")[1], run.validation_targets()
    if targets is None or not np.isfinite(measured).any():
        return None
    mean, spread = targets.mean(0), targets.std(0, correction=0)
    at = int(spread.argmax())
    away, reached = max(abs(float(mean[at])), float(spread[at])), float(np.nanmin(measured))
    if not spread[at] > 0 or 1 / FAR_AWAY < away < FAR_AWAY or reached < float(spread.square().mean()):
        return None
    return (
        f"always predicting the mean is as good: the targets are {mean[at]:.4g} ± {spread[at]:.3g}, and the lowest val/rmse is "
        f"{math.sqrt(reached):.4g}; learn (targets - {mean[at]:.4g}) / {spread[at]:.3g}, as data=table does automatically"
    )


def _stood_still(run: Ended) -> str | None:
    losses = run.values("train/loss")[1]
    if len(losses) < ENOUGH_STEPS or run.parts.precision.scaler.is_enabled():
        return None
    num = max(5, len(losses) // 5)
    first, last = losses[:num], losses[-num:]
    noise = 2 * max(first.std(), last.std()) / math.sqrt(num) + 1e-3 * abs(first.mean())
    if abs(last.mean() - first.mean()) > noise:
        return None
    now = {name: value for name, value in run.parts.model.named_parameters() if name in run.before}
    moved = torch.stack(
        [(_some(value) - run.before[name]).float().square().sum().to("cpu") for name, value in now.items()]
    )
    size = torch.stack([run.before[name].float().square().sum().to("cpu") for name in now])
    change = math.sqrt(float(moved.sum() / size.sum()))
    if not change < TINY_CHANGE:
        return None
    return (
        f"nothing has moved: in {run.result.num_steps:,} steps the weights changed by {change:.0e} of themselves, and train/loss "
        f"stayed at {last.mean():.4g}; use a larger rate than optimizer.lr={run.rate:g}: python -m runner lr-find finds one"
    )


def _overfit(run: Ended) -> str | None:
    (at, measured), (steps, losses) = run.values("val/loss"), run.values("train/loss")
    if len(measured) < ENOUGH_MEASURED or run.parts.limits.patience is not None or run.parts.best.metric != "val/loss":
        return None
    if not math.isfinite(measured[-1]):
        return None
    is_known = np.isfinite(measured)
    at, measured = at[is_known], measured[is_known]
    best = int(measured.argmin())
    best_step, lowest, now = int(at[best]), float(measured[best]), float(measured[-1])
    recent = losses[steps > at[-2]]
    if len(measured) - 1 - best < MEASURED_SINCE or not len(recent) or lowest <= 0:
        return None
    train = float(recent.mean())
    if now < RISEN * lowest or train > FAR_BELOW * now:
        return None
    return (
        f"val/loss rose from {lowest:.4g} (step {best_step:,}, whose weights are kept) to {now:.4g}, and train/loss is {train:.4g}: "
        "it overfits; write train.early_stopping.patience=5, and more optimizer.weight_decay, dropout or data"
    )


#: in the order in which they are given
LOOKS = (
    _random_forward,
    _wrong_outputs,
    _without_gradients,
    _vanished_rate,
    _worse_than_constant,
    _far_off,
    _stood_still,
    _overfit,
)


def _leaves(outputs: Tensor) -> list[Tensor]:
    nodes: list[Any] = [outputs.grad_fn] if outputs.grad_fn is not None else []
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        more = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= more
        nodes += more
    return found


def _last_operation(outputs: Tensor) -> str:
    node: Any = outputs.grad_fn
    while node is not None:
        name = str(node.name()).partition("Backward")[0].removesuffix("Alias") or "Alias"
        if not PASSING.fullmatch(name):
            return name
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return ""


def _is_square(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is not torch.float16  # there a small square is 0


@torch.no_grad()
def _some(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NUM_SAMPLED)][:NUM_SAMPLED].clone()
