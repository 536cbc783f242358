"""Task: computes cross-entropy and accuracy from logits and classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import choice, probability
from runner.device.precision import at_least_float32
from runner.errors import RunnerError
from runner.tasks.checks import UNKNOWN, described, wider
from runner.tasks.task import BuiltinTask

KINDS = ("auto", "multiclass", "multilabel")


class Classification(BuiltinTask):
    """Cross-entropy and the part that is right.

    multiclass: targets are class indices, (B,) int64, or probabilities of the classes, (B, C), as mixup makes them: their
    stronger class is the right one. The model gives logits, (B, C); of two classes also one logit a row, (B,) or (B, 1).
    multilabel: targets are (B, C) of 0 and 1, each label a separate question, and the accuracy is over all of them.

    class_weights: what a row of each class, or each label, counts for; "balanced" weighs classes so that all have the
    same part in the training split. The loss is the mean of weight * loss over the rows: torch's divides by the
    weights of the batch, and would depend on which rows meet in one.
    """

    name = "classification"
    converts_data = True
    class_weights: Tensor | None

    def __init__(
        self,
        label_smoothing: float = 0.0,
        *,
        kind: str = "auto",
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
        reported = ("loss", "accuracy")
        super().__init__(kind, reported=reported, metrics=metrics, plots=plots, num_outputs=count, output=output)
        self.num_classes = count
        self.label_smoothing = probability(label_smoothing, key="task.label_smoothing")
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
        targets = batch[1]
        if self.kind == "multilabel":
            return self._judge_labels(outputs, targets)
        loss = self._cross_entropy(outputs, targets)
        with torch.no_grad():
            right = targets.argmax(1) if targets.is_floating_point() else targets
            accuracy = (outputs.argmax(1) == right).mean(dtype=at_least_float32(loss).dtype)
        return {"loss": loss, "accuracy": accuracy}

    def predictions(self, outputs: Tensor, /) -> Tensor:
        outputs = at_least_float32(outputs)
        return outputs.sigmoid() if self.kind == "multilabel" else outputs.softmax(1)

    def targets(self, batch: Any, /) -> Tensor:
        targets = super().targets(batch)
        if self.kind == "multilabel":
            return targets.long()
        return targets.argmax(1) if targets.is_floating_point() else targets

    def _cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.class_weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=self.label_smoothing)
        count = logits.numel() // logits.shape[1]
        smoothing, weight = self.label_smoothing, self.class_weights
        total = F.cross_entropy(logits, targets, weight=weight, label_smoothing=smoothing, reduction="sum")
        return total / count

    def _judge_labels(self, logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        wanted = targets.to(logits.dtype)
        with torch.no_grad():
            accuracy = ((logits > 0) == (wanted > 0.5)).mean(dtype=at_least_float32(logits).dtype)
        smoothed = wanted * (1 - self.label_smoothing) + self.label_smoothing / 2
        return {"loss": F.binary_cross_entropy_with_logits(logits, smoothed, self.class_weights), "accuracy": accuracy}


def _kind(asked: str, num_classes: int | None, *, is_multilabel: bool) -> str:
    kind = choice(asked, KINDS, key="task.kind")
    if kind == "auto" and is_multilabel:
        return "multilabel"
    if kind == "multilabel" and num_classes not in (None, UNKNOWN):
        problem = f"each row of this data is one of {num_classes} classes"
        fix = "use `task.kind=auto`, or data with a column of 0 and 1 for each label"
        raise RunnerError.of("task.kind=multilabel", problem, fix, code="bad-value")
    if kind != "multilabel" and num_classes is None:
        problem = "the targets of this data are numbers, and nothing says that they are classes"
        fix = (
            "use `task=regression`, or `data.kind=classification` if the numbers are classes (in a custom Dataset: "
            "integer targets), or `task.kind=multilabel` if each of them is 0 or 1"
        )
        raise RunnerError.of("task=classification", problem, fix)
    return "multiclass" if kind == "auto" else kind


def _weights(asked: Any, counts: Sequence[int] | None, num_classes: int, *, kind: str) -> Tensor | None:
    if asked is None:
        return None
    example = "'task.class_weights=[1.0,2.0]'"
    if asked == "balanced":
        if counts is None or kind == "multilabel":
            problem = (
                "the classes of this data are not counted before it is read"
                if counts is None
                else "labels are not counted"
            )
            raise RunnerError.of("task.class_weights=balanced", problem, f"use `{example}`, one for each class")
        counted = torch.tensor(list(counts), dtype=torch.float64)
        present = counted > 0  # a class that the training split lacks has no part to balance
        weights = counted.sum() / (present.sum() * counted.clamp(min=1))
        return torch.where(present, weights, 1.0).to(torch.get_default_dtype())
    values = list(asked) if isinstance(asked, Sequence) and not isinstance(asked, str) else []
    if not values or not all(type(value) in (int, float) and value >= 0 for value in values):
        problem = "`task.class_weights` must be null, balanced or a list of numbers, 0 or more each"
        raise RunnerError.suggest(f"task.class_weights={asked}", problem, ["task.class_weights=balanced", example])
    if num_classes not in (UNKNOWN, len(values)):
        problem = f"these are {len(values)} weights, and there are {num_classes} classes"
        raise RunnerError.of(
            f"task.class_weights={values}",
            problem,
            f"give {num_classes} weights, or use `task.class_weights=balanced`",
        )
    return torch.tensor(values, dtype=torch.get_default_dtype())
