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
from runner.tasks.metric_names import CLASSES, NAMED, metrics_for

BY_NAME = "use `'task.metrics={NAME: {_target_: ...}}'`"
COUNTS = {"multiclass": "num_classes", "multilabel": "num_labels"}
#: numbers of one metric that get a name each; more are not useful as curves
MOST_VALUES = 32
#: numbers of predictions that wait on the device for torchmetrics, 64 MB
MOST_WAITING = 2**24
#: that are the same for numbers in any unit, and by torchmetrics, which takes sums of squares below 1e-4 for none, are not
OF_ANY_UNIT = ("R2Score", "ExplainedVariance", "PearsonCorrCoef")


def make_metrics(asked: Any, *, kind: str, num_outputs: int = UNKNOWN, reported: Collection[str] = ()) -> nn.ModuleDict:
    """By name, modules with update(predictions, targets), compute() and reset(), for a task of this kind.

    asked: names ([f1, auroc]: see metric_names.NAMED), or {NAME: an object with those three methods, e.g. torchmetrics', or a
        function (predictions, targets) -> 0-d tensor, which sees a whole split at once}.
    num_outputs: classes, labels or numbers that a row has. reported: names that the task reports already.
    torchmetrics' own checks of values are switched off: they wait for the device in each batch. Its auroc, average_precision
    and spearman are exact: they keep a whole split on the device.
    Raises: RunnerError for anything else, for an unknown number of classes, and if torchmetrics is missing.
    """
    if isinstance(asked, str):
        asked = [asked]
    if not asked:
        return nn.ModuleDict()
    if isinstance(asked, Mapping):
        metrics = {str(name): _gathering(str(name), value, kind) for name, value in asked.items()}
    elif isinstance(asked, Sequence):
        made = _named_metrics([_named(name) for name in asked], kind=kind, num_outputs=num_outputs)
        metrics = {name: TorchMetric(metric, kind=kind) for name, metric in made.items()}
    else:
        problem = "`task.metrics` must be a list of names, or `{NAME: {_target_: ...}}`"
        raise RunnerError.suggest(f"task.metrics={asked}", problem, _example(kind), BY_NAME)
    for name in metrics:
        _check_name(name, reported)
    return nn.ModuleDict(metrics)


class WrappedMetric(nn.Module):
    """An object with the three methods as a module, which is placed with the task if it is one itself."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.metric.update(predictions, targets)

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


class GatheringMetric(WrappedMetric):
    """Gives a metric the predictions and targets of many batches at once; until then they wait on the device."""

    def __init__(self, metric: Any) -> None:
        super().__init__(metric)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._num = 0  # of predicted numbers

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self._parts.append((predictions, targets))
        self._num += predictions.numel()
        if self._num >= MOST_WAITING:
            self._pass_on()

    def compute(self) -> Any:
        self._pass_on()
        return super().compute()

    def reset(self) -> None:
        self._parts, self._num = [], 0
        super().reset()

    def prepared(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Change what the metric gets, (N, ...) each."""
        return predictions, targets

    def _pass_on(self) -> None:
        if self._parts:
            self.metric.update(*self.prepared(*self._joined()))

    def _joined(self) -> tuple[Tensor, Tensor]:
        parts, self._parts, self._num = self._parts, [], 0
        predictions, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        return predictions, targets


