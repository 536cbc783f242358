"""Takes an optimizer's steps with less Python than its step() (make_update), or so that they can be compiled (FixedUpdate).

train_step.py and stacked/step.py call the first; compiled.py and on_device.py the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as hooks
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from runner.data.loading.batches import sent
from runner.device.torch_private import foreach_add_, fused_adam_, fused_adamw_, fused_sgd_, step_without_dynamo
from runner.training.muon import Muon, adam_settings, matrix_steps

Update = Callable[[], None]
#: of a kernel, its rate or numbers, and the gradients
TakeStep = Callable[["_Kernel", Any, Any], None]
#: settings of a group that schedules change, besides the rate
NUMBERS = {"betas", "momentum", "weight_decay"}
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


def make_update(optimizer: Optimizer, *, joins_counts: bool = False) -> Update:
    """Make a function that does the same as step() and zero_grad(), bitwise identical, without waiting for the device.

    Fused Adam, AdamW, SGD and Muon call their kernel on lists that are made once, with a group's current settings. Other
    optimizers, optimizers with hooks, and parameters of several types use step(), as does a step in which a parameter has
    its first gradient.

    Args:
        joins_counts: Keep the counts of steps in one tensor, for an optimizer of many tensors that is never compiled.
    """
    kernels: list[_Kernel] | None = None
    has_state = False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def update() -> None:
        nonlocal kernels, has_state
        # not before the second step: a guard that watches the first has hooks
        if kernels is None and has_state:
            kernels = _kernels(optimizer)
            if joins_counts:
                kernels = [_with_joined_counts(kernel, optimizer) for kernel in kernels]
        if not kernels or any(kernel.is_incomplete() for kernel in kernels):
            step_without_dynamo(optimizer)
            has_state = True
            if kernels:  # made again at the next step, with all parameters
                kernels = None
        else:
            with torch.no_grad():
                for kernel in kernels:
                    kernel.take(kernel.fused, kernel.group["lr"])
        for parameter in parameters:
            parameter.grad = None

    return update


class CannotTraceError(Exception):
    """A step that can't be compiled or captured as a whole."""

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem)
        self.fix = fix


class FixedUpdate:
    """An optimizer's step in which only tensors change, to be compiled or captured: Adam's, AdamW's, SGD's and Muon's.

    Created after the optimizer's first step, when its state exists. `numbers` (G, K) has a row for each group: the rate, and
    for Adam's formula on a CPU the corrected rate and the bias correction, which compiled code would compute per weight.

    Args:
        as_formula: Written in operations that a compiler can fuse with others; else by the fused kernels.

    Raises:
        CannotTraceError: For other optimizers, and unusual settings.
    """

    def __init__(self, optimizer: Optimizer, *, as_formula: bool) -> None:
        self._as_formula = as_formula
        self._kernels = _kernels(optimizer)
        if not self._kernels:
            problem = f"{type(optimizer).__name__} with these settings takes its steps itself"
            raise CannotTraceError(problem, "`optimizer=adam`, `adamw` or `sgd` (fused, as they are by default)")
        self._parameters = [parameter for kernel in self._kernels for parameter in kernel.parameters]
        device = self._parameters[0].device
        self._fixed = [{name: kernel.group[name] for name in NUMBERS & kernel.group.keys()} for kernel in self._kernels]
        # a GPU's kernels read rates of 32 bits; on the CPU 64 bits are identical to the optimizer's step
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        self._set = self.now(1)
        self.numbers = torch.tensor(self._set, dtype=dtype, device=device)

    def set_numbers(self, since: int) -> None:
        """Copy the numbers of a step to their tensor if they changed, see ahead(). Nothing waits."""
        numbers = self.now(since)
        if numbers != self._set:
            self._set = numbers
            self.numbers.copy_(sent(torch.tensor(numbers, dtype=self.numbers.dtype), self.numbers.device))

    def now(self, since: int) -> list[list[float]]:
        return self.ahead(since, 1)[0]

    def ahead(self, since: int, num: int) -> list[list[list[float]]]:
        """The numbers of `num` steps with the current rates. since: the first of them, counted from the creation (1).

        Raises:
            CannotTraceError: If a schedule changed another setting.
        """
        for kernel, fixed in zip(self._kernels, self._fixed, strict=True):
            for name, value in fixed.items():
                if kernel.group[name] != value:
                    problem = f"the schedule moves {name}, and that is a number in the optimizer's step"
                    raise CannotTraceError(problem, "a schedule that changes only rates (`cycle_momentum=false`)")
        if self._as_formula:
            return [list(step) for step in zip(*(kernel.numbers(since, num) for kernel in self._kernels), strict=True)]
        return [[[float(kernel.group["lr"])] for kernel in self._kernels]] * num

    def update(self) -> None:
        """Take the step and clear the gradients. Which parameters have one is compiled in."""
        with torch.no_grad():
            for kernel, numbers in zip(self._kernels, self.numbers.unbind(), strict=True):
                if kernel.is_incomplete():
                    problem = "a parameter has its first gradient after the first step"
                    raise CannotTraceError(problem, "a model that uses all its parameters in each step")
                if self._as_formula:
                    kernel.take(kernel.formula, numbers)
                else:
                    kernel.take(kernel.fused, numbers[0])
        for parameter in self._parameters:
            parameter.grad = None


