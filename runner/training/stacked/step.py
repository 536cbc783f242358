"""Takes one step of all members: forward and backward over the stack, clipping, update, averages. Returns values, (M,).

For fit.py; check.py tries forward and backward before. Members with the same settings share an optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from runner.device.placement import map_tensors, tensors
from runner.device.torch_private import foreach_mul_, foreach_norm
from runner.training.carried_state import TensorCopies
from runner.training.muon import Muon
from runner.training.parts import Parts
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.stack import CannotStackError, MembersFunctions, ModelStack
from runner.training.step.fused_update import make_update
from runner.training.step.train_step import Step, mean_over, shares

#: torch's optimizers that treat each tensor separately
BY_TENSOR = "SGD Adam AdamW Adamax NAdam RAdam RMSprop Adagrad Adadelta Adafactor ASGD Rprop"


def make_stacked_step(gradients: StackedGradients, lanes: Sequence[Lane]) -> Step:
    """Make the step of a stack: step(batches) -> values (M,) by name, on the device. Nothing waits for the device.

    batches: of each of the steps that accumulate, tensors (M, B, ...).
    """

    def step(batches: Sequence[Any]) -> Mapping[str, Tensor]:
        values = gradients.compute(batches)
        norms = clip(lanes)
        for lane in lanes:
            lane.update()
        return values if norms is None else {**values, "grad_norm": norms}

    return step


class StackedGradients:
    """Forward and backward of the members of a stack. What one member computes does not depend on the others.

    Args:
        compiled: The functions that take forward and backward; None: they are not compiled.
    """

    def __init__(self, stack: ModelStack, *, compiled: Compiled | None = None) -> None:
        self._stack, self._compiled = stack, compiled
        self._own = [  # the stacked weights that are trained, and each member's part
            (value, [whole.get_parameter(name) for whole in stack.wholes])
            for name, value in stack.parameters.items()
            if value.requires_grad
        ]
        self._buffers = TensorCopies(stack.buffers.values())
        self._key = "cpu" if stack.device.type == "cpu" else "device"  # of backends.generator_states()
        self._functions = MembersFunctions(channels_last=stack.channels_last)

    def draw_from(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Draw from generators with these states, one for each member."""
        self._functions.generators = [torch.Generator(self._stack.device) for _ in states]
        for generator, state in zip(self._functions.generators, states, strict=True):
            generator.set_state(state[self._key])

    def store(self, states: Sequence[dict[str, Any]]) -> None:
        """Update the states of the generators."""
        for generator, state in zip(self._functions.generators, states, strict=True):
            state[self._key] = generator.get_state()

    def compute(self, batches: Sequence[Any]) -> Mapping[str, Tensor]:
        """Set the gradients of the members' parameters; returns values (M,). An error undoes the step, as memory may end."""
        self._functions.states_before = []
        self._buffers.take()
        try:
            if len(batches) == 1:
                values = self._forward_backward(batches[0], None)
            else:
                num_counted = self._num_counted if hasattr(self._stack.wholes[0].task, "num_counted") else None
                pairs = shares(batches, num_counted, count_rows=lambda batch: tensors(batch)[0].shape[1])
                values = mean_over(pairs, self._forward_backward)
        except RuntimeError:
            self.undo()
            raise
        for stacked, own in self._own:
            gradient, stacked.grad = stacked.grad, None
            if gradient is not None:
                for parameter, part in zip(own, gradient.unbind(), strict=True):
                    parameter.grad = part
        return values

    def undo(self) -> None:
        """Undo compute(): gradients, buffers, and the generators."""
        for stacked, own in self._own:
            for parameter in (stacked, *own):
                parameter.grad = None
        self._buffers.put_back()
        for generator, state in zip(self._functions.generators, self._functions.states_before, strict=False):
            generator.set_state(state)

    def _forward_backward(self, batch: Any, share: Any) -> Mapping[str, Tensor]:
        stack, functions = self._stack, self._functions
        made = self._compiled.function_for(stack, batch, functions) if self._compiled else None
        if made is not None:
            values, gradients = made(stack, batch, functions)
            for (parameter, _), gradient in zip(self._own, gradients, strict=True):
                if gradient is not None:
                    _keep_gradient(parameter, gradient, share)
            return values
        with functions:
            outputs = stack.forward(stack.parameters, stack.buffers, batch)
        loss = next(iter(outputs.values()))
        (loss if share is None else loss * share).sum().backward()
        return {name: value.detach() for name, value in outputs.items()}

    def _num_counted(self, batch: Any) -> Tensor:
        tasks: list[Any] = [whole.task for whole in self._stack.wholes]  # their attributes may differ, e.g., padding
        own = [map_tensors(batch, partial(torch.select, dim=0, index=number)) for number in range(len(tasks))]
        return torch.stack([task.num_counted(each) for task, each in zip(tasks, own, strict=True)])


def _keep_gradient(parameter: Tensor, gradient: Tensor, share: Any) -> None:
    """Add a gradient times its share (None: 1, or of each member) to the parameter's, as autograd does."""
    if share is not None:
        each = share.view(-1, *(1 for _ in gradient.shape[1:])) if isinstance(share, Tensor) else share
        gradient = gradient * each
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:  # fused kernels expect the same strides
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises: CannotStackError for one that may look at several weights together."""
    if type(optimizer) not in (Muon, *(getattr(optim, name) for name in BY_TENSOR.split())):
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
