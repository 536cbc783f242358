"""Makes the configured metrics: modules that gather a split's predictions on the device, batch by batch."""

from __future__ import annotations

import importlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.other_names import value_for
from runner.config.packages import not_installed
from runner.device.capabilities import legal_dtype
from runner.errors import Problem, RunnerError, nearest, refuse
from runner.tasks.checks import UNKNOWN
from runner.tasks.metric_names import CLASSES, NAMED, NUMBERS, metrics_for

BY_NAME = "use `'task.metrics={NAME: {_target_: ...}}'`"
COUNTS = {"multiclass": "num_classes", "multilabel": "num_labels"}
#: maximum numbers of one metric that get a name each; more are not useful as curves
MAX_VALUES = 32
#: predicted numbers that wait on the device for torchmetrics, 64 MB
MAX_WAITING = 2**24
#: classes whose values do not depend on the unit, except that torchmetrics takes sums of squares below 1e-4 for 0
UNIT_FREE = ("R2Score", "ExplainedVariance", "PearsonCorrCoef")


def make_metrics(
    requested: Any, *, kind: str, num_outputs: int = UNKNOWN, reported: Collection[str] = ()
) -> nn.ModuleDict:
    """Make modules with update(predictions, targets), compute() and reset(), by name, for a kind of task.

    torchmetrics' own checks of values are switched off: they wait for the device in each batch. Its auroc, average_precision
    and spearman are exact: they keep a whole split on the device.

    Args:
        requested: Names ([f1, auroc]: see metric_names.NAMED), or {NAME: an object with those three methods, e.g.
            torchmetrics', or a function (predictions, targets) -> 0-d tensor, which sees a whole split at once}.
        num_outputs: Classes, labels or numbers of a row.
        reported: Names that the task reports already.

    Raises:
        RunnerError: Anything else, an unknown number of classes, or torchmetrics is missing.
    """
    if isinstance(requested, str):
        requested = [requested]
    if not requested:
        return nn.ModuleDict()
    if isinstance(requested, Mapping):
        return nn.ModuleDict(
            {_checked_name(name, reported): _custom(name, value, kind) for name, value in requested.items()}
        )
    if isinstance(requested, Sequence):
        return nn.ModuleDict(_named_metrics(requested, kind=kind, num_outputs=num_outputs))
    problem = "`task.metrics` must be a list of names, or `{NAME: {_target_: ...}}`"
    raise RunnerError.suggest(f"task.metrics={requested}", problem, _example(kind), BY_NAME)