@dataclass(frozen=True)
class _Kernel:
    group: dict[str, Any]
    parameters: list[Tensor]
    others: list[Tensor]  # without a state: they never had a gradient
    states: Mapping[str, list[Tensor]]
    fused: TakeStep  # with the rate
    formula: TakeStep  # with all numbers
    count: int | None  # steps of all parameters, if `numbers` depend on it
    counts: Tensor | None = None  # one tensor, of which states["step"] are views

    def numbers(self, since: int, num: int) -> list[list[float]]:
        """The rate, and if the count is known, Adam's corrected rate and the root of its other bias correction."""
        rate = float(self.group["lr"])
        if self.count is None:
            return [[rate, 0.0, 0.0]] * num
        beta1, beta2 = self.group["betas"]
        taken = range(self.count + since, self.count + since + num)
        return [[rate, rate / (1 - beta1**count), math.sqrt(1 - beta2**count)] for count in taken]

    def is_incomplete(self) -> bool:
        """Whether a parameter has its first gradient."""
        return any(parameter.grad is not None for parameter in self.others)

    def take(self, function: TakeStep, rate: Any) -> None:
        """Call `fused` or `formula` for the parameters that have a gradient."""
        kernel, takes_part = self, [parameter.grad is not None for parameter in self.parameters]
        if not all(takes_part):
            states = {name: list(compress(values, takes_part)) for name, values in self.states.items()}
            kernel = replace(self, parameters=list(compress(self.parameters, takes_part)), states=states, counts=None)
        function(kernel, rate, [parameter.grad for parameter in kernel.parameters])


def _sgd_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")}


def _lists(kernel: _Kernel, grads: Any) -> tuple[Any, ...]:
    states = kernel.states
    return kernel.parameters, grads, states["exp_avg"], states["exp_avg_sq"], [], states["step"]


def _fused_adam(op: Callable[..., None], kernel: _Kernel, rate: float | Tensor, grads: Any) -> None:
    foreach_add_(kernel.states["step"] if kernel.counts is None else [kernel.counts], 1)
    op(*_lists(kernel, grads), lr=rate, **adam_settings(kernel.group))


def _fused_sgd(kernel: _Kernel, rate: float | Tensor, grads: Any) -> None:
    buffers = kernel.states.get("momentum_buffer", [])
    fused_sgd_(kernel.parameters, grads, buffers, lr=rate, is_first_step=False, **_sgd_settings(kernel.group))


def _adam_formula(function: Callable[..., None], kernel: _Kernel, numbers: Tensor, grads: Any) -> None:
    group = kernel.group
    if kernel.count is None:
        by_lists = kernel.parameters[0].device.type != "cpu"
        kinds = {"foreach": by_lists, "capturable": by_lists, "fused": False}
        function(*_lists(kernel, grads), lr=numbers[0], **kinds, **adam_settings(group))
        return
    rate, corrected_rate, correction = numbers.unbind()
    beta1, beta2 = group["betas"]
    decay, eps = group["weight_decay"], group["eps"]
    for weight, grad, mean, square, count in zip(*_lists(kernel, grads)[:4], kernel.states["step"], strict=True):
        count.add_(1)
        grad = -grad if group.get("maximize") else grad
        if decay and function is adamw:
            weight.mul_(1 - rate * decay)
        elif decay:
            grad = grad + decay * weight
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        weight.sub_(mean / (square.sqrt() / correction + eps) * corrected_rate)


