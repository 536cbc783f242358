"""Takes one step of all members: forward and backward over the stack, clipping, update, averages. Returns values, (M,).

For fit.py; check.py and size.py try it before. It keeps in how many pieces the members go through it: more where memory ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import TrainKeys
from runner.device import backends
from runner.device.placement import map_tensors, tensors
from runner.device.torch_private import foreach_copy_
from runner.training.parts import Parts
from runner.training.stacked.compiled import Compiled, Function
from runner.training.stacked.functions import MembersFunctions
from runner.training.stacked.stack import ModelStack, Weights
from runner.training.stacked.update import Lane, clip
from runner.training.step.train_step import mean_over


@dataclass(frozen=True)
class Members:
    """Members with the same settings, side by side in the stack."""

    parts: Sequence[Parts]
    train: TrainKeys


class StackedStep:
    """The step of a stack. What one member computes does not depend on the others.

    num_pieces: in how many parts the members go through forward and backward; twice as many where memory ends.
    compiled: what takes a part's forward and backward (None: they are taken as they are written).
    """

    def __init__(
        self,
        stack: ModelStack,
        members: Sequence[Members],
        *,
        num_pieces: int,
        say: Callable[[str], None],
        compiled: Compiled | None = None,
    ) -> None:
        self.stack, self._say, self.compiled = stack, say, compiled
        self.lanes = [Lane(same.parts) for same in members]
        first = members[0].parts[0]
        self._largest_norms = [same.train.clip_grad_norm for same in members]
        self._schedules = [same.parts[0].schedule for same in members]
        self.device, self._channels_last = first.device, first.layout.startswith("channels last")
        self._own = {  # each member's tensors of a stacked one
            name: [whole.get_parameter(name) for whole in stack.wholes]
            for name, value in stack.parameters.items()
            if value.requires_grad
        }
        self._buffers = list(stack.buffers.values())
        self._before = [buffer.clone() for buffer in self._buffers]
        self._generators: list[torch.Generator] = []
        self.divide(num_pieces)

    @contextmanager
    def drawing(self, states: Sequence[dict[str, Any]]) -> Iterator[Callable[[], list[Tensor]]]:
        """Draw from each member's generator in the block, and update `states` afterwards. Yields a function that reads them."""
        key = "cpu" if self.device.type == "cpu" else "device"
        self._generators = [torch.Generator(self.device) for _ in states]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state[key])
        try:
            yield lambda: [generator.get_state() for generator in self._generators]
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                state[key] = generator.get_state()

    def take(self, batches: Sequence[Any]) -> Mapping[str, Tensor]:
        """One step. batches: of each of the steps that accumulate, tensors (M, B, ...). Returns (M,) a value, on the device."""
        values = self.forward_backward(batches)
        norms = clip(self.lanes, self._largest_norms)
        for lane in self.lanes:
            lane.update()
        return values if norms is None else {**values, "grad_norm": norms}

    def move_rates(self) -> None:
        """Has the schedules take their step, one for each lane."""
        for schedule in self._schedules:
            schedule.after_step()

    def follow(self) -> None:
        """Update each member's state besides its weights."""
        for lane in self.lanes:
            lane.follow()

    @property
    def num_together(self) -> int:
        """Members that compute together; compiled, that a function is made of."""
        size = -(-len(self.stack) // self.num_pieces)
        return self.compiled.num_together if self.compiled else size

    def divide(self, num_pieces: int) -> None:
        """Set the number of parts in which members compute forward and backward; with one each, a member uses its own model."""
        self.num_pieces = num_pieces
        size = -(-len(self.stack) // num_pieces)
        if self.compiled:
            self.compiled.fit_to(size)
        self._pieces = [slice(at, min(at + size, len(self.stack))) for at in range(0, len(self.stack), size)]
        self._weights = [self.stack.weights(piece) for piece in self._pieces] if size > 1 or self.compiled else []
        self._needs_functions = True  # until a step shows otherwise

    def forward_backward(self, batches: Sequence[Any]) -> Mapping[str, Tensor]:
        """Values (M,) of all members; sets their parameters' gradients. Uses more pieces if memory runs out."""
        while (values := self._attempt(batches)) is None:
            pass
        return values

    def _in_pieces(self, batches: Sequence[Any]) -> Mapping[str, Tensor]:
        if not self._weights:
            each = [self._of_one(batches, number) for number in range(len(self.stack))]
            return {name: torch.stack([own[name] for own in each]) for name in each[0]}
        each = []
        for piece, weights in zip(self._pieces, self._weights, strict=True):
            each.append(self._of_some(batches, piece, weights))
            self._hand_out(weights, piece)
        return each[0] if len(each) == 1 else {name: torch.cat([some[name] for some in each]) for name in each[0]}

    def _hand_out(self, weights: Weights, members: slice) -> None:
        for name, own in self._own.items():
            gradient, weights.parameters[name].grad = weights.parameters[name].grad, None
            if gradient is not None:
                for parameter, part in zip(own[members], gradient.unbind(), strict=True):
                    parameter.grad = part

    def of_first(self, batches: Sequence[Any]) -> None:
        """Forward and backward of the first piece only; call undo() afterwards."""
        if self._weights:
            self._of_some(batches, self._pieces[0], self._weights[0])
        else:
            self._of_one(batches, 0)

    def _of_some(self, batches: Sequence[Any], members: slice, weights: Weights) -> Mapping[str, Tensor]:
        functions = MembersFunctions(self._generators[members], channels_last=self._channels_last)
        is_whole = members == slice(0, len(self.stack))

        def forward_backward(batch: Any, share: Any) -> Mapping[str, Tensor]:
            own = batch if is_whole else map_tensors(batch, lambda tensor: tensor[members])
            if (made := self._made(weights, own, functions)) is not None:
                return _keep_gradients(made(weights, own, functions), weights, share)
            with functions if self._needs_functions else nullcontext():
                values = self.stack.forward(weights, own)
            return _backward(values, share)

        values = _accumulated(batches, self._shares(batches, members), forward_backward)
        if not functions.was_needed:
            self._needs_functions = False  # until one draws after all: see _attempt()
        return values

    def _made(self, weights: Weights, batch: Any, functions: MembersFunctions) -> Function | None:
        made = self.compiled.of(self.stack, weights, batch, functions) if self.compiled else None
        if self.compiled and self.compiled.why_not:
            self._say(f"compile: nothing, as {self.compiled.why_not}")
            self.compiled = None
        return made

    def _of_one(self, batches: Sequence[Any], number: int) -> Mapping[str, Tensor]:
        def forward_backward(batch: Any, share: Any) -> Mapping[str, Tensor]:
            values = self.stack.forward_one(number, map_tensors(batch, partial(_row, number=number)))
            return _backward(values, share)

        shares = [
            share[0] if isinstance(share, Tensor) else share
            for share in self._shares(batches, slice(number, number + 1))
        ]
        with _drawing_from(self._generators[number], self.device):
            return _accumulated(batches, shares, forward_backward)

    def _shares(self, batches: Sequence[Any], members: slice) -> Sequence[Any]:
        tasks: list[Any] = [whole.task for whole in self.stack.wholes[members]]
        if len(batches) == 1:
            return [1.0]
        if not hasattr(tasks[0], "num_counted"):
            rows = [_num_rows(batch) for batch in batches]
            return [count / sum(rows) for count in rows]
        each = []
        for number, task in enumerate(tasks, start=members.start):  # attributes may differ, e.g., padding
            own = partial(_row, number=number)
            each.append(torch.stack([task.num_counted(map_tensors(batch, own)) for batch in batches]))
        counted = torch.stack(each, dim=1)  # (batches, m)
        return (counted / counted.sum(0).clamp(min=1)).unbind()

    def _attempt(self, batches: Sequence[Any]) -> Mapping[str, Tensor] | None:
        if self._buffers:
            foreach_copy_(self._before, self._buffers)
        drawn = [generator.get_state() for generator in self._generators] if self._needs_functions else []
        try:
            return self._in_pieces(batches)
        except RuntimeError as error:
            draws_now = not self._needs_functions and "randomness error mode" in str(error)
            if not draws_now and (not backends.is_out_of_memory(error) or self.num_pieces >= len(self.stack)):
                raise
        self.undo(drawn, frees=not draws_now)
        if draws_now:
            self._needs_functions = True
        else:
            if self.compiled:
                self.compiled.num_together = 0  # what is made of as many has no room
            self.divide(min(2 * self.num_pieces, len(self.stack)))
            members = -(-len(self.stack) // self.num_pieces)
            self._say(f"out of memory: {members} of {len(self.stack)} members at a time now")
        return None

    def undo(self, drawn: Sequence[Tensor] = (), *, frees: bool = False) -> None:
        """Undo a forward and backward pass.

        Args:
            drawn: States of the generators before it.
            frees: Whether the allocator also returns its cached memory, after an allocation failed.
        """
        for parameters in [self.stack.parameters, *(weights.parameters for weights in self._weights)]:
            for parameter in parameters.values():
                parameter.grad = None
        for whole in self.stack.wholes:
            whole.zero_grad()
        for generator, state in zip(self._generators, drawn, strict=False):
            generator.set_state(state)
        if self._buffers:
            foreach_copy_(self._buffers, self._before)
        if frees:
            backends.empty_cache(self.device)


def _accumulated(
    batches: Sequence[Any], shares: Sequence[Any], forward_backward: Callable[[Any, Any], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    if len(batches) == 1:
        return forward_backward(batches[0], None)
    return mean_over(zip(batches, shares, strict=True), forward_backward)


def _backward(values: Mapping[str, Tensor], share: Any) -> Mapping[str, Tensor]:
    loss = next(iter(values.values()))
    (loss if share is None else loss * share).sum().backward()
    return {name: value.detach() for name, value in values.items()}


def _keep_gradients(
    found: tuple[Mapping[str, Tensor], Sequence[Tensor | None]], weights: Weights, share: Any
) -> Mapping[str, Tensor]:
    values, gradients = found
    trained = [parameter for parameter in weights.parameters.values() if parameter.requires_grad]
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


@contextmanager
def _drawing_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    own: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    own.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(own.get_rng_state())


def _row(tensor: Tensor, number: int) -> Tensor:
    return tensor[number]


def _num_rows(batch: Any) -> int:
    return next(tensor.shape[1] for tensor in tensors(batch))
