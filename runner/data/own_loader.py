"""A user's DataLoader or IterableDataset as the rows of a Source. Its batches are served as they are (loading/served.py).

No validation split is cut from it: the validation and test splits are given next to it.
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


def has_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class OwnLoader(IterableDataset[Any]):
    """A loader, or an IterableDataset that the run makes batches of; its length is its number of rows.

    Without a length it has one batch until lasts() is called.
    """

    def __init__(self, found: DataLoader[Any] | IterableDataset[Any], *, asked: str) -> None:
        """Raises: RunnerError for one without rows."""
        self.found = found
        self.dataset: Any = found.dataset if isinstance(found, DataLoader) else found
        self.rows_a_batch = 1  # of the first batch, once it was read
        #: the user's generators and their first seeds: each epoch seeds them
        self.generators = [(each, each.initial_seed()) for each in self._parts_with("generator", torch.Generator)]
        self.has_length, self._length = True, 1
        try:
            self._length = len(found)  # type: ignore[arg-type]  # batches of a loader, rows of a dataset
        except (TypeError, NotImplementedError):
            self.has_length = False
        if self._length < 1:
            raise RunnerError.of(asked, f"`{type(self.dataset).__name__}` has no rows", "return at least one row")

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the state of the dataset, if it has one, after its first rows were read."""
        before = copy.deepcopy(self.dataset.state_dict()) if has_state(self.dataset) else None
        yield
        if before is not None:
            self.dataset.load_state_dict(before)

    def lasts(self, num_batches: int, *, batch_size: int) -> None:
        """Set the length of an epoch of a loader without one; where the loader ends, it begins again."""
        self._length = num_batches if self.is_loader else num_batches * batch_size

    def no_length(self, asked: str, *, or_steps: bool) -> Problem:
        """Return the error of a missing length. or_steps: `train.num_steps` would be enough."""
        kind = type(self.dataset).__name__
        steps = "use `train.num_steps=1000`, which is then one epoch, or " if or_steps else ""
        problem = f"`{kind}` has no length, and an epoch is as long as its data"
        return Problem(asked, problem, f"{steps}define `__len__` in `{kind}`: the number of rows of an epoch")

    @property
    def is_loader(self) -> bool:
        return isinstance(self.found, DataLoader)

    @property
    def fingerprint(self) -> str:
        return f"{type(self.dataset).__qualname__} {getattr(self.dataset, 'fingerprint', '')}"

    def __len__(self) -> int:
        """Return the rows of an epoch; of a batch sampler with its own sizes, those of its dataset."""
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
        """The loader's own; None if its batch sampler or the run decides."""
        return self.found.batch_size if isinstance(self.found, DataLoader) else None

    @property
    def num_readers(self) -> int:
        """The processes of a loader that each read an IterableDataset, and end with a smaller batch."""
        found = self.found
        is_iterable = isinstance(found, DataLoader) and isinstance(found.dataset, IterableDataset)
        return found.num_workers if is_iterable else 0  # type: ignore[union-attr]

    @property
    def filled_to(self) -> int | None:
        """The size to which smaller batches of several readers are joined, so that the loader's length is right.

        None if that can't happen, or if only the user's collate_fn knows how rows become a batch.
        """
        found = self.found
        if self.num_readers < 2 or not isinstance(found, DataLoader) or found.drop_last:
            return None
        return found.batch_size if found.collate_fn is default_collate else None

    def length_fix(self) -> str:
        """Return the help for a loader whose length is wrong."""
        if self.num_readers < 2:
            return "define `__len__`: the number of rows of an epoch"
        ends = "drops rows" if getattr(self.found, "drop_last", False) else "may end with a smaller batch"
        fix = "use an `__iter__` that takes its part by `get_worker_info()`, or `num_workers=1`"
        return f"{fix}: each of the {self.num_readers} processes reads the whole dataset and {ends}"

    def num_batches(self, batch_size: int) -> int:
        return self._length if self.is_loader else -(-self._length // batch_size)

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """Return the user's loader; of a dataset, one with the run's batch size, which reads in this process."""
        if isinstance(self.found, DataLoader):
            return self.found
        own = getattr(self.found, "collate_fn", None)
        return DataLoader(self.found, batch_size=batch_size, collate_fn=own if callable(own) else collate)

    def begin(self, epoch: int) -> None:
        """Seed the user's generators, and call every `set_epoch`."""
        for each, first_seed in self.generators:
            each.manual_seed(mixed(first_seed, EPOCH, epoch))
        for set_epoch in self._parts_with("set_epoch", Callable):
            set_epoch(epoch)

    def _parts_with(self, name: str, kind: Any) -> list[Any]:
        found = self.found
        samplers = (found.sampler, found.batch_sampler) if isinstance(found, DataLoader) else (None, None)
        parts = (found, *samplers, getattr(samplers[1], "sampler", None), self.dataset)
        values = [getattr(part, name, None) for part in parts]
        return list({id(getattr(each, "__self__", each)): each for each in values if isinstance(each, kind)}.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)
