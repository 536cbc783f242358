"""An optimizer goes in; what takes its steps comes out, without the Python work that its own step() repeats each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as hooks

Update = Callable[[], None]


def make_update(optimizer: Optimizer) -> Update:
    """update(): the optimizer's step() and zero_grad(), to the bit; nothing in it waits for the device.

    Fused Adam, AdamW and SGD spend more of a small step on looking up what never changes than in their kernel: 264 us a
    step of an MLP 64-128-10 with their own step(), 210 us with the kernel called on lists made once (CPU, 2026-11). The
    settings of a group (lr, betas, ...) are read each time, as schedules change them. Whatever is out of the ordinary
    (another optimizer, hooks, parameters of several types, a gradient that comes and goes) takes the optimizer's own way.
    """
    kernels: list[_Kernel] | None = None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def update() -> None:
        nonlocal kernels
        if not kernels or not all(kernel.has_its_gradients() for kernel in kernels):
            optimizer.step()
            if kernels is None:  # now there is a state
                kernels = _kernels(optimizer)
        else:
            with torch.no_grad():
                for kernel in kernels:
                    kernel.launch()
        for parameter in parameters:
            parameter.grad = None

    return update


@dataclass(frozen=True)
class _Kernel:
    """What one parameter group hands to its fused kernel."""

    group: Mapping[str, Any]
    parameters: list[Tensor]
    others: Sequence[Tensor]  # of the group, without a gradient so far
    states: Mapping[str, list[Tensor]]
    call: Callable[[_Kernel, Any], None]

    def has_its_gradients(self) -> bool:
        """Whether the same parameters have one as when the lists were made."""
        for parameter in self.parameters:
            if parameter.grad is None:
                return False
        return all(parameter.grad is None for parameter in self.others)

    def launch(self) -> None:
        self.call(self, [parameter.grad for parameter in self.parameters])


def _adam(op: Callable[..., None], kernel: _Kernel, grads: Any) -> None:
    """What torch.optim.Adam and AdamW do with fused=True, which take their betas as numbers."""
    group, states = kernel.group, kernel.states
    torch._foreach_add_(states["step"], 1)
    op(
        kernel.parameters,
        grads,
        states["exp_avg"],
        states["exp_avg_sq"],
        [],
        states["step"],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


def _sgd(kernel: _Kernel, grads: Any) -> None:
    """What torch.optim.SGD does with fused=True, from its second step on."""
    group = kernel.group
    torch._fused_sgd_(
        kernel.parameters,
        grads,
        kernel.states.get("momentum_buffer", []),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
    )


#: by optimizer: its kernel, and what it keeps for each parameter
KERNELS: dict[type[Optimizer], tuple[Callable[..., None], tuple[str, ...]]] = {
    Adam: (partial(_adam, torch._fused_adam_), ("step", "exp_avg", "exp_avg_sq")),
    AdamW: (partial(_adam, torch._fused_adamw_), ("step", "exp_avg", "exp_avg_sq")),
    SGD: (_sgd, ("momentum_buffer",)),
}


def _kernels(optimizer: Optimizer) -> list[_Kernel]:
    """One for each group; [] where the optimizer has to take its steps itself. Its gradients and its state are there."""
    if type(optimizer) not in KERNELS or _is_listened_to(optimizer):
        return []
    call, names = KERNELS[type(optimizer)]
    made = []
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        others = [parameter for parameter in group["params"] if parameter.grad is None]
        if not _is_plain(optimizer, group, parameters):
            return []
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]  # asking by [] makes one
        kept = [name for name in names if name != "momentum_buffer" or group["momentum"]]
        if any(not isinstance(state.get(name), Tensor) for state in states for name in kept):
            return []
        if parameters:
            lists = {name: [state[name] for state in states] for name in kept}
            made.append(_Kernel(group, parameters, others, lists, call))
    return made


def _is_listened_to(optimizer: Optimizer) -> bool:
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            hooks._global_optimizer_pre_hooks,
            hooks._global_optimizer_post_hooks,
        )
    )


def _is_plain(optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Whether one kernel takes all of a group, with settings that are numbers."""
    is_other_adam = type(optimizer) is Adam and group.get("decoupled_weight_decay")
    odd = is_other_adam or group.get("amsgrad") or group.get("differentiable") or not group.get("fused")
    numbers = [group["lr"], *group.get("betas", ())]
    if odd or any(isinstance(number, Tensor) for number in numbers):
        return False
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    same = all(parameter.grad is not None and parameter.grad.dtype == parameter.dtype for parameter in parameters)
    return len(kinds) <= 1 and same
