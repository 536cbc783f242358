"""Averages gradients over all processes: wraps model and task in one task for the step, whole (DDP) or in parts (FSDP2).

Each batch is weighted by its examples, or by what counts in it, so that the mean is over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runner.data.loading.batches import Share
from runner.errors import RunnerError
from runner.tasks.task import Task

if TYPE_CHECKING:
    from runner.distributed.sharding import Shards


class SharedGradients:
    """Averages the gradients of a model that every process has, for the training step.

    DistributedDataParallel wraps the task with the model in it, because a task may call parts of the model, or call it twice.
    A step raises a RunnerError if parameters took no part in the loss.
    """

    def __init__(self, model: nn.Module, task: Task, *, num: int, unused_parameters: bool) -> None:
        """Set every process's parameters and buffers to those of the first one."""
        self._num, self._num_counted = num, getattr(task, "num_counted", None)
        self._wrapped = DistributedDataParallel(
            _Learning(model, task), find_unused_parameters=unused_parameters, gradient_as_bucket_view=True
        )

    def task(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Compute the task with the wrapped model; for make_step()."""
        try:
            values: Mapping[str, Tensor] = self._wrapped(batch)
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            problem = "some parameters of the model took no part in the last step's loss, and the processes wait for all of them"
            fix = "use `placement.unused_parameters=true`, or `model.freeze` for those that never learn"
            raise RunnerError.of("several processes", problem, fix) from error
        return values

    def own_batches(self, shares: Sequence[Share]) -> Iterator[tuple[Any, float | Tensor]]:
        """Yield each batch of a group and its weight in the mean over all processes. Gradients are exchanged with the last."""
        for index, (batch, weight) in enumerate(_weighted(shares, self._num, self._num_counted)):
            is_last = index == len(shares) - 1
            with nullcontext() if is_last else self._wrapped.no_sync():
                yield batch, weight


class ShardedGradients:
    """Averages the gradients of a model that is divided among the processes.

    They exchange gradients for each batch of a group, since whole gradients would take the memory that shards save.
    """

    def __init__(self, shards: Shards, task: Task, *, num: int) -> None:
        self.task, self._num, self._num_counted = shards.within(task), num, getattr(task, "num_counted", None)

    def own_batches(self, shares: Sequence[Share]) -> Iterator[tuple[Any, float | Tensor]]:
        return _weighted(shares, self._num, self._num_counted)


def _weighted(
    shares: Sequence[Share], num: int, num_counted: Callable[[Any], Tensor] | None
) -> Iterator[tuple[Any, float | Tensor]]:
    if num_counted is None:
        rows = sum(share.rows.of for share in shares)
        for share in shares:
            yield share.batch, share.rows.num * num / rows
        return
    # a share without examples repeats another process's example, which does not count
    counts = torch.stack([num_counted(share.batch) * bool(share.rows.num) for share in shares])
    total = counts.sum()
    torch.distributed.all_reduce(total)  # on the device, without a read
    for share, weight in zip(shares, (counts * num / total.clamp(min=1)).unbind(), strict=True):
        yield share.batch, weight


class _Learning(nn.Module):
    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model = model
        self._task = (task,)  # not as a submodule: it trains nothing, and its buffers are the same everywhere

    def forward(self, batch: Any) -> Mapping[str, Tensor]:
        return self._task[0](self.model, batch)
