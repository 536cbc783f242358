"""Sums, means, broadcasts and reductions over all processes of a run; Alone is the null object of a single process.

For the training, its checkpoints and evaluation (Ranks). One thread makes all calls, in the same order in each process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from runner.distributed import messages as told
from runner.distributed.environment import RankInfo, UnmetError
from runner.errors import Problem, first_line

T = TypeVar("T")
distributed: Any = torch.distributed  # its names are there, and not typed

#: an end of a process is seen at once, by its closed connection; what takes long (a set that is made ready) is waited for
PATIENCE = timedelta(days=2)
#: for all processes of srun to begin
MOST_APART = timedelta(minutes=10)


class Ranks(Protocol):
    """This process among those that train one model. Every call but `rank`, `num` and `is_first` is made by all of them."""

    rank: int
    num: int

    @property
    def is_first(self) -> bool:
        """Whether it is this one that writes, tracks and talks."""
        ...

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all, a new tensor on the same device."""
        ...

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all, a new tensor on the same device."""
        ...

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Gives the tensors the first one's values, in place."""
        ...

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """The highest of each number; between the hosts, without the devices."""
        ...

    def broadcast_object(self, thing: T) -> T:
        """What the first one has: small, plain objects. Waits for it."""
        ...

    def gather(self, thing: T) -> list[T]:
        """What each has, in order, where is_first; else nothing."""
        ...

    def leave(self) -> None:
        """The last call."""
        ...


class Alone:
    """The only one."""

    rank, num, is_first = 0, 1, True

    def total(self, tensor: Tensor) -> Tensor:
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def broadcast_object(self, thing: T) -> T:
        return thing

    def gather(self, thing: T) -> list[T]:
        return [thing]

    def leave(self) -> None:
        pass


class Group:
    """One of several, by torch.distributed's default group for tensors and one of the hosts for words.

    All calls are made by one thread, in the same order everywhere: that is what makes them meet.
    """

    def __init__(self, rank: int, num: int, hosts: Any) -> None:
        """Use join()."""
        self.rank, self.num, self._hosts = rank, num, hosts

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        torch.distributed.all_reduce(summed)
        return summed

    def mean(self, tensor: Tensor) -> Tensor:
        return self.total(tensor) / self.num

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        alike: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for some in alike.values():  # one message for each type: a single BatchNorm has three buffers
            whole = torch.cat([tensor.reshape(-1) for tensor in some])
            torch.distributed.broadcast(whole, 0)
            for tensor, part in zip(some, whole.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        told = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=self._hosts)
        found: list[float] = told.tolist()
        return found

    def broadcast_object(self, thing: T) -> T:
        things = [thing]
        torch.distributed.broadcast_object_list(things, 0, group=self._hosts, device=torch.device("cpu"))
        return things[0]

    def gather(self, thing: T) -> list[T]:
        found: list[Any] | None = [None] * self.num if self.is_first else None
        torch.distributed.gather_object(thing, found, 0, group=self._hosts)
        return found or []

    def leave(self) -> None:
        torch.distributed.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether it says no more than that another process is not there any more."""
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
        "connectFullMesh",
    )
    is_torchs = isinstance(error, RuntimeError | torch.distributed.DistError)
    return is_torchs and any(each in str(error) for each in words)


def join(place: RankInfo, *, backend: str, device: torch.device) -> Group:
    """Waits until all are there, and is one of them from then on. backend: torch's name for what joins their devices.

    Raises: UnmetError where srun has started them and some do not come; torchrun looks after its own.
    """
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    if place.by != "srun":
        return _joined(next(iter(distributed.rendezvous("env://")))[0], place, backend=backend, device=device)
    with _meeting(place):
        is_first = place.rank == 0
        store = distributed.TCPStore(place.address, place.port, place.num, is_first, timeout=MOST_APART)
        return _joined(store, place, backend=backend, device=device)


@contextmanager
def _meeting(place: RankInfo) -> Iterator[None]:
    """Raise an UnmetError instead of torch's error if processes do not join."""
    try:
        yield
    except (distributed.DistNetworkError, distributed.DistStoreError) as error:
        asked = f"srun with {place.num} processes, which meet at {place.address}:{place.port}"
        said = first_line(error)
        if "EADDRINUSE" in said:
            problem = f"something else listens there, perhaps another srun of this job ({said})"
            raise UnmetError(
                Problem(asked, problem, "run run one such srun at a time in a job, or each as its own job")
            ) from error
        problem = f"process {place.rank} lost the others before all were there"
        if "waiting for clients" in said:
            problem = f"not all of them were there after {MOST_APART}"
        elif "trying to connect" in said:
            problem = f"process {place.rank} did not reach the first one in {MOST_APART}"
        fix = (
            "the same line once each of them begins: its own output (srun --output=%t.log) says why one did not, or ended; "
            f"and the machines must reach each other: ping {place.address}, no firewall before port {place.port}"
        )
        raise UnmetError(Problem(asked, f"{problem} ({said})", fix)) from error


def _joined(store: Any, place: RankInfo, *, backend: str, device: torch.device) -> Group:
    # torch's launcher keeps one store for all attempts: what the processes before have left there is not for these
    store = distributed.PrefixStore(f"runner-{told.attempt()}", store)
    more: dict[str, Any] = {"store": store, "rank": place.rank, "world_size": place.num}
    more["timeout"] = PATIENCE  # NCCL's own 10 minutes would end a run whose first process waits for the others' data
    if backend == "gloo":
        distributed.init_process_group(backend, **more)
        return Group(place.rank, place.num, distributed.group.WORLD)
    distributed.init_process_group(backend, device_id=device if device.type == "cuda" else None, **more)
    return Group(place.rank, place.num, distributed.new_group(backend="gloo", timeout=PATIENCE))
