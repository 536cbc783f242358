"""Hydra's launcher for this machine (hydra/launcher=slots): start each job in a process, in a free slot."""

from __future__ import annotations

import os
import pickle
import select
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from runner.device import Hardware
from runner.device.hardware import num_usable_cpus
from runner.device.host_memory import memory_left
from runner.experiment.claim import CONSOLE
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.jobs.run_job import VARIABLE, Assignment
from runner.sweep.jobs.slots import (
    DevicesFor,
    Slot,
    choice_at,
    devices_for,
    environment_of,
    groups_of,
    num_groups,
    pick,
    places,
    taking_turns,
    threads_of,
)
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.worker import Request

PRELOAD = ("runner.sweep.launchers.preload",)


class Slots(Launcher):
    """Runs one job per slot. A job in a GPU slot sees one GPU, set in CUDA_VISIBLE_DEVICES before torch is imported."""

    is_here = True
    follows = True

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self.preload = tuple(preload)
        self._free: list[Slot] = []
        self._busy: dict[int, Slot] = {}  # by the number of the job, or a group's first job
        self._alone: set[int] = set()  # numbers of single jobs
        self._process_pools: dict[str, ProcessPool] = {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        settings = config.sweep
        self._slots = {kind: int(settings.slots[kind]) for kind in ("cpu", "cuda", "mps", "xpu")}
        self._grace_seconds = float(settings.grace_seconds)
        self._threads = threads_of(self._slots, num_cpus=num_usable_cpus())
        self._cpu_threads = config.backends.cpu.num_threads
        self._folder = Path(config.hydra.sweep.dir).absolute()

    @property
    def devices_for(self) -> DevicesFor:
        return devices_for

    def process_pool(self, place: Slot | None = None) -> ProcessPool:
        """Return the pool for a slot; without one, the pool that sees the whole machine."""
        key = place.device if place is not None and place.kind == "cuda" else ""
        if key not in self._process_pools:
            environment = environment_of(place, visible=_visible()) if key and place is not None else {}
            if self._threads is not None and "OMP_NUM_THREADS" not in os.environ:
                environment["OMP_NUM_THREADS"] = str(self._threads)
            self._process_pools[key] = ProcessPool(environment, preload=self.preload)
        return self._process_pools[key]

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        """Open the slots of the devices that the jobs may use, and return their description."""
        self._groups = groups_of(
            hardware,
            self._slots,
            num_cpus=num_usable_cpus(),
            num_threads=self._cpu_threads,
            free_bytes=memory_left()[0],
        )
        all_places = places(hardware, self._slots, groups=self._groups)
        self._order = [place for place in all_places if place.device in devices]
        self._free = list(self._order)
        for place in self._free:
            self.process_pool(place)
        pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))  # the default of MPS
        words = ", ".join(str(place) for place in self._free if not place.for_groups)
        return (words or "none") + taking_turns(self._free, pipes=pipes)

    @property
    def num_slots(self) -> int:
        """The number of jobs at a time; call open() first."""
        return sum(not place.for_groups for place in self._order)

    def num_groups(self, devices: Sequence[str], num_jobs: int) -> int:
        """Return the number of groups of `num_jobs` jobs at a time on these devices."""
        return num_groups(self._order, devices, num_jobs)

    def start(self, prepared: PreparedJob, assigned: Assignment) -> str | None:
        """Start the job and return its device, or None without a free slot."""
        is_group, alone = bool(prepared.others), {self._busy[number].device for number in self._alone}
        place = pick(prepared.devices, self._free, self._busy.values(), is_group=is_group, alone=alone)
        if place is None:
            return None
        self._free.remove(place)
        number, folder = prepared.job.number, self._folder / prepared.job.folder_name
        self._busy[number] = place
        if not is_group:
            self._alone.add(number)
        choice = choice_at(place, prepared.policy)
        placed = replace(assigned, device=choice.device, device_reason=choice.reason, device_here=choice.local)
        each = (prepared, *prepared.others)
        for member in each:
            self._share_memory(member.config, place)
        function, payload = "run_pickled", pickle.dumps((prepared.config, self._context))
        if prepared.others:
            told = [(member.config, replace(placed, name=member.job.name).as_text()) for member in each]
            at_a_time = min(self._groups.get(place.device, 1), prepared.num_groups)
            shares = (at_a_time, max(1, num_usable_cpus() // at_a_time))
            function, payload = "run_pickled_together", pickle.dumps((told, self._context, shares))
        self.process_pool(place).start(
            Request(
                number,
                f"runner.sweep.jobs.run_job:{function}",
                payload,
                str(folder / CONSOLE),
                {VARIABLE: placed.as_text(), **environment_of(place, visible=_visible())},
                self._grace_seconds,
            )
        )
        return choice.device

    def _share_memory(self, config: DictConfig, place: Slot) -> None:
        if place.kind == "cuda" and self._slots["cuda"] > 1 and config.backends.cuda.memory_fraction is None:
            config.backends.cuda.memory_fraction = 1 / self._slots["cuda"]

    def ended(self, seconds: float) -> list[Ended]:
        """Return the ended jobs; wait up to `seconds` for the first one."""
        process_pools = list(self._process_pools.values())
        select.select(process_pools, [], [], seconds)
        found = [ended for process_pool in process_pools for ended in process_pool.ended()]
        for ended in found:
            place = self._busy.pop(ended.number)
            self._alone.discard(ended.number)
            self._free = sorted([*self._free, place], key=self._order.index)
        return found

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        """Signal every job to save its state and end; SIGKILL also ends its child processes."""
        for process_pool in self._process_pools.values():
            for number in process_pool.running:
                process_pool.signal(number, what, whole_group=what == signal.SIGKILL)

    def close(self) -> None:
        for process_pool in self._process_pools.values():
            process_pool.close()
        self._process_pools.clear()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise NotImplementedError  # for other sweepers, which hydra_plugins.part_problems() refuses


def _visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")