class GatheringMetric(nn.Module):
    """Passes the predictions and targets of many batches on to a metric at once; until then they wait on the device."""

    def __init__(self, metric: Any, *, max_waiting: float = 0) -> None:
        """max_waiting: Predicted numbers at which they are passed on; 0: each batch separately."""
        super().__init__()
        self.metric = metric  # placed with the task if it is a module
        self._max_waiting = max_waiting
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._num = 0  # of predicted numbers

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self._parts.append((predictions, targets))
        self._num += predictions.numel()
        if self._num >= self._max_waiting:
            self._pass_on()

    def compute(self) -> Any:
        self._pass_on()
        return self.metric.compute()

    def reset(self) -> None:
        self._parts, self._num = [], 0
        self.metric.reset()

    def prepare(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Change what the metric gets, (N, ...) each."""
        return predictions, targets

    def _pass_on(self) -> None:
        if self._parts:
            self.metric.update(*self.prepare(*self._take()))

    def _take(self) -> tuple[Tensor, Tensor]:
        parts, self._parts, self._num = self._parts, [], 0
        if len(parts) == 1:
            return parts[0]
        predictions, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        return predictions, targets


class TorchMetric(GatheringMetric):
    """One of torchmetrics, which gets many batches at once: most of them read the device in each update (bincount).

    Of two classes a Binary... gets the second's probability; a regression's gets float64 where the device has it: its sums
    of squares lose a small spread around a big mean in float32. Where the unit does not matter, it is the targets' spread
    around their mean.
    """

    def __init__(self, metric: Any, *, kind: str) -> None:
        super().__init__(metric, max_waiting=MAX_WAITING)
        for part in metric.modules():
            if hasattr(part, "validate_args"):
                part.validate_args = False
        kernel = type(metric.metric if isinstance(metric, MeanOverPresent) else metric).__name__
        self._takes_one = kernel.startswith("Binary") and kind == "multiclass"
        self._is_number = kind in NUMBERS
        self._is_of_any_unit = self._is_number and kernel in UNIT_FREE
        self._unit: tuple[Tensor, Tensor] | None = None  # mean and spread of the first targets, (T,) each
        if type(metric).__module__.startswith("torchmetrics.regression"):
            metric.set_dtype(torch.float64)

    def compute(self) -> Any:
        try:
            return super().compute()
        except ValueError as error:  # r2 of one row is not a reason to end a run
            if "at least two samples" not in str(error):
                raise
            return torch.tensor(math.nan)

    def reset(self) -> None:
        super().reset()
        self._unit = None

    def prepare(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self._takes_one:
            predictions = predictions[:, 1]
        if self._is_number:
            predictions, targets = _precise(predictions), _precise(targets)
        if self._is_of_any_unit:
            if self._unit is None:
                spread = targets.std(0, correction=0)
                self._unit = targets.mean(0), torch.where(spread > 0, spread, 1)
            mean, spread = self._unit
            predictions, targets = (predictions - mean) / spread, (targets - mean) / spread
        return predictions, targets


class TokenMetric(GatheringMetric):
    """Passes on only the tokens that count, (K, V) and (K,), of many batches at once: selecting them reads the device."""

    def __init__(self, metric: nn.Module, ignore_index: int) -> None:
        super().__init__(metric, max_waiting=MAX_WAITING)
        self._ignore_index = ignore_index

    def update(self, predictions: Tensor, targets: Tensor) -> None:  # (B, T, V), (B, T)
        super().update(predictions.flatten(0, -2), targets.flatten())

    def prepare(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets != self._ignore_index
        return predictions[counts], targets[counts]


class FunctionMetric(GatheringMetric):
    """Computes a function of a split's predictions and targets, all of which wait on the device."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(function, max_waiting=math.inf)
        self._name = name

    def compute(self) -> Tensor | None:
        if not self._parts:
            return None
        value = self.metric(*self._take())
        if not isinstance(value, Tensor) or value.dim():
            returned = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            fix = "return a 0-d tensor, e.g., by .mean(), or an object with update(), compute() and reset()"
            raise RunnerError.of(f"task.metrics.{self._name}", f"the function returned {returned}", fix)
        return value.detach()

    def reset(self) -> None:
        self._parts = []


class MeanOverPresent(nn.Module):
    """The mean of a metric over the classes that have examples, as in scikit-learn; NaN if no class has any.

    torchmetrics (1.8) counts a class that a split lacks as 0.
    """

    def __init__(self, metric: Any, counts: Any, *, needs_both: bool) -> None:
        super().__init__()
        self.metric, self.counts, self.needs_both = metric, counts, needs_both

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.metric.update(predictions, targets)
        self.counts.update(predictions, targets)

    def compute(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No (positive|negative) samples", UserWarning)
            values: Tensor = self.metric.compute()  # (C,), or () for two classes
        scores = self.counts.compute()  # (C, 5): true and false positives, true and false negatives, examples
        own, total = scores[..., 4], scores[..., :4].sum(-1)
        counted = (own > 0) & (own < total) if self.needs_both else own > 0
        mean: Tensor = values.where(counted, 0).sum() / counted.sum()
        return mean

    def reset(self) -> None:
        self.metric.reset()
        self.counts.reset()


def named_values(name: str, value: Any, *, labels: Sequence[str]) -> dict[str, Any]:
    """Name each number that compute() returned: f1; of a vector f1_cat, f1_dog; of a dict by its keys.

    Args:
        labels: Of the classes or targets; numbers are used if there are not as many.

    Raises:
        RunnerError: A table, or more than MAX_VALUES numbers.
    """
    if isinstance(value, Mapping):
        return {f"{name}_{_spelled(str(key))}": part for key, part in value.items()}
    if not isinstance(value, Tensor) or value.numel() == 1:
        return {name: value.reshape(()) if isinstance(value, Tensor) else value}
    if value.dim() > 1 or len(value) > MAX_VALUES:
        problem = f"`{name}` gives {tuple(value.shape)} numbers, and up to {MAX_VALUES} in a row get a name each"
        fix = f"use `task.metrics.{name}.average=macro`, or a metric that gives a number"
        raise RunnerError.of(f"task.metrics.{name}", problem, fix)
    spelled = [_spelled(label) for label in labels]
    if len(set(spelled)) != len(value):
        spelled = [str(number) for number in range(len(value))]
    return {f"{name}_{label}": part for label, part in zip(spelled, value.unbind(), strict=True)}


def _named_metrics(names: Sequence[Any], *, kind: str, num_outputs: int) -> dict[str, nn.Module]:
    for name in names:
        if not isinstance(name, str):
            problem = "a list of metrics holds names; one with arguments needs a key"
            raise RunnerError.of(f"task.metrics=[{name}]", problem, BY_NAME)
    known = metrics_for(kind)
    refuse([_unknown(name, known, kind) for name in names if name not in known])
    if num_outputs == UNKNOWN and kind != "autoencoding":
        problem = "the number of classes, or of values per example, is not known"
        fix = "use `task.num_classes=10`, or `'task.metrics=[]'`"
        raise RunnerError.of(f"task.metrics=[{','.join(names)}]", problem, fix)
    return {name: TorchMetric(_make(name, kind, num_outputs), kind=kind) for name in names}


def _unknown(name: str, known: Sequence[str], kind: str) -> Problem:
    ours = value_for("task.metrics", name)
    ways = [f"task.metrics=[{hit}]" for hit in ([ours] if ours in known else nearest(name, known))]
    otherwise = f"use a metric that conf/README.md lists, or {BY_NAME.removeprefix('use ')}"
    problem = f"there is no metric `{name}` for a task of kind {kind}"
    return Problem.suggest(f"task.metrics=[{name}]", problem, ways, otherwise)


def _make(name: str, kind: str, num_outputs: int) -> Any:
    named = NAMED[name]
    is_binary = kind == "multiclass" and num_outputs == 2 and named.kinds == CLASSES
    arguments = {key: num_outputs if value is None else value for key, value in named.arguments.items()}
    if kind in COUNTS:
        arguments["validate_args"] = False  # it would refuse a single label
    if kind in COUNTS and not is_binary:
        arguments |= {COUNTS[kind]: num_outputs} | ({"average": named.average} if named.average else {})
    if arguments.get("top_k", 0) > num_outputs != UNKNOWN:
        problem = f"`{name}` is always 1 with {num_outputs} classes"
        raise RunnerError.of(f"task.metrics=[{name}]", problem, "use `'task.metrics=[]'`, or another metric")
    try:
        module = importlib.import_module(f"torchmetrics.{'classification' if kind in COUNTS else 'regression'}")
    except ModuleNotFoundError as error:
        problem = f"named metrics need `{error.name}`, which is not installed"
        raise not_installed("task.metrics", problem, "metrics") from None
    prefix = ("Binary" if is_binary else kind.capitalize()) if kind in COUNTS else ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `.*` will save all", UserWarning)  # make_metrics() says so
        metric = getattr(module, f"{prefix}{named.class_name}")(**arguments)
    if named.average != "none":
        return metric
    return MeanOverPresent(metric, getattr(module, f"{prefix}StatScores")(**arguments), needs_both=named.needs_both)


def _custom(name: str, value: Any, kind: str) -> nn.Module:
    if isinstance(value, nn.Module) and type(value).__module__.startswith("torchmetrics."):
        return TorchMetric(value, kind=kind)
    if isinstance(value, type):
        problem = f"{value.__name__} is a class, and a metric is one of it"
        raise RunnerError.suggest(f"task.metrics.{name}", problem, [f"task.metrics.{name}._partial_=false"])
    if all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset")):
        return GatheringMetric(value)
    if callable(value):
        return FunctionMetric(name, value)
    problem = f"`task.metrics.{name}` is {value!r}, and a metric is an object with update(), compute() and reset(), or a function"
    ways = [f"task.metrics=[{value}]"] if isinstance(value, str) and value in metrics_for(kind) else _example(kind)
    raise RunnerError.suggest(f"task.metrics.{name}={value}", problem, ways, BY_NAME)


def _checked_name(name: Any, reported: Collection[str]) -> str:
    problem, other = "", f"{_spelled(str(name))}_value"
    if name in reported:
        problem, other = f"the task already reports {name}", f"{name}_of_torchmetrics"
    elif not re.fullmatch(r"[A-Za-z0-9_-]+", str(name)) or hasattr(nn.ModuleDict, str(name)):
        problem = (
            "a metric's name is part of val/NAME: letters, digits, _ and -, and not a method of torch's ModuleDict"
        )
    if problem:
        raise RunnerError.of(f"task.metrics.{name}", problem, f"use another name, e.g., `{other}`")
    return str(name)


def _spelled(label: str) -> str:
    return re.sub(r"[^\w-]+", "_", label).strip("_") or "_"


def _precise(tensor: Tensor) -> Tensor:
    tensor = tensor.to(legal_dtype(torch.float64, tensor.device))
    return tensor[:, 0] if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def _example(kind: str) -> list[str]:
    names = metrics_for(kind)[:2]
    return [f"task.metrics=[{','.join(names)}]"] * bool(names)
