"""Splits a batch that doesn't fit into the device's memory (train.on_oom=split), or suggests other settings.

The number of parts is in the run's progress, and so in its checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from runner.config.settings import Settings
from runner.device import backends
from runner.device.placement import map_tensors, num_bytes, num_rows
from runner.errors import RunnerError, first_line
from runner.training.carried_state import TensorCopies
from runner.training.loop import Progress
from runner.training.parts import Parts

ForwardBackward = Callable[[Sequence[Any]], Mapping[str, Tensor]]


class SplitBatch:
    """Splits each batch into parts; twice as many whenever the memory is too small.

    The gradients are summed over the parts, weighted by their examples, so the step is the same except for rounding. Batch
    norm and dropout see the parts.
    """

    def __init__(self, parts: Parts, progress: Progress, *, say: Callable[[str], None]) -> None:
        self._device, self._optimizer, self._say = parts.device, parts.optimizer, say
        self._carried = parts.carried
        self._progress, self._buffers = progress, TensorCopies(parts.model.buffers())

    def wrap(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Repeat forward and backward in smaller parts if memory runs out.

        Costs a copy of the model's buffers per step, as an interrupted forward pass may have changed them.
        """

        def forward_backward_parts(batches: Sequence[Any]) -> Mapping[str, Tensor]:
            self._buffers.take()
            while True:
                values = self._forward_backward(forward_backward, batches)
                if values is not None:  # outside the except clause, whose error keeps the activations alive
                    return values
                self._optimizer.zero_grad()
                self._buffers.put_back()
                backends.empty_cache(self._device)
                self._progress.num_pieces *= 2
                num = self._progress.num_pieces
                rows = max(num_rows(batch) for batch in batches)
                self._say(f"out of memory: each batch is split into {num} parts of {-(-rows // num)} rows now")

        return forward_backward_parts

    def _forward_backward(
        self, forward_backward: ForwardBackward, batches: Sequence[Any]
    ) -> Mapping[str, Tensor] | None:
        parts = [part for batch in batches for part in in_parts(batch, self._progress.num_pieces)]
        try:
            return forward_backward(parts)
        except RuntimeError as error:
            if not backends.is_out_of_memory(error) or max(map(num_rows, parts)) <= 1:
                raise
            if names := self._carried.replaced():
                problem = f"forward replaces `{names[0]}`, and the parts of a batch would replace it several times"
                fix = "use a smaller `train.batch_size`, which needs no parts"
                raise RunnerError.of("train.on_oom=split", problem, fix) from error
        return None


def in_parts(batch: Any, num: int) -> Iterator[Any]:
    """Views of the batch in at most `num` parts; tensors with another first dimension are not split."""
    rows = num_rows(batch)
    size = max(1, -(-rows // num))
    if size >= rows:
        yield batch
        return
    for start in range(0, rows, size):
        yield _rows(batch, slice(start, start + size), rows)


def _rows(batch: Any, chosen: slice, rows: int) -> Any:
    return map_tensors(batch, lambda tensor: tensor[chosen] if tensor.dim() and len(tensor) == rows else tensor)


def explain(error: BaseException, parts: Parts, settings: Settings, *, num_processes: int) -> str:
    """Torch's message, what needs the memory, and which settings help.

    Several processes and CUDA graphs can't split a batch, and graphs can't stream their data.
    """
    is_captured = settings.train.cuda_graph
    may_split = settings.train.on_oom != "split" and num_processes == 1 and not is_captured
    message = first_line(error).rpartition("DefaultCPUAllocator: ")[2]
    weights = num_bytes(parts.model.state_dict())
    taken = {
        "weights": weights + (num_bytes(parts.average.model.state_dict()) if parts.average else 0),
        "gradients": sum(parameter.nbytes for parameter in parts.model.parameters() if parameter.requires_grad),
        "optimizer": num_bytes(dict(parts.optimizer.state)),
        "data set": sum(loader.device_bytes for loader in parts.loaders),
    }
    named = ", ".join(f"{name} {count / 2**20:,.0f} MiB" for name, count in taken.items() if count >= 2**20)
    batch_size = parts.train.batch_size
    fix = [f"train.batch_size={batch_size // 2}"] if batch_size > 1 else []
    fix += ["train.on_oom=split (the same step, in parts)"] if may_split else []
    fix += ["train.precision=bf16"] if parts.precision.name == "fp32" else []
    fix += ["data.residency=stream"] if taken["data set"] > weights and not is_captured else []
    fix = fix or ["a smaller model"]
    return (
        f"out of memory on {parts.device}: {message} There: {named}; the rest is activations. Write {' or '.join(fix)}"
    )
