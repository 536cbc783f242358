"""Muon and AdamW as one optimizer: orthogonal steps for matrices of hidden layers, AdamW's for the rest. For conf/optimizer/muon.yaml.

optimizer.py groups parameters by hidden_matrices(); step/fused_update.py calls matrix_steps().
"""

from __future__ import annotations

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
LEAST_NORM = 1e-7
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
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {value}")
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 < value < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {value}")
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn must be match_rms_adamw or original, got {adjust_lr_fn}")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps must be from 1 to 99, got {ns_steps}")
        groups: list[dict[str, Any]] = [dict(each) if isinstance(each, dict) else {"params": [each]} for each in params]
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": tuple(betas),
            "eps": eps,
            "fused": fused,
            "muon": muon,
        }
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
                _adamw_step(taken, gradients, states, group)
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
        steps = torch_private.orthogonal(matrix, COEFFICIENTS, group["ns_steps"], LEAST_NORM).view(weight.shape)
        ratio = torch_private.muon_rate(1.0, group["adjust_lr_fn"], matrix.shape)
        weight.mul_(1 - rate * group["weight_decay"])
        if isinstance(rate, Tensor):
            weight.sub_(steps * (rate * ratio).to(weight.dtype))
        else:
            weight.add_(steps, alpha=-(rate * ratio))


def _adamw_step(
    parameters: list[Tensor], gradients: list[Any], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any]
) -> None:
    adamw(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=group["fused"],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """The weights of at least two dimensions between a model's embeddings and its output, the last such weight.

    Parameters that aren't called weight (positions, a class token) are not multiplied by anything.
    """
    found: list[tuple[nn.Parameter, bool]] = []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.requires_grad and "weight" in name:
                found.append((parameter, isinstance(module, EMBEDDINGS)))
    if not found:
        return set()
    output = found[-1][0]
    others = {parameter for parameter, is_embedding in found if is_embedding or parameter is output}
    return {parameter for parameter, _ in found} - others
