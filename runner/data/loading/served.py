"""Serves the batches of a user's DataLoader as it gives them, and can continue in the middle of an epoch."""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from runner.data.loading.batches import Batches, Shard, Share
from runner.data.loading.order import EPOCH, mixed
from runner.data.map_style import STANDARD
from runner.data.own_loader import OwnLoader, has_state
from runner.device import backends
from runner.device.placement import in_batches, leaves, map_tensors, move, num_rows, tensors
from runner.errors import RunnerError

CPU = torch.device("cpu")

log = logging.getLogger("runner")


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

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
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
                    raise RunnerError.of("data", f"`{self._name}` gives no rows", "return at least one row")
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
        return self._rows.filled_to is None and has_state(self._loader)

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

    @property
    def _name(self) -> str:
        return type(self._rows.dataset).__name__

    def _start(self, turn: int, state: Mapping[str, Any] | None = None) -> Iterator[Any]:
        self._turn = turn
        with self._own_generators(turn):
            self._rows.begin(turn)
            if state is not None:
                self._loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
                self._generators = state["generators"]
                backends.set_generator_states(self._generators, CPU)
            batches, size = iter(self._loader), self._rows.filled_to
            return batches if size is None else _filled(batches, size)

    def _next(self, batches: Iterator[Any]) -> Any:
        with self._own_generators():
            return next(batches, None)

    def _check_end(self, batches: Iterator[Any], *, is_first: bool) -> None:
        """Warn after the first epoch if the loader has more batches."""
        if not self._is_checked and self._next(batches) is not None and is_first:
            log.warning(
                "%s has more than its length of %s batches: the others are left out of each epoch; %s",
                self._name,
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
            seed = mixed(self._seed, EPOCH, epoch)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)  # torch.manual_seed() would seed devices, too
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
