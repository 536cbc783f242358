"""Takes one step of all members: forward and backward over the stack, clipping, update, averages. Returns values, (M,).

For fit.py; check.py tries forward and backward before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.device.placement import map_tensors, tensors
from runner.device.torch_private import foreach_copy_
from runner.training.stacked.compiled import Compiled
from runner.training.stacked.functions import MembersFunctions
from runner.training.stacked.stack import ModelStack
from runner.training.stacked.update import Lane, clip
from runner.training.step.train_step import Step, mean_over


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
    """Forward and backward of some members of a stack. What one member computes does not depend on the others.

    Args:
        members: None: all.
        compiled: The functions that take forward and backward; None: they are not compiled.
    """

    def __init__(self, stack: ModelStack, members: slice | None = None, *, compiled: Compiled | None = None) -> None:
        members = members or slice(0, len(stack))
        self._stack, self._weights, self._compiled = stack, stack.weights(members), compiled
        self.wholes = stack.wholes[members]
        self._own = [  # the stacked weights that are trained, and each member's part
            (value, [whole.get_parameter(name) for whole in self.wholes])
            for name, value in self._weights.parameters.items()
            if value.requires_grad
        ]
        self._buffers = list(self._weights.buffers.values())
        self._before = [buffer.clone() for buffer in self._buffers]
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
        if self._buffers:
            foreach_copy_(self._before, self._buffers)
        try:
            if len(batches) == 1:
                values = self._forward_backward(batches[0], None)
            else:
                values = mean_over(zip(batches, self._shares(batches), strict=True), self._forward_backward)
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
        if self._buffers:
            foreach_copy_(self._buffers, self._before)
        for generator, state in zip(self._functions.generators, self._functions.states_before, strict=False):
            generator.set_state(state)

    def _forward_backward(self, batch: Any, share: Any) -> Mapping[str, Tensor]:
        weights, functions = self._weights, self._functions
        made = self._compiled.function_for(self._stack, weights, batch, functions) if self._compiled else None
        if made is not None:
            return _keep_gradients(made(weights, batch, functions), list(weights.parameters.values()), share)
        with functions:
            values = self._stack.forward(weights, batch)
        loss = next(iter(values.values()))
        (loss if share is None else loss * share).sum().backward()
        return {name: value.detach() for name, value in values.items()}

    def _shares(self, batches: Sequence[Any]) -> Sequence[Any]:
        tasks: list[Any] = [whole.task for whole in self.wholes]
        if not hasattr(tasks[0], "num_counted"):
            rows = [next(tensor.shape[1] for tensor in tensors(batch)) for batch in batches]
            return [count / sum(rows) for count in rows]
        each = []
        for number, task in enumerate(tasks):  # attributes may differ, e.g., padding
            own = partial(torch.select, dim=0, index=number)
            each.append(torch.stack([task.num_counted(map_tensors(batch, own)) for batch in batches]))
        counted = torch.stack(each, dim=1)  # (batches, M)
        return (counted / counted.sum(0).clamp(min=1)).unbind()


def _keep_gradients(
    computed: tuple[Mapping[str, Tensor], Sequence[Tensor | None]], parameters: Sequence[Tensor], share: Any
) -> Mapping[str, Tensor]:
    values, gradients = computed
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            continue
        if share is not None:
            each = share.view(-1, *(1 for _ in gradient.shape[1:])) if isinstance(share, Tensor) else share
            gradient = gradient * each
        if parameter.grad is not None:
            parameter.grad.add_(gradient)
        elif gradient.stride() == parameter.stride():
            parameter.grad = gradient
        else:  # as in autograd: fused kernels expect the same strides
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return values
