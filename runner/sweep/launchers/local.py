"""The launcher for this machine (hydra/launcher=slots): start each job in a process, in a free slot (sweep.slots).

Which slots there are, which of them a job may use, and the environment of a job in a slot.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.device import Choice, Hardware, resolve
from runner.device.choose import explained
from runner.device.hardware import num_usable_cpus
from runner.device.host_memory import memory_left
from runner.device.unavailable import why_not
from runner.experiment.context import RunContext
from runner.experiment.directory import CONSOLE
from runner.sweep.jobs.prepare import PreparedJob, in_name_of
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.worker import Request

PRELOAD = ("runner.sweep.launchers.preload",)
#: free memory for each process that trains a group of jobs on the CPU
GROUP_BYTES = 2**30


@dataclass(frozen=True)
class Slot:
    """A slot of a device; one job at a time runs in it."""

    device: str  # cpu, cuda:1, mps, xpu:0
    number: int = 0  # among the slots of its device
    for_groups: bool = False  # whether jobs that are trained together may take it, and no others

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    def __str__(self) -> str:
        return self.device if self.number == 0 else f"{self.device} ({self.number + 1})"


@dataclass(frozen=True)
class Capacity:
    """How many jobs a launcher runs at a time."""

    words: str
    num_slots: int | None = None  # None: it takes all jobs at once
    #: from devices to how many groups of jobs compute on them at a time; None: it does not train jobs together
    num_groups: Callable[[Collection[str]], int] | None = None


def slots_of(hardware: Hardware, slots: Mapping[str, int], *, groups: int = 0) -> list[Slot]:
    """Return the slots of the machine: devices with the most free memory first, the CPU last; then slots only for groups.

    groups: How many groups of jobs may compute on the CPU at a time, see cpu_groups().
    """
    usable = [name for name in hardware.devices() if name == "cpu" or why_not(name, hardware) is None]
    devices = hardware.devices()
    usable.sort(key=lambda name: (name == "cpu", -(devices[name].free_bytes or 0)))
    most = max((slots.get(_kind(name), 1) for name in usable), default=0)
    # first slots first: jobs spread over the devices before two share one
    of_jobs = [Slot(name, number) for number in range(most) for name in usable if number < slots.get(_kind(name), 1)]
    return of_jobs + [Slot("cpu", number, for_groups=True) for number in range(slots.get("cpu", 1), groups)]


def devices_for(policy: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """Return the devices that a job with this policy may use.

    Raises:
        RunnerError: If no such device is available, with the reason.
    """
    hardware = explained(policy, hardware)
    first = resolve(policy, hardware).device  # the first available device of a preference list decides the kind
    item = next(item for item in policy if item in ("auto", "all") or _kind(item) == _kind(first))
    if ":" in item or item in ("cpu", "mps"):
        return (first,)
    return tuple(name for name in hardware.devices() if _kind(name) == _kind(first) and why_not(name, hardware) is None)


def anywhere(policy: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """Return the devices on another machine: the job reports a missing one."""
    return ()


def pick(
    devices: Iterable[str], free: Iterable[Slot], busy: Collection[Slot], *, is_group: bool = False
) -> Slot | None:
    """Return the free slot for a job or a group: on the device with the fewest jobs, and of those the one with the most memory."""
    jobs, wanted = Counter(slot.device for slot in busy), set(devices)
    fitting = [slot for slot in free if slot.device in wanted and (is_group or not slot.for_groups)]
    return min(fitting, key=lambda slot: jobs[slot.device], default=None)  # min keeps the order of `free`


def choice_at(slot: Slot, policy: tuple[str, ...]) -> Choice:
    """Return the device of a job in a slot. A process that sees one GPU calls it cuda:0."""
    automatic = f"{policy[0]}: the sweep's free slot with the fewest jobs and the most free memory"
    reason = "as asked" if slot.device in policy else automatic
    return Choice(slot.device, reason, "cuda:0" if slot.kind == "cuda" else slot.device)


def environment_of(slot: Slot, *, visible: str | None) -> dict[str, str]:
    """Return the environment of a job in a slot. visible: CUDA_VISIBLE_DEVICES of the sweep."""
    if slot.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # a query would create a context of about 400 MB on a GPU
    if slot.kind != "cuda":
        return {}
    index = int(slot.device.partition(":")[2])
    seen = [word.strip() for word in visible.split(",")] if visible else []
    return {"CUDA_VISIBLE_DEVICES": seen[index] if seen else str(index)}


def threads_of(slots: Mapping[str, int], *, num_cpus: int) -> int | None:
    """Return the CPU threads of each job, so that slots don't compete; None for a single slot."""
    return max(1, num_cpus // slots["cpu"]) if slots["cpu"] > 1 else None


def cpu_groups(slots: Mapping[str, int], *, num_cpus: int, num_threads: int | None, free_bytes: int) -> int:
    """Return how many groups of jobs compute on the CPU at a time: one per core, since a group rarely uses two; or as set.

    Args:
        num_threads: CPU threads of each group, if set.
        free_bytes: Free host memory.
    """
    return slots["cpu"] if slots["cpu"] > 1 else max(1, min(num_cpus // (num_threads or 1), free_bytes // GROUP_BYTES))


def _kind(device: str) -> str:
    return device.partition(":")[0]


class Slots:
    """Runs one job per slot. A job in a GPU slot sees one GPU: its CUDA_VISIBLE_DEVICES is set before its first CUDA call."""

    is_here = True
    devices_for = staticmethod(devices_for)

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self.preload = tuple(preload)
        self._busy: dict[int, Slot] = {}  # by the number of the job, or a group's first job

    def setup(self, context: Any, config: DictConfig) -> None:
        self._hydra_context, self._folder = context, Path(config.hydra.sweep.dir).absolute()
        self._slots = {kind: int(config.sweep.slots[kind]) for kind in ("cpu", "cuda", "mps", "xpu")}
        self._grace_seconds = float(config.sweep.grace_seconds)
        self._cpu_threads = config.backends.cpu.num_threads
        threads = threads_of(self._slots, num_cpus=num_usable_cpus())
        is_set = threads is None or "OMP_NUM_THREADS" in os.environ
        self.environment = {} if is_set else {"OMP_NUM_THREADS": str(threads)}

    def open(self, pool: ProcessPool, hardware: Hardware, devices: Collection[str]) -> Capacity:
        """Open the slots of the devices that the jobs may use."""
        self._pool = pool
        threads, free = self._cpu_threads, memory_left()[0]
        self._groups = cpu_groups(self._slots, num_cpus=num_usable_cpus(), num_threads=threads, free_bytes=free)
        every = slots_of(hardware, self._slots, groups=self._groups)
        self._order = [slot for slot in every if slot.device in devices]
        of_jobs = [str(slot) for slot in self._order if not slot.for_groups]
        return Capacity(", ".join(of_jobs) or "none", len(of_jobs), self._num_groups)

    def _num_groups(self, devices: Collection[str]) -> int:
        return sum(slot.device in devices for slot in self._order)

    def start(self, prepared: PreparedJob, context: RunContext) -> str | None:
        """Start the job and return its device, or None without a free slot."""
        busy = self._busy.values()
        free = [slot for slot in self._order if slot not in busy]
        slot = pick(prepared.devices, free, busy, is_group=bool(prepared.others))
        if slot is None:
            return None
        number, folder = prepared.job.number, self._folder / prepared.job.folder_name
        self._busy[number] = slot
        choice = choice_at(slot, prepared.policy)
        context = replace(context, device=choice)
        members = (prepared, *prepared.others)
        for member in members:
            self._share_memory(member.config, slot)
        if prepared.others:
            each = [(member.config, in_name_of(context, member.job)) for member in members]
            most = self._groups if slot.kind == "cpu" else self._slots[slot.kind]
            at_a_time = min(most, prepared.num_groups)
            shares = (at_a_time, max(1, num_usable_cpus() // at_a_time))
            function, payload = "run_pickled_together", pickle.dumps((each, self._hydra_context, shares))
        else:
            function, payload = "run_pickled", pickle.dumps((prepared.config, self._hydra_context, context))
        self._pool.start(
            Request(
                number,
                f"runner.sweep.jobs.run_job:{function}",
                payload,
                str(folder / CONSOLE),
                environment_of(slot, visible=os.environ.get("CUDA_VISIBLE_DEVICES")),
                self._grace_seconds,
            )
        )
        return choice.device

    def _share_memory(self, config: DictConfig, slot: Slot) -> None:
        if slot.kind == "cuda" and self._slots["cuda"] > 1 and config.backends.cuda.memory_fraction is None:
            config.backends.cuda.memory_fraction = 1 / self._slots["cuda"]

    def ended(self, seconds: float) -> list[Ended]:
        """Return the ended jobs; wait up to `seconds` for the first one."""
        select.select([self._pool], [], [], seconds)
        jobs = self._pool.ended()
        for ended in jobs:
            del self._busy[ended.number]
        return jobs

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Signal every job to save its state and end; SIGKILL also ends its child processes."""
        for number in self._pool.running:
            self._pool.signal(number, what, whole_group=what == signal.SIGKILL)

    def close(self) -> None:
        """Do nothing: the sweep closes the processes of the jobs."""
