"""Serves the batches of a person's own DataLoader as it gives them, and knows where it stands. Made by loaders.load()."""

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

from runner.data.loading.order import EPOCH, mixed
from runner.data.loading.shard import Shard, Share
from runner.data.map_style import STANDARD
from runner.data.own_loader import OwnLoader
from runner.device import backends
from runner.device.placement import in_batches, leaves, map_tensors, move, num_rows, tensors
from runner.errors import RunnerError

CPU = torch.device("cpu")

log = logging.getLogger("runner")


class Served:
    """See loaders.Batches. What it draws, it draws from generators of its own, which seed and epoch begin.

    So an epoch is the same whatever the training draws beside it, and whatever was read before. A training that goes on in
    the middle of one reads again what it has had, unless the loader tells its state (`state_dict`, `load_state_dict`).
    In one epoch a loader without a length is gone through as often as it takes; each time begins as an epoch does.
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
        self.is_loader = rows.is_loader  # whose batches have a size of their own
        self.num_rows, self.num_batches = len(rows), rows.num_batches(batch_size)
        by_sampler = rows.is_loader and rows.batch_size is None
        self.batch_size = -(-self.num_rows // self.num_batches) if by_sampler else rows.batch_size or batch_size
        self._loader: DataLoader[Any] = rows.loader(batch_size)
        self.device_bytes = 0
        self._generators: Mapping[str, Any] = {}
        self._at = (0, 0)  # epoch, batches given of it
        self._turn = 0  # how often it has begun: of one without a length more often than epochs
        self._known: dict[str, Any] | None = None  # from a checkpoint, until it is taken up
        self._has_looked = False  # whether more comes than its length says

    def epoch(self, number: int, *, first_batch: int = 0, shard: Shard | None = None) -> Iterator[Any]:
        """Waits for the host's reading. Raises: RunnerError for one that ends before its length says.

        Of several processes each reads every batch, as only the loader knows what is in it, and takes its rows.
        """
        known, self._known = self._known, None
        if known is not None and (known["epoch"], known["batches"]) != (number, first_batch):
            known = None
        begin = first_batch if known else 0
        batches = self._begun(known.get("turn", number) if known else number, known)
        for index in range(begin, self.num_batches):
            with self._drawing():
                batch = next(batches, None)
            if batch is None and not self._rows.has_length:
                batches = self._begun(self._turn + 1)
                with self._drawing():
                    batch = next(batches, None)
                if batch is None:
                    raise RunnerError.of("data", f"`{self._name}` gives no rows", "return at least one row")
            if batch is None:
                problem = f"epoch {number + 1} ended after batch {index:,}, and the length of the data is {self.num_batches:,} batches"
                raise RunnerError.of("data", problem, self._rows.of_another_length())
            if index == self.num_batches - 1 and self._rows.has_length:
                self._look_further(batches, is_first=shard is None or shard.rank == 0)
            if index >= first_batch:
                self._at = number, index + 1
                batch = self._conversion(batch)
                if shard is None:
                    yield move(batch, self._device)
                else:
                    own = shard.rows(num_rows(batch))
                    mine = map_tensors(batch, operator.itemgetter(slice(own.start, own.stop)))
                    yield Share(move(mine, self._device), own)

    @property
    def tells_state(self) -> bool:
        """Not where batches are held back, of which the loader knows nothing."""
        return self._rows.filled_to is None and all(
            callable(getattr(self._loader, name, None)) for name in ("state_dict", "load_state_dict")
        )

    def state(self) -> dict[str, Any] | None:
        """Where it stands, of a loader that tells that; asked between two batches. None: what it had is read again."""
        if not self.tells_state:
            return None
        epoch, batches = self._at
        told = self._loader.state_dict()  # type: ignore[attr-defined]  # torchdata's StatefulDataLoader, and the like
        at = {"epoch": epoch, "batches": batches, "turn": self._turn}
        return {**at, "loader": told, "generators": dict(self._generators)}

    def load_state(self, state: dict[str, Any]) -> None:
        self._known = state

    def indexed(self) -> None:
        """Its rows are not on the device."""

    def close(self) -> None:
        """It keeps nothing: a loader's processes end with its iterator, unless the person has them stay."""

    @property
    def _name(self) -> str:
        return type(self._rows.dataset).__name__

    def _begun(self, turn: int, known: Mapping[str, Any] | None = None) -> Iterator[Any]:
        self._turn = turn
        with self._drawing(turn):
            self._rows.begin(turn)
            if known is not None:
                self._loader.load_state_dict(known["loader"])  # type: ignore[attr-defined]
                self._generators = known["generators"]
                backends.set_generator_states(self._generators, CPU)
            return self._filled(iter(self._loader))

    def _filled(self, batches: Iterator[Any]) -> Iterator[Any]:
        size = self._rows.filled_to
        if size is None:
            return batches
        return _joined_at_the_end(batches, size)

    def _look_further(self, batches: Iterator[Any], *, is_first: bool) -> None:
        """At the end of the first epoch: says what would be left out of each."""
        if self._has_looked:
            return
        self._has_looked = True
        with self._drawing():
            more = next(batches, None)
        if more is not None and is_first:
            log.warning(
                "%s goes on beyond its length (%s batches): what comes then is left out of each epoch; %s",
                self._name,
                f"{self.num_batches:,}",
                self._rows.of_another_length(),
            )

    @contextmanager
    def _drawing(self, epoch: int | None = None) -> Iterator[None]:
        before = backends.generator_states(CPU)
        if epoch is None:
            backends.set_generator_states(self._generators, CPU)
        else:
            seed = mixed(self._seed, EPOCH, epoch)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)  # not torch.manual_seed(): the devices' stay as they are
        try:
            yield
        finally:
            self._generators = backends.generator_states(CPU)
            backends.set_generator_states(before, CPU)


def _joined_at_the_end(batches: Iterator[Any], size: int) -> Iterator[Any]:
    held = []
    for batch in batches:
        if num_rows(batch) < size:
            held.append(batch)
        else:
            yield batch
    yield from _joined(held, size)


def _joined(batches: list[Any], size: int) -> Iterator[Any]:
    parts = [tensors(batch) for batch in batches]
    if len(batches) < 2 or any(len(own) != len(leaves(batch)) for own, batch in zip(parts, batches, strict=True)):
        yield from batches
        return
    if len({tuple(tensor.shape[1:] for tensor in own) for own in parts}) > 1:
        yield from batches
        return
    joined = iter([torch.cat(same) for same in zip(*parts, strict=True)])
    yield from in_batches(map_tensors(batches[0], lambda _: next(joined)), size)
