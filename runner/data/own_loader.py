"""A person's DataLoader or IterableDataset as rows of a Source: what it gives is served as it is (loading/served.py).

Made by source.as_source(). Nothing is cut off it and nothing drawn of it: val and test are what stands beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from runner.data.loading.order import EPOCH, mixed
from runner.data.map_style import collate
from runner.errors import Problem, RunnerError


class OwnLoader(IterableDataset[Any]):
    """Batches by a person's own rules; its length is its rows.

    One without a length is a batch long until somebody says how much of it is an epoch, see lasts().
    """

    def __init__(self, found: DataLoader[Any] | IterableDataset[Any], *, asked: str) -> None:
        """Raises: RunnerError for one without rows."""
        self.found = found
        self.dataset: Any = found.dataset if isinstance(found, DataLoader) else found
        self.rows_a_batch = 1  # of the first one, once it was read
        self.has_integers = False  # in its inputs, once it was read
        #: that the person gave, and their first seeds: each epoch seeds them anew
        self.generators = [(each, each.initial_seed()) for each in self._own("generator", torch.Generator)]
        self.has_length, self._length = True, 1
        try:
            self._length = len(found)  # type: ignore[arg-type]  # batches of a loader, rows of a dataset
        except (TypeError, NotImplementedError):
            self.has_length = False
        if self._length < 1:
            raise RunnerError.of(asked, f"`{type(self.dataset).__name__}` has no rows", "return at least one row")

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """A look at its first rows leaves a dataset that tells its state where it was: it may go on from there."""
        tells = all(callable(getattr(self.dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        before = copy.deepcopy(self.dataset.state_dict()) if tells else None
        yield
        if tells:
            self.dataset.load_state_dict(before)

    def lasts(self, num_batches: int, *, batch_size: int) -> None:
        """Of one without a length: so many batches are an epoch; where it ends before, it begins again."""
        self._length = num_batches if self.is_loader else num_batches * batch_size

    def no_length(self, asked: str, *, or_steps: bool) -> Problem:
        """What to write where nobody knows when its epochs end. or_steps: a number of steps would say it, too."""
        kind = type(self.dataset).__name__
        problem = f"`{kind}` has no length, and an epoch is as long as its data"
        fix = f"define `__len__` in `{kind}`: the number of rows of an epoch"
        return Problem(
            asked, problem, f"use `train.num_steps=1000`, which is then one epoch, or {fix}" if or_steps else fix
        )

    @property
    def is_loader(self) -> bool:
        return isinstance(self.found, DataLoader)

    @property
    def fingerprint(self) -> str:
        """What it is, and the text by which its dataset tells its values, where it can."""
        return f"{type(self.dataset).__qualname__} {getattr(self.dataset, 'fingerprint', '')}"

    def __len__(self) -> int:
        """Rows of an epoch; of a loader whose batch sampler has its own sizes, those of its dataset."""
        if not isinstance(self.found, DataLoader):
            return self._length
        if self.found.batch_sampler is None:  # its dataset gives batches
            return self._length * self.rows_a_batch
        known = (self.found.dataset,) if self.batch_size is None else (self.found.sampler, self.found.dataset)
        for rows in known if self.has_length else ():
            with suppress(TypeError, NotImplementedError):
                num = len(rows)  # type: ignore[arg-type]
                return min(num, self._length * (self.batch_size or num))  # drop_last leaves some out
        return self._length * (self.batch_size or self.rows_a_batch)

    @property
    def batch_size(self) -> int | None:
        """Of a loader that makes its batches by their number; None: as its batch sampler has them, or the run."""
        return self.found.batch_size if isinstance(self.found, DataLoader) else None

    @property
    def num_readers(self) -> int:
        """Processes of a loader that each read an IterableDataset by themselves, and end with a smaller batch of their own."""
        found = self.found
        is_read_whole = isinstance(found, DataLoader) and isinstance(found.dataset, IterableDataset)
        return found.num_workers if is_read_whole else 0  # type: ignore[union-attr]

    @property
    def filled_to(self) -> int | None:
        """Rows of a batch, where smaller ones that processes end with can be put together: then there are as many batches as
        the loader's length says. None: where there are none, or only the person knows how rows become a batch."""
        found = self.found
        if self.num_readers < 2 or not isinstance(found, DataLoader) or found.drop_last:
            return None
        return found.batch_size if found.collate_fn is default_collate else None

    def of_another_length(self) -> str:
        """What to write where it gives more or fewer batches than its length says."""
        if self.num_readers < 2:
            return "define `__len__`: the number of rows of an epoch"
        ends = "drops rows" if getattr(self.found, "drop_last", False) else "may end with a smaller batch"
        return (
            f"use an `__iter__` that takes its part by `get_worker_info()`, or `num_workers=1`: each of the {self.num_readers} "
            f"processes reads the dataset by itself and {ends}"
        )

    def num_batches(self, batch_size: int) -> int:
        """Of an epoch."""
        return self._length if self.is_loader else -(-self._length // batch_size)

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """The person's own; of a dataset, one with the run's batch size, which reads in this process."""
        if isinstance(self.found, DataLoader):
            return self.found
        own = getattr(self.found, "collate_fn", None)
        return DataLoader(self.found, batch_size=batch_size, collate_fn=own if callable(own) else collate)

    def begin(self, epoch: int) -> None:
        """Seeds the generators that the person gave, and tells the epoch to whoever asks for it (`set_epoch`)."""
        for each, first_seed in self.generators:
            each.manual_seed(mixed(first_seed, EPOCH, epoch))
        for set_epoch in self._own("set_epoch", Callable):
            set_epoch(epoch)

    def _own(self, name: str, kind: Any) -> list[Any]:
        found = self.found
        by_index = (found.sampler, found.batch_sampler) if isinstance(found, DataLoader) else ()
        inner = getattr(by_index[1], "sampler", None) if by_index else None
        has = [getattr(part, name, None) for part in (found, *by_index, inner, self.dataset)]
        once = {id(getattr(each, "__self__", each)): each for each in has if isinstance(each, kind)}
        return list(once.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)
