"""Reads given rows as batches on the host, in this process or in a DataLoader's worker processes."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from runner.data.loading.order import generator
from runner.data.loading.shared_memory import PREFETCH, Refused, told
from runner.data.map_style import batch_of
from runner.device.placement import map_tensors, num_rows, tensors
from runner.errors import Problem, RunnerError, in_words

Planned = tuple[int, list[int]]  # of a batch: the seed for what it draws, and the numbers of its rows


class Reader:
    """A DataLoader that is told its batches before each epoch, and its processes with it.

    They stay from epoch to epoch: 2 of them take 0.1 s to start by fork and 2 to 4 s by spawn (2 cores, 2026-11).
    """

    def __init__(self, rows: Any, *, num_workers: int, pin_memory: bool) -> None:
        self._plan, self._num_workers = _Plan(), num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _FromDataset(rows) if isinstance(rows, Dataset) else _FromTensors(rows),
            batch_sampler=self._plan,
            num_workers=num_workers,
            prefetch_factor=PREFETCH if num_workers else None,
            persistent_workers=num_workers > 0,
            collate_fn=_as_it_is,
            pin_memory=pin_memory,
            generator=generator(0),  # else the seeds that DataLoader gives to processes come from the run's own numbers
        )

    def read(self, plan: Iterator[Planned]) -> Iterator[Any]:
        self._plan.batches = plan
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # the error below says it, with its mend
                return told(iter(self._loader), self._num_workers)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if not self._num_workers:
                raise
            problem = f"the Dataset can't be sent to the processes that would read it: {error}"
            fix = "data.num_workers=0, or a Dataset without lambdas, open files and classes inside functions"
            raise RunnerError(Problem(f"data.num_workers={self._num_workers}", problem, fix)) from error

    def close(self) -> None:
        """Ends the processes and waits for that; DataLoader itself leaves it to the garbage collector."""
        stop = getattr(self._loader._iterator, "_shutdown_workers", None)
        if stop is not None:
            stop()


class _Plan:
    """The batches of one epoch, as a DataLoader asks for them."""

    batches: Iterator[Planned] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.batches


class _FromTensors(Dataset[Any]):
    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return num_rows(self._rows)

    def __getitems__(self, planned: Planned) -> Any:
        chosen = torch.tensor(planned[1])
        return _shared(map_tensors(self._rows, lambda tensor: tensor.index_select(0, chosen)))


class _FromDataset(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, planned: Planned) -> Any:
        try:
            return _shared(self._batch(*planned))
        except RunnerError as error:
            if get_worker_info() is None:
                raise
            return Refused(error.problems)
        except SystemExit as error:
            if get_worker_info() is None:
                raise
            raise RuntimeError(in_words(error)) from error  # else nobody hears why this process has gone

    def _batch(self, seed: int, chosen: list[int]) -> Any:
        with _drawing_from(seed):
            several = getattr(self._dataset, "__getitems__", None)
            rows = several(chosen) if several else [self._dataset[index] for index in chosen]
            return batch_of(self._dataset, rows)


def _shared(batch: Any) -> Any:
    """In a process that reads: the batch in shared memory, where the thread that sends it would put it. Without room it
    fails there unheard, and the training would wait for ever; here the error is handed over in the batch's place."""
    if get_worker_info() is not None:
        for tensor in tensors(batch):
            if tensor.layout is torch.strided and tensor.device.type == "cpu":
                tensor.share_memory_()
    return batch


@contextmanager
def _drawing_from(seed: int) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the device, too
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _as_it_is(batch: Any) -> Any:
    return batch
