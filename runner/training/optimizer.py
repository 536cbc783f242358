"""Makes an optimizer over a model's parameters, by groups; freezes parameters; has warmup_cosine and averaged weights (EMA).

For experiment/build.py and experiment/build_optimizer.py, which reads from YAML which optimizer and schedule are wanted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from runner.device import torch_private
from runner.device.placement import copied
from runner.errors import Problem, RunnerError, first_line, nearest
from runner.training.muon import Muon, hidden_matrices

#: device types whose fused optimizer kernels take a step in one launch (on the CPU 343 us against 453, facts of 2026-11)
FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


#: those whose fused kernels take parameters that several processes have in parts (torch 2.13)
FUSED_IN_PARTS = (torch.optim.Adam, torch.optim.AdamW)

#: settings that choose a kernel, not a result
KERNEL_CHOICES = ("fused", "foreach", "capturable", "differentiable")

#: what `optimizer.no_decay` knows: parameters of fewer than two dimensions
NORMS_AND_BIASES = "norms_and_biases"


def make_optimizer(
    make: Callable[..., Optimizer],
    model: nn.Module,
    *,
    device: torch.device,
    groups: Sequence[Mapping[str, Any]] = (),
    no_decay: str | None = None,
    prefix: str = "",
    precision: str = "fp32",
) -> Optimizer:
    """The optimizer over the parameters that train; fused where the device and the optimizer have it and YAML says nothing.

    groups: each a `match`, a pattern of names, and what holds for those parameters in place of the optimizer's own
    settings; the first that matches wins. no_decay: norms_and_biases, vectors and scalars, keep out of weight_decay.
    prefix: what stands before the names that a person knows. precision: with fp16 MPS' fused kernels forget the scale
    (pytorch#186360), and SGD's make its momentum of anything, see _begin_momentum().
    Raises: RunnerError for a pattern that matches nothing and a setting that this optimizer does not have.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    kind: Any = make.func if isinstance(make, partial) else make
    settings = set(inspect.signature(kind).parameters)
    parameters: Any = [parameter for _, parameter in named]
    floating = all(parameter.is_floating_point() for parameter in parameters)
    in_parts = any(hasattr(parameter, "full_tensor") for parameter in parameters)
    has_kernel = not in_parts or kind in FUSED_IN_PARTS
    if kind is Muon and in_parts:
        problem = "muon looks at whole matrices, and each process has a part of every weight"
        fix = "placement.strategy=ddp or optimizer=adamw"
        raise RunnerError(Problem("optimizer=muon placement.strategy=fsdp", problem, fix))
    if groups or no_decay or kind is Muon:
        parameters = _grouped(
            [(name.removeprefix(prefix), value) for name, value in named],
            groups,
            no_decay,
            settings,
            matrices=hidden_matrices(model) if kind is Muon else None,
        )
    chosen: dict[str, Any] = getattr(make, "keywords", {})
    asked = any(chosen.get(name) is not None for name in KERNEL_CHOICES)
    has_kernel &= device.type in FUSED_DEVICES and not (device.type == "mps" and precision == "fp16")
    is_dampened = any(_is_dampened({**chosen, **own}) for own in ({}, *groups))
    has_kernel &= not (precision == "fp16" and is_dampened)
    optimizer: Optimizer | None = None
    if not asked and floating and has_kernel and "fused" in settings:
        with suppress(RuntimeError):  # it has no fused kernel for this device: torch says so when it is made
            optimizer = make(parameters, fused=True)
    optimizer = make(parameters) if optimizer is None else optimizer
    if precision == "fp16" and isinstance(optimizer, torch.optim.SGD):
        _begin_momentum(optimizer)
    return optimizer


def _is_dampened(group: Mapping[str, Any]) -> bool:
    return bool(group.get("momentum") and group.get("dampening"))


def _begin_momentum(optimizer: torch.optim.SGD) -> None:
    """Gives a fused SGD the zeros that its momentum begins with.

    torch's first step makes that of memory as it lies there, to be written by a kernel that is left out where fp16's
    gradients overflow, as the first ones do (torch 2.13, optim/sgd.py). From zeros a first step is the same, to the bit, but
    for dampening, which torch leaves out of it.
    Raises: RunnerError for a fused kernel that was asked for with dampening.
    """
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        if _is_dampened(group):
            problem = "torch's fused step makes the momentum of anything where fp16 leaves the first step out"
            fix = "optimizer.fused=null, optimizer.dampening=0 or train.precision=bf16"
            raise RunnerError(Problem("optimizer.fused=true with dampening and train.precision=fp16", problem, fix))
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
    """torch's parameter groups: what no pattern matches first, and of each what does not decay apart.

    matrices: those that take Muon's steps, first and apart, where no group says otherwise by `muon` (None: another optimizer).
    """
    found: dict[tuple[int, bool, bool], list[nn.Parameter]] = {}
    hits = [matching(group["match"], [name for name, _ in named], key="optimizer.groups") for group in groups]
    for index, group in enumerate(groups):
        check_settings(group, settings, f"optimizer.groups[{index}]")
    if no_decay:
        check_settings({"weight_decay": 0}, settings, f"optimizer.no_decay={no_decay}, so")
    for name, parameter in named:
        place = next((index for index, names in enumerate(hits) if name in names), -1)
        stays = no_decay == NORMS_AND_BIASES and parameter.dim() < 2
        is_matrix = matrices is not None and parameter in matrices
        if matrices is not None and place >= 0 and "muon" in groups[place]:
            is_matrix = bool(groups[place]["muon"]) and parameter.dim() >= 2
        found.setdefault((place, not is_matrix, stays), []).append(parameter)
    made = []
    for (place, is_other, stays), parameters in sorted(found.items(), key=lambda item: item[0]):
        own = {key: value for key, value in groups[place].items() if key != "match"} if place >= 0 else {}
        own |= {"weight_decay": 0.0} if stays else {}
        own |= {"muon": not is_other} if matrices is not None else {}
        made.append({"params": parameters, **own})
    return made


def check_settings(group: Mapping[str, Any], settings: set[str], asked: str) -> None:
    """torch takes any name in a group and never looks at it again. Raises: RunnerError for one that is no setting."""
    for name in group:
        if name not in settings - {"params"} | {"match"}:
            hits = nearest(name, settings) or sorted(settings - {"params"})
            problem = f"this optimizer has no setting {name}"
            raise RunnerError(
                Problem(
                    f"{asked}.{name}={group[name]}",
                    problem,
                    f"use {' or '.join(f'`{hit}`' for hit in hits)} instead of `{name}`",
                    code="unknown-key",
                )
            )


def freeze(model: nn.Module, patterns: Sequence[str], *, prefix: str = "") -> None:
    """Keeps the parameters that a pattern names as they are: no gradient, and norms among them keep their running statistics.

    A pattern is a name, of a parameter or of a module with all below it, with * and ? for what varies. A BatchNorm whose
    parameters are all frozen stays in eval mode, as its statistics would drift away from weights that don't. Dropout works
    on. Raises: RunnerError for a pattern that matches nothing, and where nothing is left to train.
    """
    named = {name.removeprefix(prefix): parameter for name, parameter in model.named_parameters()}
    bare = {  # norms that have statistics alone
        f"{name}.running_mean".removeprefix(prefix): module
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None and not list(module.parameters(recurse=False))
    }
    for pattern in patterns:
        for name in matching(pattern, [*named, *bare], key="model.freeze"):
            if name in bare:
                _stay_in_eval(bare[name])
            else:
                named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        asked = f"model.freeze=[{','.join(patterns)}]"
        raise RunnerError(Problem(asked, "it leaves nothing to train", "use patterns that leave the last layer out"))
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_frozen = bool(patterns and own) and not any(parameter.requires_grad for parameter in own)
        if is_frozen and getattr(module, "running_mean", None) is not None:
            _stay_in_eval(module)


def _stay_in_eval(module: nn.Module) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"train": lambda self, mode=True: kind.train(self, False)})
    module.eval()