class TorchMetric(GatheringMetric):
    """One of torchmetrics, which gets many batches at once: most of them read the device in each update (bincount).

    Of two classes a Binary... gets the second's probability; a regression's gets float64 where the device has it: its sums
    of squares lose a small spread around a big mean in float32. Where the unit does not matter, it is the targets' spread
    around their mean.
    """

    def __init__(self, metric: Any, *, kind: str) -> None:
        super().__init__(metric)
        for part in metric.modules():
            if hasattr(part, "validate_args"):
                part.validate_args = False
        kernel = type(metric.metric if isinstance(metric, MeanOverPresent) else metric).__name__
        self._takes_one = kernel.startswith("Binary") and kind == "multiclass"
        self._is_number = kind in ("regression", "autoencoding")
        self._is_of_any_unit = self._is_number and kernel in OF_ANY_UNIT
        self._unit: tuple[Tensor, Tensor] | None = None  # mean and spread of the first targets, (T,) each
        if type(metric).__module__.startswith("torchmetrics.regression"):
            metric.set_dtype(torch.float64)

    def compute(self) -> Any:
        try:
            return super().compute()
        except ValueError as error:  # r2 of one row: no number, and no reason to end a run
            if "at least two samples" not in str(error):
                raise
            return torch.tensor(math.nan)

    def reset(self) -> None:
        super().reset()
        self._unit = None

    def prepared(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
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
    """One of these over the tokens that count, (K, V) and (K,), many batches at once: to pick them reads the device."""

    def __init__(self, metric: nn.Module, ignore_index: int) -> None:
        super().__init__(metric)
        self._ignore_index = ignore_index

    def update(self, predictions: Tensor, targets: Tensor) -> None:  # (B, T, V), (B, T)
        super().update(predictions.flatten(0, -2), targets.flatten())

    def prepared(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets != self._ignore_index
        return predictions[counts], targets[counts]


class FunctionMetric(GatheringMetric):
    """A function of a split's predictions and targets, which stay on the device until they are all there."""

    def __init__(self, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(function)
        self._name = name

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self._parts.append((predictions, targets))

    def compute(self) -> Tensor | None:
        if not self._parts:
            return None
        value = self.metric(*self._joined())
        if not isinstance(value, Tensor) or value.dim():
            returned = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            fix = "return a 0-d tensor, e.g., by .mean(), or an object with update(), compute() and reset()"
            raise RunnerError.of(f"task.metrics.{self._name}", f"the function returned {returned}", fix)
        return value.detach()

    def reset(self) -> None:
        self._parts = []


def named_values(name: str, found: Any, *, labels: Sequence[str]) -> dict[str, Any]:
    """What compute() gave, each number with its name: f1; of a vector f1_cat, f1_dog; of a dict by its keys.

    labels: of the classes or targets; numbers where there are not as many. Raises: RunnerError for a table, and for more
    than MOST_VALUES numbers.
    """
    if isinstance(found, Mapping):
        return {f"{name}_{_spelled(str(key))}": value for key, value in found.items()}
    if not isinstance(found, Tensor) or found.numel() == 1:
        return {name: found.reshape(()) if isinstance(found, Tensor) else found}
    if found.dim() > 1 or len(found) > MOST_VALUES:
        problem = f"`{name}` gives {tuple(found.shape)} numbers, and up to {MOST_VALUES} in a row get a name each"
        fix = f"use `task.metrics.{name}.average=macro`, or a metric that gives a number"
        raise RunnerError.of(f"task.metrics.{name}", problem, fix)
    spelled = [_spelled(label) for label in labels]
    if len(set(spelled)) != len(found):
        spelled = [str(number) for number in range(len(found))]
    return {f"{name}_{label}": value for label, value in zip(spelled, found.unbind(), strict=True)}


def _named_metrics(names: Sequence[str], *, kind: str, num_outputs: int) -> dict[str, Any]:
    known = metrics_for(kind)
    refuse([_unknown(name, known, kind) for name in names if name not in known])
    if num_outputs == UNKNOWN and kind != "autoencoding":
        problem = "the number of classes, or of values per example, is not known"
        fix = "use `task.num_classes=10`, or `'task.metrics=[]'`"
        raise RunnerError.of(f"task.metrics=[{','.join(names)}]", problem, fix)
    return {name: _make(name, kind, num_outputs) for name in names}


def _make(name: str, kind: str, num_outputs: int) -> Any:
    named = NAMED[name]
    is_binary = kind == "multiclass" and num_outputs == 2 and named.kinds == CLASSES
    arguments = {key: num_outputs if value is None else value for key, value in named.arguments.items()}
    if kind in COUNTS:
        arguments |= {"validate_args": False}
        arguments |= {} if is_binary else {COUNTS[kind]: num_outputs}
        arguments |= {"average": named.average} if named.average and not is_binary else {}
    if arguments.get("top_k", 0) > num_outputs != UNKNOWN:
        problem = f"`{name}` is always 1 with {num_outputs} classes"
        raise RunnerError.of(f"task.metrics=[{name}]", problem, "use `'task.metrics=[]'`, or another metric")
    module = _module("classification" if kind in COUNTS else "regression")
    prefix = ("Binary" if is_binary else kind.capitalize()) if kind in COUNTS else ""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric `.*` will save all", UserWarning)  # make_metrics() says so
        metric = getattr(module, f"{prefix}{named.class_name}")(**arguments)
    if named.average != "none":
        return metric
    return MeanOverPresent(metric, getattr(module, f"{prefix}StatScores")(**arguments), needs_both=named.needs_both)


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


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{name}")
    except ModuleNotFoundError as error:
        problem = f"named metrics need `{error.name}`, which is not installed"
        raise not_installed("task.metrics", problem, "metrics") from None


def _unknown(name: str, known: Sequence[str], kind: str) -> Problem:
    ours = value_for("task.metrics", name)
    ways = [f"task.metrics=[{hit}]" for hit in ([ours] if ours in known else nearest(name, known))]
    otherwise = f"use a metric that conf/README.md lists, or {BY_NAME.removeprefix('use ')}"
    problem = f"there is no metric `{name}` for a task of kind {kind}"
    return Problem.suggest(f"task.metrics=[{name}]", problem, ways, otherwise)


def _gathering(name: str, value: Any, kind: str) -> nn.Module:
    if isinstance(value, nn.Module) and type(value).__module__.startswith("torchmetrics."):
        return TorchMetric(value, kind=kind)
    if isinstance(value, type):
        problem = f"{value.__name__} is a class, and a metric is one of it"
        raise RunnerError.suggest(f"task.metrics.{name}", problem, [f"task.metrics.{name}._partial_=false"])
    if all(callable(getattr(value, method, None)) for method in ("update", "compute", "reset")):
        return WrappedMetric(value)
    if callable(value):
        return FunctionMetric(name, value)
    problem = f"`task.metrics.{name}` is {value!r}, and a metric is an object with update(), compute() and reset(), or a function"
    ways = [f"task.metrics=[{value}]"] if isinstance(value, str) and value in metrics_for(kind) else _example(kind)
    raise RunnerError.suggest(f"task.metrics.{name}={value}", problem, ways, BY_NAME)


def _named(name: Any) -> str:
    if isinstance(name, str):
        return name
    problem = "a list of metrics holds names; one with arguments needs a key"
    raise RunnerError.of(f"task.metrics=[{name}]", problem, BY_NAME)


def _check_name(name: str, reported: Collection[str]) -> None:
    if name in reported:
        problem = f"the task already reports {name}"
        raise RunnerError.of(f"task.metrics.{name}", problem, f"use another name, e.g., `{name}_of_torchmetrics`")
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or hasattr(nn.ModuleDict, name):
        problem = (
            "a metric's name is part of val/NAME: letters, digits, _ and -, and not a method of torch's ModuleDict"
        )
        raise RunnerError.of(f"task.metrics.{name}", problem, f"use another name, e.g., `{_spelled(name)}_value`")


def _spelled(label: str) -> str:
    return re.sub(r"[^\w-]+", "_", label).strip("_") or "_"


def _precise(tensor: Tensor) -> Tensor:
    tensor = tensor.to(legal_dtype(torch.float64, tensor.device))
    return tensor[:, 0] if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def _example(kind: str) -> list[str]:
    names = metrics_for(kind)[:2]
    return [f"task.metrics=[{','.join(names)}]"] * bool(names)
