"""Sums, means, broadcasts and reductions over all processes of a run; `Alone` is the null object of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from runner.distributed import messages
from runner.distributed.environment import RankInfo, UnmetError
from runner.errors import Problem, first_line

T = TypeVar("T")
distributed: Any = torch.distributed  # its names are there, and not typed

#: timeout of an exchange: preparing a data set may take long, and a lost process is noticed by its closed connection
PATIENCE = timedelta(days=2)
#: timeout between the starts of srun's first and last process
JOIN_TIMEOUT = timedelta(minutes=10)


class Alone:
    """A single process. Has the methods of Group."""

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
    """This process among those that train one model: a group of devices for tensors, and one of hosts for objects.

    One thread makes all calls, in the same order in every process. Use join() to make one.
    """

    def __init__(self, rank: int, num: int, hosts: Any) -> None:
        self.rank, self.num, self._hosts = rank, num, hosts

    @property
    def is_first(self) -> bool:
        """Whether this process writes files, tracks and prints."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over all, a new tensor on the same device."""
        summed = tensor.clone()
        torch.distributed.all_reduce(summed)
        return summed

    def mean(self, tensor: Tensor) -> Tensor:
        return self.total(tensor) / self.num

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        """Set the tensors to the first process's values, in place."""
        alike: dict[Any, list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for some in alike.values():  # one message for each type: a single BatchNorm has three buffers
            whole = torch.cat([tensor.reshape(-1) for tensor in some])
            torch.distributed.broadcast(whole, 0)
            for tensor, part in zip(some, whole.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Return the maximum of each number; between the hosts, without the devices."""
        highest = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return [float(number) for number in highest]

    def broadcast_object(self, thing: T) -> T:
        """Return the first process's small, plain object."""
        things = [thing]
        torch.distributed.broadcast_object_list(things, 0, group=self._hosts, device=torch.device("cpu"))
        return things[0]

    def gather(self, thing: T) -> list[T]:
        """Return each process's object, in order, in the first process; elsewhere nothing."""
        gathered: list[Any] | None = [None] * self.num if self.is_first else None
        torch.distributed.gather_object(thing, gathered, 0, group=self._hosts)
        return gathered or []

    def leave(self) -> None:
        torch.distributed.destroy_process_group()


Ranks = Alone | Group


def is_lost(error: BaseException) -> bool:
    """Return whether an error only says that another process is gone."""
    texts = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "remote process exited",
        "connectFullMesh",
    )
    is_torchs = isinstance(error, RuntimeError | torch.distributed.DistError)
    return is_torchs and any(text in str(error) for text in texts)


def join(info: RankInfo, *, backend: str, device: torch.device) -> Group:
    """Wait until all processes have joined.

    Args:
        backend: torch.distributed's backend for their devices.

    Raises:
        UnmetError: Some of srun's processes did not join. torchrun watches its processes.
    """
    if device.type != "cpu":
        getattr(torch, device.type).set_device(device)
    if info.by != "srun":
        return _join(next(iter(distributed.rendezvous("env://")))[0], info, backend=backend, device=device)
    try:
        store = distributed.TCPStore(info.address, info.port, info.num, info.rank == 0, timeout=JOIN_TIMEOUT)
        return _join(store, info, backend=backend, device=device)
    except (distributed.DistNetworkError, distributed.DistStoreError) as error:
        source = f"srun with {info.num} processes, which meet at {info.address}:{info.port}"
        problem = f"process {info.rank} did not meet the others within {JOIN_TIMEOUT} ({first_line(error)})"
        fix = (
            "read why one did not start, or ended, in its own output (`srun --output=%t.log`); the machines must reach "
            f"each other: `ping {info.address}`, no firewall before port {info.port}, one such srun at a time in a job"
        )
        raise UnmetError(Problem(source, problem, fix)) from error


def _join(store: Any, info: RankInfo, *, backend: str, device: torch.device) -> Group:
    # torch's launcher keeps one store for all attempts, with keys of the earlier ones
    store = distributed.PrefixStore(f"runner-{messages.attempt()}", store)
    settings: dict[str, Any] = {"store": store, "rank": info.rank, "world_size": info.num, "timeout": PATIENCE}
    if device.type == "cuda":
        settings["device_id"] = device
    distributed.init_process_group(backend, **settings)
    is_gloo = backend == "gloo"
    hosts = distributed.group.WORLD if is_gloo else distributed.new_group(backend="gloo", timeout=PATIENCE)
    return Group(info.rank, info.num, hosts)
