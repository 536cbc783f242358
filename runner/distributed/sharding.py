"""Divides a model among processes, each with a part of every tensor (FSDP2), and gathers whole tensors (placement.strategy=fsdp)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from runner.device.placement import map_tensors
from runner.errors import RunnerError

T = TypeVar("T")

#: minimum numbers of a block that is gathered separately
BLOCK = 1_000_000


def dividing(device: torch.device, num: int) -> Callable[[Sequence[nn.Module]], Shards]:
    """Return a function that divides models among `num` processes. All of them call this together."""
    return partial(Shards, mesh=init_device_mesh(device.type, (num,)))


class Shards:
    """The models of a run whose parameters are divided among the processes (FSDP2); buffers stay whole.

    within() gathers each block for its computation and frees it again. All processes call within() and whole() together.
    """

    def __init__(self, models: Sequence[nn.Module], mesh: DeviceMesh, *, block: int = BLOCK) -> None:
        """Divide the models, which are on the host, and move the parts to the mesh's device block by block.

        block: an entry of an nn.Sequential or nn.ModuleList with at least this many numbers is gathered separately.
        Raises: RunnerError for parameters without a dimension, which can't be divided.
        """
        self._roots = {model: _divided(model, mesh, block) for model in models}
        self._is_first = mesh.get_local_rank() == 0
        self.summary = f"in {mesh.size()} parts, one with each process"

    def within(self, call: Callable[..., Mapping[str, Tensor]]) -> Callable[..., Mapping[str, Tensor]]:
        """Wrap call(model, ...) for models that are divided."""

        def inside(model: nn.Module, *args: Any) -> Mapping[str, Tensor]:
            root: Any = self._roots[model]
            values: Mapping[str, Tensor] = root(call, model, *args)
            return values

        return inside

    def let_go(self) -> None:
        """Free what forward passes without a backward pass gathered: it would hide new values."""
        for root in self._roots.values():
            root.reshard()

    def whole(self, tree: T) -> T:
        """Gather whole tensors on the host of the first process; the others keep their parts. Waits for the device.

        Each device holds one whole tensor at a time.
        """

        def gather(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            full = tensor.full_tensor()
            return full.cpu() if self._is_first else tensor.to_local()

        return map_tensors(tree, gather)

    def load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load a model's state of whole tensors, or the result of whole() in this process."""
        like = model.state_dict()
        model.load_state_dict({key: _part(value, like.get(key)) for key, value in state.items()})

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load an optimizer's state of whole tensors; what has the shape of its parameter is divided like it."""
        groups = zip(state["param_groups"], optimizer.param_groups, strict=False)  # torch reports mismatches
        parameters = {
            key: value for old, new in groups for key, value in zip(old["params"], new["params"], strict=False)
        }
        parts = {
            number: {name: _part(value, parameters.get(number)) for name, value in values.items()}
            for number, values in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": parts})


class _Root(nn.Module):
    """Gathers what is in no block around a task's call, since a task may call parts of the model, or call it twice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[..., Mapping[str, Tensor]], *args: Any) -> dict[str, Tensor]:
        return dict(call(*args))  # torch looks for gradients in dicts, not in other mappings


def _divided(model: nn.Module, mesh: DeviceMesh, block: int) -> FSDPModule:
    if name := next((name for name, parameter in model.named_parameters() if not parameter.dim()), ""):
        problem = f"{name} is a number without a dimension, and each process takes a part of the first one"
        fix = f"use `torch.ones(1)` instead of `torch.tensor(1.0)` for {name}, or `placement.strategy=ddp`"
        raise RunnerError.of("placement.strategy=fsdp", problem, fix)
    for each in blocks(model, at_least=block):
        fully_shard(each, mesh=mesh)
    root: Any = fully_shard(_Root(model), mesh=mesh)  # its class changes
    assert isinstance(root, FSDPModule)
    return root


def blocks(model: nn.Module, *, at_least: int) -> Iterator[nn.Module]:
    """Yield large entries of sequences, except sequences and modules that share a parameter."""
    uses = _uses(model)
    waiting = [(model, False)]
    while waiting:
        module, is_in_row = waiting.pop()
        is_row = isinstance(module, nn.Sequential | nn.ModuleList)
        own = _uses(module)
        is_large = sum(parameter.numel() for parameter in own) >= at_least
        if is_in_row and not is_row and is_large and all(uses[parameter] == count for parameter, count in own.items()):
            yield module
        else:
            waiting += [(child, is_row) for child in module.children()]


def _uses(model: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))


def _part(value: Any, like: Any) -> Any:
    if not isinstance(like, DTensor) or not isinstance(value, Tensor):
        return value
    layout = (like.device_mesh, like.placements)
    if value.shape == like.shape:  # every process has it, so it is not sent
        return distribute_tensor(value.to(like.device), *layout, src_data_rank=None)
    if value.shape == like.to_local().shape:
        sizes: dict[str, Any] = {"shape": like.shape, "stride": like.stride()}
        return DTensor.from_local(value.to(like.device), *layout, **sizes, run_check=False)
    return value
