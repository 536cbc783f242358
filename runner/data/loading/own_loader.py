"""A user's DataLoader or IterableDataset: the rows of a Source, and its batches as it gives them.

No validation split is cut from it: the validation and test splits are given next to it.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from runner.data.conversion import STANDARD, collate
from runner.data.loading.batches import Batches, Shard, Share
from runner.data.loading.order import CPU, EPOCH, mixed, seed_host
from runner.device import backends
from runner.device.placement import in_batches, leaves, map_tensors, move, num_rows, tensors
from runner.errors import Problem, RunnerError

log = logging.getLogger("runner")


def has_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


class OwnLoader(IterableDataset[Any]):
    """A loader, or an IterableDataset that the run makes batches of; its length is its number of rows.

    Without a length it has one batch until lasts() is called.
    """

    def __init__(self, loader: DataLoader[Any] | IterableDataset[Any], *, setting: str) -> None:
        """Raises: RunnerError for one without rows."""
        self._loader = loader if isinstance(loader, DataLoader) else None
        self.dataset: Any = loader if self._loader is None else self._loader.dataset
        self.is_loader = self._loader is not None
        self.batch_size = None if self._loader is None else self._loader.batch_size  # None: by a sampler, or by the run
        self.rows_a_batch = 1  # of the first batch, once it was read
        #: the user's generators and their first seeds: each epoch seeds them
        self._generators = [(each, each.initial_seed()) for each in self._parts_with("generator", torch.Generator)]
        self.has_length, self._length = True, 1
        try:
            self._length = len(loader)  # type: ignore[arg-type]  # batches of a loader, rows of a dataset
        except (TypeError, NotImplementedError):
            self.has_length = False
        if self._length < 1:
            raise RunnerError.of(setting, f"`{self.name}` has no rows", "return at least one row")

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    @property
    def fingerprint(self) -> str:
        return f"{type(self.dataset).__qualname__} {getattr(self.dataset, 'fingerprint', '')}"

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

    def no_length(self, setting: str, *, or_steps: bool) -> Problem:
        """Return the error of a missing length. or_steps: `train.num_steps` would be enough."""
        steps = "use `train.num_steps=1000`, which is then one epoch, or " if or_steps else ""
        problem = f"`{self.name}` has no length, and an epoch is as long as its data"
        return Problem(setting, problem, f"{steps}define `__len__` in `{self.name}`: the number of rows of an epoch")

    def __len__(self) -> int:
        """Return the rows of an epoch; of a batch sampler with its own sizes, those of its dataset."""
        loader = self._loader
        if loader is None:
            return self._length
        if loader.batch_sampler is None:  # its dataset gives batches
            return self._length * self.rows_a_batch
        for rows in (
            [loader.dataset] if self.batch_size is None else [loader.sampler, loader.dataset]
        ) * self.has_length:
            with suppress(TypeError, NotImplementedError):
                num = len(rows)  # type: ignore[arg-type]
                return min(num, self._length * (self.batch_size or num))  # drop_last leaves some out
        return self._length * (self.batch_size or self.rows_a_batch)

    @property
    def _num_readers(self) -> int:
        """The processes of a loader that each read an IterableDataset, and end with a smaller batch."""
        is_iterable = isinstance(self.dataset, IterableDataset)
        return self._loader.num_workers if self._loader is not None and is_iterable else 0

    @property
    def joined_size(self) -> int | None:
        """The size to which smaller batches of several readers are joined, so that the loader's length is right.

        None if that can't happen, or if only the user's collate_fn knows how rows become a batch.
        """
        loader = self._loader
        if self._num_readers < 2 or loader is None or loader.drop_last:
            return None
        return loader.batch_size if loader.collate_fn is default_collate else None

    def length_fix(self) -> str:
        """Return the help for a loader whose length is wrong."""
        if self._num_readers < 2:
            return "define `__len__`: the number of rows of an epoch"
        ends = "drops rows" if getattr(self._loader, "drop_last", False) else "may end with a smaller batch"
        fix = "use an `__iter__` that takes its part by `get_worker_info()`, or `num_workers=1`"
        return f"{fix}: each of the {self._num_readers} processes reads the whole dataset and {ends}"

    def num_batches(self, batch_size: int) -> int:
        return self._length if self.is_loader else -(-self._length // batch_size)

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """Return the user's loader; of a dataset, one with the run's batch size, which reads in this process."""
        if self._loader is not None:
            return self._loader
        own = getattr(self.dataset, "collate_fn", None)
        return DataLoader(self.dataset, batch_size=batch_size, collate_fn=own if callable(own) else collate)

    def begin(self, epoch: int) -> None:
        """Seed the user's generators, and call every `set_epoch`."""
        for each, first_seed in self._generators:
            each.manual_seed(mixed(first_seed, EPOCH, epoch))
        for set_epoch in self._parts_with("set_epoch", Callable):
            set_epoch(epoch)

    def _parts_with(self, name: str, kind: Any) -> list[Any]:
        loader = self._loader
        samplers = (None, None) if loader is None else (loader.sampler, loader.batch_sampler)
        parts = (loader, *samplers, getattr(samplers[1], "sampler", None), self.dataset)
        values = [getattr(part, name, None) for part in parts]
        return list({id(getattr(each, "__self__", each)): each for each in values if isinstance(each, kind)}.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset if self._loader is None else self._loader)


