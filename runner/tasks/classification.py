"""Task: computes cross-entropy and accuracy from logits and classes or labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Share, one_of
from runner.device.precision import at_least_float32
from runner.errors import RunnerError
from runner.tasks.checks import UNKNOWN, described, wider
from runner.tasks.task import BuiltinTask

KINDS = ("auto", "multiclass", "multilabel")


class Classification(BuiltinTask):
    """Reports cross-entropy and accuracy.

    multiclass: targets are class indices, (B,) int64, or probabilities of the classes, (B, C), as mixup makes them, whose
    stronger class is right. The model gives logits, (B, C); for two classes also one logit per row, (B,) or (B, 1).
    multilabel: targets are (B, C) of 0 and 1, a separate question for each label; the accuracy is over all of them.

    class_weights: the weight of a row of each class, or of each label; "balanced" gives all classes the same part in the
    training split. The loss is the mean of weight * loss over the rows; torch's, which divides by the weights of the
    batch, would depend on which rows are in one.
    """

    name = "classification"
    converts_data = True
    class_weights: Tensor | None

    def __init__(
        self,
        label_smoothing: Share = 0.0,
        *,
        kind: Annotated[str, one_of(KINDS)] = "auto",
        num_classes: int | None = UNKNOWN,
        num_outputs: int = UNKNOWN,
        is_multilabel: bool = False,
        class_counts: Sequence[int] | None = None,
        class_weights: str | Sequence[float] | None = None,
        output: int | str | None = None,
        metrics: Any = None,
        plots: Any = True,
    ) -> None:
        """num_classes, num_outputs, is_multilabel, class_counts: of the data. Raises: RunnerError for data that it does not suit."""
        kind = _kind(kind, num_classes, is_multilabel=is_multilabel)
        count = num_outputs if kind == "multilabel" else (num_classes or UNKNOWN)
        super().__init__(kind, metrics=metrics, plots=plots, num_outputs=count, output=output)
        self.num_classes = count
        self.label_smoothing = float(label_smoothing)
        weights = _weights(class_weights, class_counts, count, kind=kind)
        self.register_buffer("class_weights", weights, persistent=False)

    def outputs(self, model: nn.Module, batch: Any, /) -> Tensor:
        outputs = super().outputs(model, batch)
        if not outputs.is_floating_point():
            problem = f"the model gives {described(outputs)} of {outputs.dtype}: argmax can't be trained"
            fix = f"return the scores, ({len(outputs)}, {self.num_classes}), without argmax"
            raise RunnerError.of("task=classification", problem, fix)
        is_one_logit = outputs.dim() == 1 or outputs.shape[1] == 1
        if self.kind == "multiclass" and self.num_classes == 2 and is_one_logit:
            logit = outputs.reshape(-1)  # its sigmoid is the softmax of (0, logit)
            return torch.stack([torch.zeros_like(logit), logit], dim=1)
        if self.num_classes != UNKNOWN and outputs.shape[1:2] != (self.num_classes,):
            problem = f"the model gives {tuple(outputs.shape)}, and the data has {self.num_classes} classes"
            raise RunnerError.of("task=classification", problem, wider(model, self.num_classes))
        return outputs

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        targets: Tensor = batch[1]
        if self.kind == "multiclass" and outputs.dim() != targets.dim() + (not targets.is_floating_point()):
            num_classes = "C" if self.num_classes == UNKNOWN else self.num_classes
            shape = tuple(outputs.shape)
            expected = f"({', '.join(map(str, (len(targets), num_classes, *targets.shape[1:])))})"
            problem = f"the model gives {shape}, and targets of shape {tuple(targets.shape)} need one score per class"
            raise RunnerError.of("task=classification", problem, f"return scores of shape {expected} from `forward`")
        loss = self._loss(outputs, targets)
        with torch.no_grad():
            classes = (outputs > 0).long() if self.kind == "multilabel" else outputs.argmax(1)
            accuracy = (classes == self.targets(batch)).mean(dtype=at_least_float32(loss).dtype)
        return {"loss": loss, "accuracy": accuracy}

    def predictions(self, outputs: Tensor, /) -> Tensor:
        outputs = at_least_float32(outputs)
        return outputs.sigmoid() if self.kind == "multilabel" else outputs.softmax(1)

    def targets(self, batch: Any, /) -> Tensor:
        targets = super().targets(batch)
        if self.kind == "multilabel":
            return (targets > 0.5).long()
        return targets.argmax(1) if targets.is_floating_point() else targets

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing, weight = self.label_smoothing, self.class_weights
        if self.kind == "multilabel":
            smoothed = targets.to(logits.dtype) * (1 - smoothing) + smoothing / 2
            return F.binary_cross_entropy_with_logits(logits, smoothed, weight)
        if weight is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        total = F.cross_entropy(logits, targets, weight=weight, label_smoothing=smoothing, reduction="sum")
        return total / (logits.numel() // logits.shape[1])


def _kind(kind: str, num_classes: int | None, *, is_multilabel: bool) -> str:
    if kind == "auto" and is_multilabel:
        return "multilabel"
    if kind == "multilabel" and num_classes not in (None, UNKNOWN):
        problem = f"each row of this data is one of {num_classes} classes"
        fix = "use `task.kind=auto`, or data with a column of 0 and 1 for each label"
        raise RunnerError.of("task.kind=multilabel", problem, fix, code="bad-value")
    if kind != "multilabel" and num_classes is None:
        problem = "the targets of this data are numbers, and nothing says that they are classes"
        fix = "use `task=regression`, or `data.kind=classification` if the numbers are classes (in a custom Dataset: integer targets)"
        fix += ", or `task.kind=multilabel` if each of them is 0 or 1"
        raise RunnerError.of("task=classification", problem, fix)
    return "multiclass" if kind == "auto" else kind


def _weights(requested: Any, counts: Sequence[int] | None, num_classes: int, *, kind: str) -> Tensor | None:
    if requested is None:
        return None
    example = "'task.class_weights=[1.0,2.0]'"
    if requested == "balanced":
        if counts is None or kind == "multilabel":
            what = "the classes of this data are" if counts is None else "labels are"
            problem = f"{what} not counted" + (" before it is read" if counts is None else "")
            raise RunnerError.of("task.class_weights=balanced", problem, f"use `{example}`, one for each class")
        counted = torch.tensor(list(counts), dtype=torch.float64)
        present = counted > 0  # a class that the training split lacks has no part to balance
        weights = counted.sum() / (present.sum() * counted.clamp(min=1))
        return torch.where(present, weights, 1.0).to(torch.get_default_dtype())
    values = list(requested) if isinstance(requested, Sequence) and not isinstance(requested, str) else []
    if not values or not all(type(value) in (int, float) and value >= 0 for value in values):
        problem = "`task.class_weights` must be null, balanced or a list of numbers, 0 or more each"
        raise RunnerError.suggest(f"task.class_weights={requested}", problem, ["task.class_weights=balanced", example])
    if num_classes not in (UNKNOWN, len(values)):
        problem = f"these are {len(values)} weights, and there are {num_classes} classes"
        fix = f"give {num_classes} weights, or use `task.class_weights=balanced`"
        raise RunnerError.of(f"task.class_weights={values}", problem, fix)
    return torch.tensor(values, dtype=torch.get_default_dtype())
