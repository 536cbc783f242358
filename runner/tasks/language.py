"""Task: computes cross-entropy and accuracy of next tokens over all positions, from logits and the tokens that came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Check
from runner.device.precision import at_least_float32
from runner.errors import RunnerError
from runner.tasks.checks import inputs_of, output_of
from runner.tasks.metrics import TokenMetric
from runner.tasks.task import BuiltinTask

NUM_TOKENS = Check(lambda value: type(value) is int and value >= 0, "a whole number, 0 or more", "200")


class Language(BuiltinTask):
    """Targets are the tokens that follow, (B, T) int64; the model gives logits (B, T, V), or an object with `.logits`.

    ignore_index: targets that do not count (padding); a batch without others has a loss of 0.
    bytes_per_token: of the text, for bits per byte, which compares models of different vocabularies; None: unknown.
    sample_tokens: of the text that is written at the end of a run.
    metrics: see make_metrics(); they get the tokens that count, (K, V) and (K,).
    num_classes: of the data, None if the targets are tokens.
    Raises: RunnerError for data with classes, and for a model that does not return (B, T, V).
    """

    name = kind = "language"

    def __init__(
        self,
        *,
        num_classes: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        bytes_per_token: float | None = None,
        sample_tokens: Annotated[int, NUM_TOKENS] = 200,
        output: int | str | None = None,
        metrics: Any = None,
    ) -> None:
        if num_classes is not None:
            problem = f"each row of this data is one of {num_classes} classes, and the targets here are the tokens that follow"
            raise RunnerError.suggest("task=language", problem, ["task=classification", "data=text"])
        super().__init__(self.kind, metrics=metrics, output=output)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.bytes_per_token, self.sample_tokens = bytes_per_token, sample_tokens
        for name, metric in self.metrics.items():
            self.metrics[name] = TokenMetric(metric, ignore_index)

    def outputs(self, model: nn.Module, batch: tuple[Any, Tensor], /) -> Tensor:
        outputs = model(inputs_of(batch, task=self.name))
        if self.output is None:
            outputs = getattr(outputs, "logits", outputs)
        return output_of(outputs, self.output, task=self.name)

    def judge(self, outputs: Tensor, batch: tuple[Any, Tensor], /) -> dict[str, Tensor]:
        targets = batch[1]
        if outputs.dim() != targets.dim() + 1 or outputs.shape[:-1] != targets.shape:
            problem = f"the model gives {tuple(outputs.shape)}, and {tuple(targets.shape)} tokens are to be predicted"
            fix = "use `model=gpt`, `model=gru model.pooling=each`, or a model that gives (B, T, V)"
            raise RunnerError.of("task=language", problem, fix)
        settings: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum", **settings)
        with torch.no_grad():
            counts = targets != self.ignore_index
            num_counted = counts.sum().clamp(min=1)
            num_right = ((outputs.argmax(-1) == targets) & counts).sum()
            accuracy = num_right.to(at_least_float32(losses).dtype) / num_counted
        return {"loss": losses / num_counted, "accuracy": accuracy}

    def num_counted(self, batch: tuple[Any, Tensor], /) -> Tensor:
        """Return the number of targets that count, () int64; a split's values are means over these in all batches."""
        return (batch[1] != self.ignore_index).sum()

    def predictions(self, outputs: Tensor, /) -> Tensor:
        """Return probabilities of the next token, (B, T, V)."""
        return at_least_float32(outputs).softmax(-1)

    def derived(self, values: Mapping[str, float], /) -> Mapping[str, float]:
        """Return the perplexity, exp(loss), and bits_per_byte if bytes per token are known; nothing for a smoothed loss."""
        loss = values.get("loss")
        if loss is None or self.label_smoothing:
            return {}
        values = {"perplexity": math.inf if loss > 700 else math.exp(loss)}
        if self.bytes_per_token:
            values["bits_per_byte"] = loss / math.log(2) / self.bytes_per_token
        return values