class Served(Batches):
    """The batches of an OwnLoader. It has its own generators, which seed and epoch set.

    So an epoch does not depend on the random numbers of the training, or on earlier epochs. A run that resumes in the middle
    of an epoch reads its first batches again, unless the loader has a state (`state_dict`, `load_state_dict`). A loader
    without a length is iterated as often as one epoch needs, each time as in a new epoch.
    """

    def __init__(
        self,
        rows: OwnLoader,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
        conversion: Callable[[Any], Any] = STANDARD,
    ) -> None:
        self._rows, self._device, self._seed, self._conversion = rows, device, seed, conversion
        self.is_loader = rows.is_loader  # its batches have their own size
        self.num_rows, self._num_batches = len(rows), rows.num_batches(batch_size)
        by_sampler = rows.is_loader and rows.batch_size is None
        self.batch_size = -(-self.num_rows // self._num_batches) if by_sampler else rows.batch_size or batch_size
        self._loader: DataLoader[Any] = rows.loader(batch_size)
        self._generators: Mapping[str, Any] = {}
        self._at = (0, 0)  # epoch, and the number of its batches so far
        self._turn = 0  # how often it was iterated
        self._loaded: dict[str, Any] | None = None  # the state of a checkpoint, until it is used
        self._is_checked = False  # whether batches follow after its length

    @property
    def num_batches(self) -> int:
        return self._num_batches

    def _read(self, number: int, first_batch: int, shard: Shard | None) -> Iterator[Any]:
        """Yield the epoch's batches. Each of several processes reads every batch, and takes its rows. Waits for the reading."""
        state, self._loaded = self._loaded, None
        if state is not None and (state["epoch"], state["batches"]) != (number, first_batch):
            state = None
        batches = self._start(state.get("turn", number) if state else number, state)
        for index in range(first_batch if state else 0, self.num_batches):
            batch = self._next(batches)
            if batch is None and not self._rows.has_length:
                batches = self._start(self._turn + 1)
                batch = self._next(batches)
                if batch is None:
                    raise RunnerError.of("data", f"`{self._rows.name}` gives no rows", "return at least one row")
            if batch is None:
                problem = f"epoch {number + 1} ended after batch {index:,}, and the length of the data is {self.num_batches:,} batches"
                raise RunnerError.of("data", problem, self._rows.length_fix())
            if index == self.num_batches - 1 and self._rows.has_length:
                self._check_end(batches, is_first=shard is None or shard.rank == 0)
            if index < first_batch:
                continue
            self._at = number, index + 1
            batch = self._conversion(batch)
            if shard is None:
                yield move(batch, self._device)
            else:
                own = shard.rows(num_rows(batch))
                mine = map_tensors(batch, operator.itemgetter(slice(own.start, own.stop)))
                yield Share(move(mine, self._device), own)

    @property
    def has_state(self) -> bool:
        """Return whether the loader has a state. One whose batches are held back has none that fits."""
        return self._rows.joined_size is None and has_state(self._loader)

    def state(self) -> dict[str, Any] | None:
        """Return the loader's state between two batches; None if it has none."""
        if not self.has_state:
            return None
        epoch, batches = self._at
        state = self._loader.state_dict()  # type: ignore[attr-defined]  # as torchdata's StatefulDataLoader
        at = {"epoch": epoch, "batches": batches, "turn": self._turn}
        return {**at, "loader": state, "generators": dict(self._generators)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def _start(self, turn: int, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        self._turn = turn
        with self._own_generators(turn):
            self._rows.begin(turn)
            if state is not None:
                self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
                self._generators = state["generators"]
                backends.set_generator_states(self._generators, CPU)
            batches, size = iter(self._loader), self._rows.joined_size
            return batches if size is None else _filled(batches, size)

    def _next(self, batches: Iterator[Any]) -> Any:
        with self._own_generators():
            return next(batches, None)

    def _check_end(self, batches: Iterator[Any], *, is_first: bool) -> None:
        """Warn after the first epoch if the loader has more batches."""
        if not self._is_checked and self._next(batches) is not None and is_first:
            log.warning(
                "%s has more than its length of %s batches: the others are left out of each epoch; %s",
                self._rows.name,
                f"{self.num_batches:,}",
                self._rows.length_fix(),
            )
        self._is_checked = True

    @contextmanager
    def _own_generators(self, epoch: int | None = None) -> Iterator[None]:
        before = backends.generator_states(CPU)
        if epoch is None:
            backends.set_generator_states(self._generators, CPU)
        else:
            seed_host(mixed(self._seed, EPOCH, epoch))
        try:
            yield
        finally:
            self._generators = backends.generator_states(CPU)
            backends.set_generator_states(before, CPU)


def _filled(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Join the smaller batches that several processes end with, at the end of the epoch."""
    held = []
    for batch in batches:
        if num_rows(batch) < size:
            held.append(batch)
        else:
            yield batch
    parts = [tensors(batch) for batch in held]
    are_tensors = all(len(own) == len(leaves(batch)) for own, batch in zip(parts, held, strict=True))
    if len(held) < 2 or not are_tensors or len({tuple(tensor.shape[1:] for tensor in own) for own in parts}) > 1:
        yield from held
        return
    joined = iter([torch.cat(same) for same in zip(*parts, strict=True)])
    yield from in_batches(map_tensors(held[0], lambda _: next(joined)), size)
