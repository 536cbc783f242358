"""Compiles forward and backward of several members: a batch in, values (m,) and gradients (m, ...) out. For step.py.

A function takes only tensors: weights, buffers, the batch, and dropout's masks, which each member's generator draws before the
call. So the masks are those of a run that is not compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.device import backends, torch_private
from runner.device.placement import map_tensors, tensors
from runner.device.torch_private import foreach_copy_
from runner.errors import first_line
from runner.training.stacked.stack import MembersFunctions, ModelStack
from runner.training.step.compiled import check_compiler
from runner.training.step.on_device import Compiling

ATEN = torch.ops.aten


@dataclass
class Compiled:
    """The functions of a group: one for each number of members and shape of a batch, made where it is first needed.

    That takes seconds. So when members leave, the others use the same function, with copies of the last member, until half of
    the members have left.

    say: Prints why nothing is compiled. why_not: That reason. seconds: That making the functions has taken.
    """

    kind: Compiling
    say: Callable[[str], None]
    why_not: str = ""
    seconds: float = 0.0
    _functions: dict[tuple[int, str], Function] = field(default_factory=dict)

    def function_for(self, stack: ModelStack, batch: Any, functions: MembersFunctions) -> Function | None:
        """Return what takes forward and backward of such a batch, (m, B, ...); None where it is taken as it is written.

        Raises: RunnerError without a compiler, RuntimeError where the memory ends.
        """
        count, rows = tensors(batch)[0].shape[:2]
        if self.why_not or self.kind.usual_rows not in (None, rows):
            return None
        look = repr([(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors(batch)] + _constants(stack))
        larger = [size for size, other in self._functions if other == look and count <= size < 2 * count]
        key = (min(larger, default=count), look)
        if key not in self._functions:
            began = time.perf_counter()
            try:
                self._functions[key] = Function(stack, batch, functions, options=self.kind.options)
            except Exception as error:  # whatever torch's compiler raises
                if backends.is_out_of_memory(error):
                    raise
                check_compiler(error)
                self.why_not = first_line(error) or type(error).__name__
                self.say(f"compile: nothing, as {self.why_not}")
                return None
            self.seconds += time.perf_counter() - began
        return self._functions[key]

    def clear(self) -> None:
        """Forget the functions, for which the memory is too small."""
        self._functions.clear()


def _constants(stack: ModelStack) -> list[Any]:
    """Return which weights a function of this stack contains, and their memory: those that its members share."""
    named = stack.wholes[0].named_parameters()
    return [(name, each.data_ptr()) for name, each in named if name not in stack.parameters]


class Function:
    """Forward and backward of as many members as a stack has, or fewer, for batches of one shape; made by three calls of them."""

    def __init__(
        self, stack: ModelStack, batch: Any, functions: MembersFunctions, *, options: Mapping[str, Any] | None
    ) -> None:
        self._size, self._names = len(stack.wholes), list[str]()
        self._masks: list[tuple[Tensor, float, bool]] = []  # values of one member without memory, rate, by channel

        def compute(*inputs: Tensor) -> list[Tensor | None]:
            each, self._masks = iter(inputs), []

            def next_mask(like: Tensor, p: float, by_channel: bool) -> Tensor:
                of_one = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape[1:])
                self._masks.append((of_one, p, by_channel))
                return next(each, torch.ones_like(like))  # unknown in the first call

            parameters = {
                name: next(each).detach().requires_grad_(own.requires_grad) for name, own in stack.parameters.items()
            }
            buffers = {name: next(each).clone() for name in stack.buffers}
            own = map_tensors(batch, lambda _: next(each))
            with functions.with_masks(next_mask):
                values = stack.forward(parameters, buffers, own)
            self._names = list(values)
            trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
            gradients = torch.autograd.grad(next(iter(values.values())).sum(), trained, allow_unused=True)
            return [*(value.detach() for value in values.values()), *buffers.values(), *gradients]

        compute(*self._inputs(stack, batch, []))
        masks = [functions.draw_masks([like] * self._size, 0.0, by_channel) for like, _, by_channel in self._masks]
        inputs = self._inputs(stack, batch, masks)
        graph, again = (torch_private.make_fx(compute)(*inputs) for _ in range(2))
        if not _are_same(graph, again):
            raise ValueError("the forward pass is another each time by something of the host's")
        turn_products(graph)
        self._compute = torch_private.compile_graph(graph, inputs, options=options)

    def __call__(
        self, stack: ModelStack, batch: Any, functions: MembersFunctions
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Return the values, and the gradients of what trains. Buffers are as a forward pass leaves them."""
        count = len(stack.wholes)
        masks = [functions.draw_masks([like] * count, p, by_channel) for like, p, by_channel in self._masks]
        with torch.no_grad():
            found = self._compute(*self._inputs(stack, batch, masks))
            own = [None if each is None else each[:count] for each in found] if count < self._size else found
            values, rest = own[: len(self._names)], own[len(self._names) :]
            if stack.buffers:
                foreach_copy_(list(stack.buffers.values()), rest[: len(stack.buffers)])
        return dict(zip(self._names, values, strict=True)), rest[len(stack.buffers) :]

    def _inputs(self, stack: ModelStack, batch: Any, masks: Sequence[Tensor]) -> list[Tensor]:
        weights = [*stack.parameters.values(), *stack.buffers.values()]
        each = [*(tensor.detach() for tensor in weights), *tensors(batch), *masks]
        return each if len(each[-1]) == self._size else [_filled(tensor, self._size) for tensor in each]


def _filled(tensor: Tensor, size: int) -> Tensor:
    whole = tensor.new_empty_strided((size, *tensor.shape[1:]), tensor.stride())
    whole[: len(tensor)] = tensor
    whole[len(tensor) :] = tensor[-1:]
    return whole


def _are_same(graph: Any, other: Any) -> bool:
    own, others = (
        [getattr(each, node.target) for node in each.graph.find_nodes(op="get_attr")] for each in (graph, other)
    )
    return graph.code == other.code and all(map(torch.equal, own, others))


def turn_products(graph: Any) -> None:
    """Replace (X @ Y).T by Y.T @ X.T in a torch.fx graph, the gradient of a linear layer's weight: no copy, and faster."""
    turn, product = ATEN.transpose.int, ATEN.bmm.default
    for node in graph.graph.find_nodes(op="call_function", target=turn):
        source = node.args[0]
        while source.target in (ATEN.view.default, ATEN._unsafe_view.default) and len(source.users) == 1:
            if source.meta["val"].shape != source.args[0].meta["val"].shape:
                break
            source = source.args[0]
        if (
            source.target is not product
            or len(source.users) > 1
            or sorted(axis % 3 for axis in node.args[1:]) != [1, 2]
        ):
            continue
        with graph.graph.inserting_before(node):
            one, other = (graph.graph.call_function(turn, (each, 1, 2)) for each in reversed(source.args))
            turned = graph.graph.call_function(product, (one, other))
        node.replace_all_uses_with(turned)
    graph.graph.eliminate_dead_code()
    graph.recompile()
