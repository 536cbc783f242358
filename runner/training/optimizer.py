"""Makes an optimizer with parameter groups; freezes parameters; has Turns and averaged weights (EMA).

For experiment/build.py and experiment/build_optimizer.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runner.device import torch_private
from runner.device.placement import copied
from runner.errors import RunnerError, first_line, nearest
from runner.training.muon import Muon, hidden_matrices

#: device types with fused optimizer kernels
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
#: optimizers whose fused kernels take parameters that are split across processes (torch 2.13)
FUSED_IN_PARTS = (torch.optim.Adam, torch.optim.AdamW)
#: settings that choose a kernel, not a result
KERNEL_CHOICES = ("fused", "foreach", "capturable", "differentiable")
#: `optimizer.no_decay`: parameters of fewer than two dimensions
NORMS_AND_BIASES = "norms_and_biases"


def make_optimizer(
    make: Callable[..., Optimizer],
    model: nn.Module,
    *,
    device: torch.device,
    groups: Sequence[Mapping[str, Any]] = (),
    no_decay: str | None = None,
    prefix: str = "",
    may_skip: bool = False,
) -> Optimizer:
    """Make the optimizer of the trained parameters; fused if the device and the optimizer can, and no kernel is set.

    Args:
        groups: Each has a `match`, a pattern of names, and settings for those parameters. The first match counts.
        no_decay: norms_and_biases: no weight decay for vectors and scalars.
        prefix: Of all names, not part of the patterns.
        may_skip: Whether a step may be skipped for its gradients: MPS' fused kernels ignore that (pytorch#186360), and see
            _begin_momentum().

    Raises:
        RunnerError: For a pattern that matches nothing, or a setting that this optimizer doesn't have.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    kind: Any = make.func if isinstance(make, partial) else make
    settings = set(inspect.signature(kind).parameters)
    chosen: dict[str, Any] = getattr(make, "keywords", {})
    in_parts = any(hasattr(parameter, "full_tensor") for _, parameter in named)
    fuses = (
        "fused" in settings
        and device.type in FUSED_DEVICES
        and all(parameter.is_floating_point() for _, parameter in named)
        and all(chosen.get(name) is None for name in KERNEL_CHOICES)
        and (not in_parts or kind in FUSED_IN_PARTS)
        and not (may_skip and (device.type == "mps" or any(_is_dampened({**chosen, **own}) for own in ({}, *groups))))
    )
    parameters: Any = [parameter for _, parameter in named]
    if groups or no_decay or kind is Muon:
        parameters = _grouped(
            [(name.removeprefix(prefix), value) for name, value in named],
            groups,
            no_decay,
            settings,
            matrices=hidden_matrices(model) if kind is Muon else None,
        )
    optimizer: Optimizer | None = None
    if fuses:
        with suppress(RuntimeError):  # no fused kernel for this device
            optimizer = make(parameters, fused=True)
    optimizer = make(parameters) if optimizer is None else optimizer
    if may_skip and isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer)
    return optimizer


