"""Takes the members' optimizer steps: one optimizer for all members with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from runner.device.torch_private import foreach_mul_, foreach_norm
from runner.training.muon import Muon
from runner.training.parts import Parts
from runner.training.stacked.stack import CannotStackError
from runner.training.step.fused_update import make_update

#: optimizers that treat each tensor separately
BY_TENSOR = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adafactor,
    optim.ASGD,
    optim.Rprop,
    Muon,
)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises: CannotStackError for one that may look at several weights together."""
    if type(optimizer) not in BY_TENSOR:
        raise CannotStackError(f"{type(optimizer).__name__} may look at the weights of several layers at once")


class Lane:
    """Members with the same settings: one optimizer takes the steps of all their tensors, with the first one's rates.

    Tensors are separate, as in a single run. In one large tensor a kernel would round the last few numbers differently, and
    results would depend on the number of members. The members keep their optimizers' states.
    """

    def __init__(self, members: Sequence[Parts], largest_norm: float | None = None) -> None:
        self._members, self.largest_norm = members, largest_norm
        self.parameters = [_parameters(parts) for parts in members]
        leader = members[0].optimizer
        groups = []
        for number, group in enumerate(leader.param_groups):
            own = [tensor for parts in members for tensor in parts.optimizer.param_groups[number]["params"]]
            groups.append({**group, "params": own})
        self._optimizer: Optimizer = type(leader)(groups)  # type: ignore[call-arg]  # all that differs is in its groups
        for parts in members:
            self._optimizer.state.update(parts.optimizer.state)
        if members[0].schedule.scheduler is not None:
            leader.step()  # without gradients it does nothing, but schedules ask whether it was called
        self._update = make_update(self._optimizer, joins_counts=True)

    def update(self) -> None:
        """One step of all of them with the leader's settings; leaves no gradients."""
        for mine, leaders in zip(self._optimizer.param_groups, self._members[0].optimizer.param_groups, strict=True):
            mine |= {name: value for name, value in leaders.items() if name != "params"}
        self._update()
        for parts in self._members:
            if parts.average is not None:
                parts.average.update()

    def follow(self) -> None:
        """Update the members' rates, schedules and optimizer states. Not needed in each step."""
        leader = self._members[0]
        for other in self._members[1:]:
            for theirs, group in zip(other.optimizer.param_groups, leader.optimizer.param_groups, strict=True):
                theirs |= {name: value for name, value in group.items() if name != "params"}
            other.schedule.load_state_dict(leader.schedule.state_dict(), step=leader.schedule.step)
        for parts, parameters in zip(self._members, self.parameters, strict=True):
            parts.optimizer.state.update(
                (own, self._optimizer.state[own]) for own in parameters if own in self._optimizer.state
            )


def clip(lanes: Sequence[Lane]) -> Tensor | None:
    """Clip each member's gradients to its lane's norm, bitwise identical to torch's clip_grad_norm_.

    Returns:
        The norms before, (M,); None if a lane doesn't clip.
    """
    norms = []
    for lane in lanes:
        if lane.largest_norm is None:
            return None
        each = [[own.grad for own in parameters if own.grad is not None] for parameters in lane.parameters]
        gradients = [gradient for own in each for gradient in own]
        of_tensors = iter(foreach_norm(gradients))
        norm = torch.stack([torch.linalg.vector_norm(torch.stack(list(islice(of_tensors, len(own))))) for own in each])
        scales = (lane.largest_norm / (norm + 1e-6)).clamp(max=1.0)
        foreach_mul_(gradients, [scale for own, scale in zip(each, scales, strict=True) for _ in own])
        norms.append(norm)
    return torch.cat(norms)


def _parameters(parts: Parts) -> list[Tensor]:
    return [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
