"""A model and a partial optimizer from YAML go in; the optimizer, its schedule and the averaged weights come out."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

#: device types whose fused optimizer kernels take a step in one launch (on the CPU 343 us against 453, facts of 2026-11)
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def make_optimizer(make: Callable[..., Optimizer], model: nn.Module, *, device: torch.device) -> Optimizer:
    """The optimizer over the parameters that train; fused where the device and the optimizer have it and YAML says nothing."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen: dict[str, Any] = getattr(make, "keywords", {})
    asked = any(chosen.get(name) is not None for name in ("fused", "foreach", "capturable", "differentiable"))
    floating = all(parameter.is_floating_point() for parameter in parameters)
    if not asked and floating and device.type in FUSED_DEVICES and _takes_fused(make):
        try:
            return make(parameters, fused=True)
        except RuntimeError:
            pass  # this optimizer has no fused kernel for this device; torch says so when it is made
    return make(parameters)


def _takes_fused(make: Callable[..., Optimizer]) -> bool:

    target = make.func if isinstance(make, partial) else make
    return "fused" in inspect.signature(target).parameters


def warmup_cosine(
    optimizer: Optimizer, *, num_steps: int, warmup_fraction: float = 0.1, final_fraction: float = 0.0
) -> LRScheduler:
    """Linear warm-up over the first part of `num_steps`, then half a cosine down to `final_fraction` of the rate."""
    warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


class AveragedWeights:
    """An exponential moving average of a model's weights, kept on the device: average += (1 - decay) * (weight - average).

    torch's AveragedModel asks a tensor counter in each update, which reads the device; this does not.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._decay = decay
        pairs = list(zip(self.model.state_dict().values(), model.state_dict().values(), strict=True))
        self._floating = [(mean, now) for mean, now in pairs if now.is_floating_point()]
        self._whole = [(mean, now) for mean, now in pairs if not now.is_floating_point()]
        self._means = [mean for mean, _ in self._floating]
        self._now = [now for _, now in self._floating]

    @torch.no_grad()
    def update(self) -> None:
        """One multi-tensor kernel a step; whole-number buffers (BatchNorm's count) are copied."""
        torch._foreach_lerp_(self._means, self._now, 1 - self._decay)
        for mean, now in self._whole:
            mean.copy_(now)