def wants_closure(optimizer: Any) -> bool:
    """Return whether step() needs a function that computes the loss again (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _is_dampened(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum") and group.get("dampening"))


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Start a fused SGD's momentum with zeros.

    torch starts with uninitialized memory that the first step's kernel writes, and a first step whose gradients are not
    finite may be skipped (torch 2.13, optim/sgd.py). The first step is identical, except with dampening, which torch omits there.
    """
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        if _is_dampened(group):
            problem = "torch's fused step starts with uninitialized momentum if the first step is skipped"
            source = "optimizer.fused=true with dampening, and steps that may be skipped"
            ways = ["optimizer.fused=null", "optimizer.dampening=0"]
            raise RunnerError.suggest(source, problem, ways)
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _grouped(
    named: list[tuple[str, nn.Parameter]],
    groups: Sequence[Mapping[str, Any]],
    no_decay: str | None,
    settings: set[str],
    *,
    matrices: set[nn.Parameter] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups, the parameters without a match first; those without decay, and Muon's matrices, separately."""
    by_settings: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    hits = [matching(group["match"], [name for name, _ in named], key="optimizer.groups") for group in groups]
    for index, group in enumerate(groups):
        check_settings(group, settings, f"optimizer.groups[{index}]")
    if no_decay:
        check_settings({"weight_decay": 0}, settings, f"optimizer.no_decay={no_decay}, so")
    for name, parameter in named:
        group_index = next((index for index, names in enumerate(hits) if name in names), -1)
        stays = no_decay == NORMS_AND_BIASES and parameter.dim() < 2
        is_matrix = matrices is not None and parameter in matrices
        if matrices is not None and group_index >= 0 and "muon" in groups[group_index]:
            is_matrix = bool(groups[group_index]["muon"]) and parameter.dim() >= 2
        by_settings.setdefault((group_index, not is_matrix, stays), []).append(parameter)
    made = []
    for (index, is_other, stays), parameters in sorted(by_settings.items(), key=lambda item: item[0]):
        own = {key: value for key, value in groups[index].items() if key != "match"} if index >= 0 else {}
        own |= {"weight_decay": 0.0} if stays else {}
        own |= {"muon": not is_other} if matrices is not None else {}
        made.append({"params": parameters, **own})
    return made


def check_settings(group: Mapping[str, Any], settings: set[str], source: str) -> None:
    """Raise a RunnerError for a name in a group that is not a setting, which torch would ignore."""
    for name in group:
        if name not in settings - {"params"} | {"match"}:
            hits = nearest(name, settings) or sorted(settings - {"params"})
            problem = f"this optimizer has no setting {name}"
            fix = f"use {' or '.join(f'`{hit}`' for hit in hits)} instead of `{name}`"
            raise RunnerError.of(f"{source}.{name}={group[name]}", problem, fix, code="unknown-key")


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that a pattern matches; norms among them also keep their running statistics.

    A pattern is the name of a parameter, or of a module with everything below it, with * and ?. A BatchNorm with only frozen
    parameters stays in eval mode, so that its statistics still fit its weights. Dropout is not changed.

    Raises:
        RunnerError: For a pattern that matches nothing, and if nothing is left to train.
    """
    named = dict(model.named_parameters())
    norms = {name: norm for name, norm in model.named_modules() if getattr(norm, "running_mean", None) is not None}
    own = {name: list(norm.parameters(recurse=False)) for name, norm in norms.items()}
    names = [*named, *(f"{name}.running_mean" for name in norms if not own[name])]
    frozen = {name for pattern in patterns for name in matching(pattern, names, key="model.freeze")}
    for name in frozen & named.keys():
        named[name].requires_grad_(False)
    if frozen and not any(parameter.requires_grad for parameter in named.values()):
        source, fix = f"model.freeze=[{','.join(patterns)}]", "use patterns that leave the last layer out"
        raise RunnerError.of(source, "`model.freeze` leaves nothing to train", fix)
    for name, norm in norms.items() if frozen else ():
        if not any(parameter.requires_grad for parameter in own[name]) and (
            own[name] or f"{name}.running_mean" in frozen
        ):
            _stay_in_eval(norm)


def below_the_head(model: nn.Module) -> list[str]:
    """Return the names of all parameters but those of the last layer that has any."""
    names = [name for name, _ in model.named_parameters()]
    head = names[-1].rpartition(".")[0] if names else ""
    return [name for name in names if name.rpartition(".")[0] != head]


def _stay_in_eval(module: nn.Module) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"train": lambda self, mode=True: kind.train(self, False)})
    module.eval()


def matching(pattern: str, names: Sequence[str], *, key: str, kind: str = "parameter") -> set[str]:
    """The names that a pattern matches, and those below them. kind: what has the names.

    Raises:
        RunnerError: If it matches nothing.
    """
    matches = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    if not matches:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
        tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
        typed, ends = pattern.strip("*."), {name.rpartition(".")[2]: name for name in reversed([*modules, *names])}
        hits = nearest(typed, [*modules, *names]) or [ends[end] for end in nearest(typed, ends)]
        fix = f"use {' or '.join(f'`{hit}`' for hit in hits) or f'a pattern of names that begin with {tops}'}"
        problem = f"`{pattern}` matches no {kind}; they are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        raise RunnerError.of(f"{key}: {pattern}", problem, fix)
    return matches


class Turns(Optimizer):
    """Several optimizers with different parameters, which take their steps one after the other.

    A schedule, a checkpoint and the guard see one optimizer with the groups and the state of all.

    Args:
        each: The optimizers by name, in order, before their first step.
        every: The interval of each one's steps. The first step is all optimizers'.

    Attributes:
        values: The values of each optimizer's last step, for steps in which it is not due.
        shared: What the task keeps for the other turns of the same step, by the id of a batch.
    """

    def __init__(self, each: Mapping[str, Optimizer], every: Mapping[str, int]) -> None:
        self.each, self.every, self.taken = dict(each), dict(every), 0
        self.values: dict[str, Mapping[str, torch.Tensor]] = {}
        self.shared: dict[int, dict[str, Any]] = {}
        super().__init__([group for one in each.values() for group in one.param_groups], {})
        first, *others = each.values()  # a schedule reads them
        self.defaults = {
            name: value for name, value in first.defaults.items() if all(name in o.defaults for o in others)
        }
        for one in self.each.values():
            self.state.update(one.state)  # e.g., of _begin_momentum()
        self._share()

    def is_due(self, name: str) -> bool:
        """Whether an optimizer takes part in the next step."""
        return self.taken % self.every[name] == 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Count a step of all optimizers that were due."""
        self.taken += 1

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "taken": self.taken,
            "values": {name: dict(of) for name, of in self.values.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.taken = state_dict["taken"]
        device = self.param_groups[0]["params"][0].device
        self.values = {
            name: {key: value.to(device) for key, value in of.items()} for name, of in state_dict["values"].items()
        }
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for one in self.each.values():
            one.state, one.param_groups = self.state, [next(groups) for _ in one.param_groups]


def _own(model: nn.Module) -> list[torch.Tensor]:
    """This process's parameters and buffers, each once: the tensors themselves, as stacked/stack.py moves their memory."""
    kept: dict[int, Any] = {
        id(value): value for value in model.state_dict(keep_vars=True).values() if isinstance(value, torch.Tensor)
    }
    return [value.detach().to_local() if hasattr(value, "to_local") else value for value in kept.values()]


class NoAverage:
    """The averaged weights of a run without any."""

    def update(self) -> None:
        pass


class AveragedWeights:
    """An exponential moving average of a model's weights on the device: average += (1 - decay) * (weight - average).

    torch's AveragedModel reads the device in each update.

    Args:
        mean: A copy of the model; None: it is copied. Raises a RunnerError for a model that can't be copied.
    """

    def __init__(self, model: nn.Module, *, decay: float, mean: nn.Module | None = None) -> None:
        try:
            self.model = (copied(model) if mean is None else mean).requires_grad_(False)
        except Exception as error:  # any module's; the old weight_norm makes weights that can't be copied
            problem = f"this model can't be copied for the averages: {first_line(error)}"
            fix = "use `train.ema_decay=null`, or `torch.nn.utils.parametrizations` instead of `weight_norm`"
            raise RunnerError.of(f"train.ema_decay={decay:g}", problem, fix) from None
        self.decay = decay
        pairs = list(zip(_own(self.model), _own(model), strict=True))
        self._whole = [(mean, now) for mean, now in pairs if not (now.is_floating_point() or now.is_complex())]
        averaged = [(mean, now) for mean, now in pairs if now.is_floating_point() or now.is_complex()]
        self._means, self._now = [mean for mean, _ in averaged], [now for _, now in averaged]

    @torch.no_grad()
    def update(self) -> None:
        """Update by one multi-tensor kernel; integer buffers (BatchNorm's count) are copied."""
        torch_private.foreach_lerp_(self._means, self._now, 1 - self.decay)
        for mean, now in self._whole:
            mean.copy_(now)
