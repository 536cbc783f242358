"""Muon and AdamW as one optimizer: orthogonal steps for matrices of hidden layers, AdamW's for the rest. For conf/optimizer/muon.yaml.

optimizer.py groups parameters by hidden_matrices(); step/fused_update.py calls matrix_steps().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from runner.device import torch_private

#: coefficients of the quintic iteration of torch.optim.Muon (Jordan 2024)
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: the smallest divisor of a norm
MIN_NORM = 1e-7
RATE_FUNCTIONS = ("match_rms_adamw", "original")
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Muon(Optimizer):
    """torch.optim.Muon for groups with `muon`, torch.optim.AdamW for the others; bitwise identical.

    A convolution's weights are a matrix (outputs, inputs x height x width). With adjust_lr_fn=match_rms_adamw a matrix moves
    as far as with AdamW, so both share a rate and a schedule (Liu 2025, arXiv 2502.16982).

    Args:
        betas: AdamW's, as are `eps` and `fused`.
        adamw_lr: For groups without `muon`; None: lr.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.01,
        *,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_lr: float | None = None,
        fused: bool | None = None,
        muon: bool = True,
    ) -> None:
        checks = (
            ("lr", lr, 0 <= lr < math.inf, "0 or more"),
            ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "0 or more"),
            ("eps", eps, 0 <= eps < math.inf, "0 or more"),
            ("momentum", momentum, 0 < momentum < 1, "between 0 and 1"),
            ("betas", betas, all(0 < beta < 1 for beta in betas), "between 0 and 1"),
            ("adjust_lr_fn", adjust_lr_fn, adjust_lr_fn in RATE_FUNCTIONS, " or ".join(RATE_FUNCTIONS)),
            ("ns_steps", ns_steps, 1 <= ns_steps < 100, "from 1 to 99"),
        )
        for name, value, is_valid, values in checks:
            if not is_valid:
                raise ValueError(f"{name} must be {values}, got {value}")
        groups: list[dict[str, Any]] = [dict(each) if isinstance(each, dict) else {"params": [each]} for each in params]
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas), "eps": eps, "fused": fused}
        defaults |= {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        defaults |= {"adjust_lr_fn": adjust_lr_fn, "muon": muon}
        if adamw_lr is not None:
            groups = [{"lr": adamw_lr, **each} if not each.get("muon", muon) else each for each in groups]
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step without waiting for the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            taken = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in taken]
            states = [self._state(parameter, group) for parameter in taken]
            if group["muon"]:
                matrix_steps(taken, gradients, [state["momentum_buffer"] for state in states], group["lr"], group)
            elif taken:
                means, squares, counts = (
                    [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")
                )
                settings = {"lr": group["lr"], "fused": group["fused"], **adam_settings(group)}
                adamw(taken, gradients, means, squares, [], counts, **settings)
        return loss

    def _state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state and group["muon"]:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        elif not state:
            state["step"] = torch.zeros((), device=parameter.device if group["fused"] else None)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def matrix_steps(
    parameters: Sequence[Tensor],
    gradients: Sequence[Any],
    buffers: Sequence[Tensor],
    rate: float | Tensor,
    group: Mapping[str, Any],
) -> None:
    """Move each matrix along its momentum with all singular values near 1.

    rate: A tensor in compiled or captured steps, else a number; results differ by rounding.
    """
    momentum = group["momentum"]
    for weight, gradient, buffer in zip(parameters, gradients, buffers, strict=True):
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()
        matrix = update.flatten(1)
        steps = torch_private.orthogonal(matrix, COEFFICIENTS, group["ns_steps"], MIN_NORM).view(weight.shape)
        ratio = torch_private.muon_rate(1.0, group["adjust_lr_fn"], matrix.shape)
        weight.mul_(1 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            weight.sub_(steps * (rate * ratio).to(weight.dtype))
        else:
            weight.add_(steps, alpha=-(rate * ratio))


def adam_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of torch's functions of Adam and AdamW that a group sets, without its rate."""
    beta1, beta2 = group["betas"]
    others = {"eps": group["eps"], "amsgrad": False, "maximize": group.get("maximize", False)}
    return {"beta1": beta1, "beta2": beta2, "weight_decay": group["weight_decay"], **others}


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The weights of at least two dimensions between a model's embeddings and its output, the last such weight.

    Parameters that aren't called weight (positions, a class token) are not multiplied by anything.
    """
    weights: list[tuple[nn.Parameter, bool]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.requires_grad and "weight" in name:
                weights.append((parameter, isinstance(module, EMBEDDINGS)))
    if not weights:
        return set()
    output = weights[-1][0]
    others = {parameter for parameter, is_embedding in weights if is_embedding or parameter is output}
    return {parameter for parameter, _ in weights} - others