def _sgd_formula(kernel: _Kernel, numbers: Tensor, grads: Any) -> None:
    buffers = list(kernel.states.get("momentum_buffer", [None] * len(grads)))
    kinds = {"foreach": kernel.parameters[0].device.type != "cpu", "fused": False}
    sgd(kernel.parameters, grads, buffers, lr=numbers[0], **kinds, **_sgd_settings(kernel.group))  # type: ignore[arg-type]


def _matrices(kernel: _Kernel, rate: float | Tensor, grads: Any) -> None:
    first = rate[0] if isinstance(rate, Tensor) and rate.dim() else rate
    matrix_steps(kernel.parameters, grads, kernel.states["momentum_buffer"], first, kernel.group)


#: by optimizer: its kernel, its formula, and the state of each parameter
KERNELS: dict[type[Optimizer], tuple[TakeStep, TakeStep, tuple[str, ...]]] = {
    Adam: (partial(_fused_adam, fused_adam_), partial(_adam_formula, adam), ADAM_STATE),
    AdamW: (partial(_fused_adam, fused_adamw_), partial(_adam_formula, adamw), ADAM_STATE),
    SGD: (_fused_sgd, _sgd_formula, ("momentum_buffer",)),
    Muon: (_matrices, _matrices, ("momentum_buffer",)),
}


def _kernels(optimizer: Optimizer) -> list[_Kernel]:
    if type(optimizer) not in KERNELS or _has_hooks(optimizer):
        return []
    made = []
    for group in optimizer.param_groups:
        fused, formula, names = KERNELS[type(optimizer) if group.get("muon", True) else AdamW]
        kept = [name for name in names if name != "momentum_buffer" or group["momentum"]]
        takes_part = [_has(optimizer, parameter, kept) for parameter in group["params"]]
        parameters = list(compress(group["params"], takes_part))
        others = [parameter for parameter, takes in zip(group["params"], takes_part, strict=True) if not takes]
        if not _is_plain(optimizer, group, parameters):
            return []
        if parameters:
            states = {name: [optimizer.state[parameter][name] for parameter in parameters] for name in kept}
            made.append(_Kernel(group, parameters, others, states, fused, formula, _common_count(states)))
    return made


def _with_joined_counts(kernel: _Kernel, optimizer: Optimizer) -> _Kernel:
    if "step" not in kernel.states:
        return kernel
    counts = torch.stack(kernel.states["step"])
    for parameter, count in zip(kernel.parameters, counts, strict=True):
        optimizer.state[parameter]["step"] = count
    return replace(kernel, states={**kernel.states, "step": list(counts)}, counts=counts)


def _common_count(states: Mapping[str, Sequence[Tensor]]) -> int | None:
    """The parameters' count of steps; None if it differs, or is on another device than the CPU."""
    counts = {float(step) if step.device.type == "cpu" else None for step in states.get("step", [])}
    count = counts.pop() if len(counts) == 1 else None
    return None if count is None else int(count)


def _has(optimizer: Optimizer, parameter: Tensor, names: Sequence[str]) -> bool:
    state = optimizer.state.get(parameter, {})  # [] would make one
    if not names:
        return parameter.requires_grad
    return all(isinstance(state.get(name), Tensor) for name in names)


def _has_hooks(optimizer: Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or hooks._global_optimizer_pre_hooks or hooks._global_optimizer_post_hooks)


def _is_plain(optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> bool:
    is_other_adam = type(optimizer) is Adam and group.get("decoupled_weight_decay")
    has_kernel = group.get("fused") or group.get("muon")
    odd = is_other_adam or group.get("amsgrad") or group.get("differentiable") or not has_kernel
    is_tensor = any(isinstance(number, Tensor) for number in (group["lr"], *group.get("betas", ())))
    kinds = {(parameter.device, parameter.dtype, parameter.layout) for parameter in parameters}
    return not odd and not is_tensor and len(kinds) <= 1
