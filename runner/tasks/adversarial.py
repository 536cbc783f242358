"""Task: a generator and a critic learn against each other; reports how far generated rows are from real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from runner.device.precision import at_least_float32
from runner.errors import RunnerError
from runner.tasks.task import BuiltinTask


class Adversarial(BuiltinTask):
    """Relativistic losses of a `critic` and a `generator`, each with an optimizer (Jolicoeur-Martineau 2019).

    They say which of a real row and a generated row is real, so the generator has to find all kinds of rows.
    A batch is (inputs, anything) or only the inputs; a model has generate(real) and critic(rows), like runner.models.GAN.
    A split is measured by the energy distance of generated rows to its rows (Szekely and Rizzo 2013), about 0 if both are
    alike. The same random numbers generate rows each time, so that epochs can be compared.
    """

    name = "adversarial"
    kind = "generation"
    converts_data = True
    turns = ("critic", "generator")

    def __init__(self, *, metrics: Any = None, plots: Any = True) -> None:
        super().__init__(self.kind, metrics=metrics, plots=plots)

    def __call__(self, model: Any, batch: Any, /, turn: str | None = None) -> dict[str, Tensor]:
        if turn is None:
            return self.judge(self.outputs(model, batch), batch)
        real = _real(batch)
        with torch.set_grad_enabled(turn == "generator"):
            generated = model.generate(real)
        more_real = model.critic(real) - model.critic(generated)
        return {"loss": softplus(more_real if turn == "generator" else -more_real).mean()}

    def check_model(self, model: nn.Module, *, keeps_inputs: bool, data: str) -> None:
        if not hasattr(model, "generate"):
            problem = f"{type(model).__name__} has no generate(real) and critic(rows)"
            fix = "use `model=gan`, on data that needs no layer before the model (`data=playground`, `data=arrays`)"
            raise RunnerError.of("task=adversarial", problem, fix)

    def outputs(self, model: Any, batch: Any, /) -> Tensor:
        real = _real(batch)
        rows: Tensor = model.generate(real, draw=torch.Generator(real.device).manual_seed(0))
        return rows

    def judge(self, outputs: Tensor, batch: Any, /) -> dict[str, Tensor]:
        return {"loss": energy_distance(self.predictions(outputs), at_least_float32(self.targets(batch)))}

    def predictions(self, outputs: Tensor, /) -> Tensor:
        return at_least_float32(outputs).flatten(1)

    def targets(self, batch: Any, /) -> Tensor:
        return _real(batch).flatten(1)


def energy_distance(one: Tensor, other: Tensor) -> Tensor:  # (N, F), (M, F)
    """Return twice the mean distance between rows of both, less the mean distances of different rows within each.

    The number of rows does not change it. It is below 0 as often as above if both are alike.
    """
    within = [torch.cdist(rows, rows).sum() / max(1, len(rows) * (len(rows) - 1)) for rows in (one, other)]
    return 2 * torch.cdist(one, other).mean() - within[0] - within[1]


def _real(batch: Any) -> Tensor:
    rows: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
    return rows / 255 if rows.dtype == torch.uint8 else rows  # images
