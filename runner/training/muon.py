"""Muon and AdamW as one optimizer: matrices of hidden layers take orthogonal steps, all else AdamW's. For conf/optimizer/muon.yaml.

optimizer.py divides a model's parameters by hidden_matrices(); step/fused_update.py takes matrix_steps() where a step is
compiled, captured, or shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from runner.device import torch_private

#: of the quintic iteration: those of torch.optim.Muon (Jordan 2024), which its signature does not name one by one
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: that a norm is at least, before it is divided by
LEAST_NORM = 1e-7
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Muon(Optimizer):
    """torch.optim.Muon for the groups with `muon`, to the bit, and torch.optim.AdamW for those without.

    The weights of a convolution count as the matrix (outputs, inputs x height x width), as the speed records have it.
    One rate serves both kinds, and so does a schedule: by adjust_lr_fn=match_rms_adamw a matrix moves as far as AdamW would
    move it (Liu 2025, arXiv 2502.16982).
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
        """betas, eps, fused: AdamW's. adamw_lr: of the groups without `muon` (None: lr, as for the others)."""
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is a number, 0 or more, and not {value}")
        for name, value in (("momentum", momentum), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
            if not 0 < value < 1:
                raise ValueError(f"{name} lies between 0 and 1, and is not {value}")
        if adjust_lr_fn not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr_fn is match_rms_adamw or original, and not {adjust_lr_fn}")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"ns_steps is a whole number from 1 to 99, and not {ns_steps}")
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
        """One step of all groups; nothing in it waits for the device."""
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
    """One step of each matrix, along what is left of its momentum when all its singular values are near 1.

    rate: a tensor where a step is compiled or captured, a number else; they differ by a rounding.
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
    """The weights of two and more dimensions between a model's embeddings and its output.

    The output's is that of the last module that has one, in the order in which they are made. A parameter that is not
    called weight (a table of positions, a class token) is no matrix that anything is multiplied by.
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
