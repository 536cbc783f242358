"""Takes the optimizers' steps of members whose weights are stacked: those with the same settings by the kernels of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from runner.device.torch_private import foreach_lerp_
from runner.training.parts import Parts
from runner.training.stacked.stack import CannotStackError, Stack
from runner.training.step.fused_update import make_update

#: optimizers that look at each weight by itself, so that a stack of weights is but a larger weight
BY_ELEMENT = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Rprop,
)
#: of their states, what is one number for all weights of a tensor
COUNTS = ("step", "mu_product")


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises: CannotStackError for one that may look at several weights together."""
    if type(optimizer) not in BY_ELEMENT:
        raise CannotStackError(f"{type(optimizer).__name__} may look at all weights of a layer at once")


class Lane:
    """Members that lie side by side in the stack and have the same settings: one optimizer, the first one's, for all.

    Their own optimizers hold views of its state, so that each can be kept and gone on with alone; their schedules are
    brought after it by follow().
    """

    def __init__(self, stack: Stack, members: Sequence[Parts], at: slice) -> None:
        """members: of this lane; at: where they lie in the stack. Their optimizers' states, if any, are gone on with."""
        self.at, self._members, self._is_linked = at, members, False
        leader = members[0].optimizer
        is_whole = at == slice(0, len(stack))
        self._pairs: list[tuple[Tensor, Tensor]] = []  # what the optimizer has, and whose gradient it is
        groups = []
        for group in leader.param_groups:
            own = []
            for parameter in group["params"]:
                stacked = stack.parameters[stack.named_in(members[0], parameter)]
                own.append(stacked if is_whole else stacked.detach()[at])
                self._pairs.append((own[-1], stacked))
            groups.append({**group, "params": own})
        self._optimizer: Optimizer = type(leader)(groups)  # type: ignore[call-arg]  # all that differs is in its groups
        self._take_states()
        if members[0].schedule is not None:
            leader.step()  # without gradients it does nothing, but schedules ask whether it was called
        self._update = make_update(self._optimizer)
        self._average = _average_of(members, stack, at)

    def gradients(self) -> list[Tensor]:
        """Of the lane's members, (m, ...) each; those of a part of the stack are views."""
        return [stacked.grad[self.at] for _, stacked in self._pairs if stacked.grad is not None]

    def update(self) -> None:
        """One step of all of them with the leader's settings; the gradients are not needed any more."""
        for mine, leaders in zip(self._optimizer.param_groups, self._members[0].optimizer.param_groups, strict=True):
            mine |= {name: value for name, value in leaders.items() if name != "params"}
        for own, stacked in self._pairs:
            if own is not stacked:
                own.grad = None if stacked.grad is None else stacked.grad[self.at]
        self._update()
        if self._average is not None:
            self._average()

    def follow(self) -> None:
        """The other members' rates and schedules, and all their optimizers' states, where the leader's are. Costs some
        microseconds a member: for whoever looks at one alone, and not for each step."""
        leader = self._members[0]
        for other in self._members[1:]:
            for theirs, group in zip(other.optimizer.param_groups, leader.optimizer.param_groups, strict=True):
                theirs |= {name: value for name, value in group.items() if name != "params"}
            if other.schedule is not None and leader.schedule is not None:
                other.schedule.load_state_dict(leader.schedule.state_dict())
        self._link()

    def _take_states(self) -> None:
        """The members' states as one; all have theirs, or none has."""
        for index, (own, _) in enumerate(self._pairs):
            states = [dict(parts.optimizer.state.get(_parameters(parts)[index], {})) for parts in self._members]
            if not all(states):
                continue
            self._optimizer.state[own] = {
                name: torch.stack([state[name] for state in states]) if _is_by_element(name, value) else _copied(value)
                for name, value in states[0].items()
            }

    def _link(self) -> None:
        """Has the members' optimizers see their parts of the states, once these are there."""
        if self._is_linked or not self._optimizer.state:
            return
        for number, parts in enumerate(self._members):
            for index, (own, _) in enumerate(self._pairs):
                if own in self._optimizer.state:
                    parts.optimizer.state[_parameters(parts)[index]] = {
                        name: value[number] if _is_by_element(name, value) else value
                        for name, value in self._optimizer.state[own].items()
                    }
        self._is_linked = all(own in self._optimizer.state for own, _ in self._pairs)


def clip(lanes: Sequence[Lane], largest: Sequence[float | None]) -> Tensor | None:
    """Scales each member's gradients to a norm of `largest`, one a lane, at most. Returns the norms before, (M,)."""
    if any(each is None for each in largest):
        return None
    norms = []
    for lane, most in zip(lanes, largest, strict=True):
        gradients = lane.gradients()
        each = torch.stack([torch.linalg.vector_norm(_flat(gradient), dim=1) for gradient in gradients])
        norm = torch.linalg.vector_norm(each, dim=0)
        scale = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(scale.view(-1, *(1 for _ in gradient.shape[1:])))
        norms.append(norm)
    return torch.cat(norms)


def _average_of(members: Sequence[Parts], stack: Stack, at: slice) -> Callable[[], None] | None:
    """What moves the members' averaged weights after a step."""
    if members[0].average is None:
        return None
    averages = [parts.average for parts in members if parts.average is not None]
    now = stack.states(at)
    means = {}
    for name in now:
        own = [dict(average.model.state_dict(keep_vars=True))[name] for average in averages]
        means[name] = torch.stack([tensor.detach() for tensor in own])
        for tensor, view in zip(own, means[name], strict=True):
            tensor.data = view
    floating = [name for name in now if now[name].is_floating_point() or now[name].is_complex()]
    moved, towards = [means[name] for name in floating], [now[name] for name in floating]
    rate = 1 - averages[0].decay

    @torch.no_grad()
    def update() -> None:
        foreach_lerp_(moved, towards, rate)
        for name in now.keys() - set(floating):
            means[name].copy_(now[name])

    return update


def _flat(stacked: Tensor) -> Tensor:
    """(M, n): a member's numbers in a row, also of a weight without a dimension, which flatten(1) refuses."""
    return stacked.reshape(len(stacked), -1)


def _parameters(parts: Parts) -> list[Tensor]:
    return [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]


def _is_by_element(name: str, value: Any) -> bool:
    """Whether something in an optimizer's state has a number for each weight."""
    return isinstance(value, Tensor) and name not in COUNTS


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