def matching(pattern: str, names: Sequence[str], *, key: str, kind: str = "parameter") -> set[str]:
    """The names that a pattern matches, or that lie below one that it matches. kind: what has them.

    Raises: RunnerError where there is none.
    """
    found = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
    if not found:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
        tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
        asked, ends = pattern.strip("*."), {name.rpartition(".")[2]: name for name in reversed([*modules, *names])}
        hits = nearest(asked, [*modules, *names]) or [ends[end] for end in nearest(asked, ends)]
        hits = hits or [f"a pattern of names that begin with {tops}"]
        problem = f"it matches no {kind}; they are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        raise RunnerError(Problem(f"{key}: {pattern}", problem, " or ".join(hits)))
    return found


def warmup_cosine(
    optimizer: Optimizer, *, num_steps: int, warmup_fraction: float = 0.1, final_fraction: float = 0.0
) -> LRScheduler:
    """Linear warm-up over the first part of `num_steps`, then half a cosine down to `final_fraction` of the rate.

    Raises: ValueError for what is no number of steps and no part of them.
    """
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps is a whole number, 1 or more, and not {num_steps!r}")
    if not 0 <= warmup_fraction <= 1:
        raise ValueError(f"warmup_fraction is a part of all steps, from 0 to 1, and not {warmup_fraction}")
    if not 0 <= final_fraction < math.inf:
        raise ValueError(f"final_fraction is a part of the rate, 0 or more, and not {final_fraction}")
    warmup = max(1, round(num_steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


class Turns(Optimizer):
    """Several optimizers with names, each with parameters of its own, that take turns in each step.

    To a schedule, a checkpoint or the guard they are one, with the groups and the state of all. each: the optimizers, by
    name, in their order; every: of which steps each takes part, the first of so many. values: what each turn's last step
    came to, for steps in which it has none.
    """

    def __init__(self, each: Mapping[str, Optimizer], every: Mapping[str, int]) -> None:
        """each: whose parameters differ, and which have taken no step yet."""
        self.each, self.every, self.taken = dict(each), dict(every), 0
        self.values: dict[str, Mapping[str, torch.Tensor]] = {}
        super().__init__([group for one in each.values() for group in one.param_groups], {})
        first, *others = each.values()  # a schedule looks there for what it may move
        self.defaults = {
            name: value for name, value in first.defaults.items() if all(name in o.defaults for o in others)
        }
        for one in self.each.values():
            self.state.update(one.state)  # what they begin with
        self._share()

    def is_due(self, name: str) -> bool:
        """Whether an optimizer takes part in the next step. All do in the first."""
        return self.taken % self.every[name] == 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """After the turns: counts them as one step."""
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
    """What this process has of a model's parameters and buffers, each once, whatever its names; of one in parts, its part.

    The very tensors, as a stack of models (stacked/stack.py) moves their memory.
    """
    kept: dict[int, Any] = {
        id(value): value for value in model.state_dict(keep_vars=True).values() if isinstance(value, torch.Tensor)
    }
    return [value.detach().to_local() if hasattr(value, "to_local") else value for value in kept.values()]


class NoAverage:
    """Stands for the averaged weights of a run without any."""

    def update(self) -> None:
        pass


class AveragedWeights:
    """An exponential moving average of a model's weights, kept on the device: average += (1 - decay) * (weight - average).

    torch's AveragedModel asks a tensor counter in each update, which reads the device; this does not.
    """

    def __init__(self, model: nn.Module, *, decay: float, mean: nn.Module | None = None) -> None:
        """mean: a copy of the model, where none can be made any more. Raises: RunnerError for a model that can't be copied."""
        try:
            self.model = (copied(model) if mean is None else mean).requires_grad_(False)
        except Exception as error:  # of any module; weight_norm before parametrizations makes weights that can't be
            problem = f"a second model, of the averages, can't be made of this one: {first_line(error)}"
            fix = "train.ema_decay=null, or torch.nn.utils.parametrizations in the place of weight_norm"
            raise RunnerError(Problem(f"train.ema_decay={decay:g}", problem, fix)) from None
        self.decay = decay
        pairs = list(zip(_own(self.model), _own(model), strict=True))
        self._whole = [(mean, now) for mean, now in pairs if not (now.is_floating_point() or now.is_complex())]
        averaged = [(mean, now) for mean, now in pairs if now.is_floating_point() or now.is_complex()]
        self._means, self._now = [mean for mean, _ in averaged], [now for _, now in averaged]

    @torch.no_grad()
    def update(self) -> None:
        """One multi-tensor kernel a step; whole-number buffers (BatchNorm's count) are copied."""
        torch_private.foreach_lerp_(self._means, self._now, 1 - self.decay)
        for mean, now in self._whole:
            mean.copy_(now)
