"""Chooses the number of CPU threads for a training's steps, from a few rows of a batch. For experiment/build.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from runner.device.placement import map_tensors, num_rows
from runner.device.torch_private import TorchDispatchMode, WithoutDynamo
from runner.errors import CODE_ERRORS
from runner.inspection.costs import flops_of
from runner.tasks.task import Task

#: floating point operations of a matrix product per thread; with fewer, waiting for the threads costs more than they save
FLOPS_A_THREAD = 1.25e6
#: rows that are computed to count a batch's operations
FEW_ROWS = 8


def threads_worth(flops: float, *, most: int) -> int:
    """Threads for steps whose products (of matrices, convolutions) take `flops` operations on average."""
    return max(1, min(most, int(flops / FLOPS_A_THREAD)))


def flops_a_product(
    task: Task, model: nn.Module, batch: Any, *, autocast: Callable[[], AbstractContextManager[Any]]
) -> float | None:
    """The average operations of a product in the forward pass of a batch; None if they can't be counted.

    Computes a few rows with a copy of the model. A model that draws random numbers advances torch's generators.
    """
    few, rows = map_tensors(batch, lambda tensor: tensor[:FEW_ROWS]), num_rows(batch)
    products = Products()
    try:
        task, model = copy.deepcopy((task, model))
        for module in (task, model):
            if isinstance(module, nn.Module):
                module.eval()
        with products, autocast():
            task(model, few)
    except CODE_ERRORS:  # the first step reports it, with more context
        return None
    if not products.num:
        return None
    return products.flops / products.num * rows / num_rows(few)


class Products(WithoutDynamo, TorchDispatchMode):
    """Counts the operations for which torch has a formula."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.num = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if flops := flops_of(op, args, kwargs or {}, result):
            self.flops += flops
            self.num += len(args[0]) if op.__name__.startswith("mkldnn_rnn_layer") else 1  # a product each time step
        return result
