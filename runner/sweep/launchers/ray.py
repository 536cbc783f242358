"""Hydra's launcher for a Ray cluster (hydra/launcher=ray): asks Ray for a place for each job, and runs it there.

In the sweep's process; what runs at the place is ray_worker.py. It keeps each job's place until it has ended.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.device import Hardware
from runner.experiment.claim import CONSOLE
from runner.sweep.jobs.prepare import Prepared
from runner.sweep.jobs.run_job import VARIABLE, Assignment
from runner.sweep.jobs.slots import DevicesFor
from runner.sweep.launchers import ray_connection
from runner.sweep.launchers.job_files import pack, unpack, variables_of
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.ray_devices import demand_of, devices_in, fits_nowhere, in_words
from runner.sweep.launchers.ray_worker import Arrival, Home, Site
from runner.sweep.launchers.worker import Request
from runner.tracking import store_uri

MARK = ".ray"  # in the sweep's folder, while it runs: a machine that sees it shares the person's files
MOST_ASKED = 64  # places that Ray is asked for ahead, on the CPU and on GPUs each
BUSY_SECONDS = 30.0  # nothing of ours runs and Ray gives no place: after so long it is said
SECONDS_BETWEEN_LOOKS = 0.2


@dataclasses.dataclass
class Stay:
    """A job and its place, from asking for one to the job's end."""

    job_name: str
    folder: Path
    device: str
    demand: dict[str, float]
    actor: Any
    arrived: Any  # Ray's promise of an Arrival
    asked_at: float
    arrival: Arrival | None = None
    ended: Any = None  # Ray's promise of the exit code and the folder
    problem: str | None = None  # why it never ran


class RayCluster(Launcher):
    """Ray decides when and where a job runs, and which GPU it gets; what it may take follows from `device=`."""

    is_here = False
    follows = False

    def __init__(
        self,
        address: str | None = None,
        num_cpus: float = 1,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        self._address, self._num_cpus, self._num_gpus = address, num_cpus, num_gpus
        self._resources = dict(resources or {})
        self._runtime_env = OmegaConf.to_container(OmegaConf.create(dict(runtime_env or {})), resolve=True)
        self._connection: ray_connection.Connection | None = None
        self._process_pool: ProcessPool | None = None
        self._stays: dict[int, Stay] = {}
        self._ready: set[Any] = set()  # arrivals and ends that are there
        self._looked_at = 0.0
        self._said: set[str] = set()
        self._is_killing = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._gpu_slots = int(config.sweep.slots.cuda)
        self._grace_seconds = float(config.sweep.grace_seconds)
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._home = Home(str(Path.cwd()), str(self._folder / MARK), uuid.uuid4().hex)

    @property
    def devices_for(self) -> DevicesFor:
        return functools.partial(devices_in, has_gpus=self._connected().num("GPU") > 0)

    def process_pool(self) -> ProcessPool:
        if self._process_pool is None:
            self._process_pool = ProcessPool({}, preload=("torch",))
        return self._process_pool

    def open(self, hardware: Hardware, devices: set[str]) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        Path(self._home.mark).write_text(self._home.word)
        asked = [f"; a job on {name} takes {in_words(self._demand(name))}" for name in sorted(devices)]
        return f"{self._connected()}{''.join(asked)}"

    def start(self, prepared: Prepared, assigned: Assignment) -> str | None:
        """Asks Ray for a place, and starts the job in it once it is given."""
        stay = self._stays.get(prepared.job.number)
        if stay is None:
            device = prepared.devices[0]
            if sum(other.device == device and other.arrival is None for other in self._stays.values()) < MOST_ASKED:
                self._stays[prepared.job.number] = self._ask(prepared, device)
            return None
        self._look()
        if stay.arrived not in self._ready:
            self._say_why_it_waits(stay)
            return None
        try:
            stay.arrival = self._connected().get(stay.arrived)
        except ray_connection.Lost as lost:
            stay.problem = f"Ray gave it no place: {lost}"
            return stay.device
        stay.ended = stay.actor.run.remote(self._request(prepared, assigned, stay.arrival), self._job_files(stay))
        return f"{stay.device} at {self._connected().name_of(stay.arrival.node_id)}"

    def ended(self, seconds: float) -> list[Ended]:
        self._look(seconds)
        return [
            self._farewell(number, stay)
            for number, stay in list(self._stays.items())
            if stay.problem is not None or stay.ended in self._ready
        ]

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        for stay in self._stays.values():
            if stay.ended is not None:
                stay.actor.stop.remote(int(what))
                if self._is_killing:  # its machine does not listen any more
                    self._connected().kill(stay.actor)
        self._is_killing = what == signal.SIGKILL

    def close(self) -> None:
        if self._connection is not None:
            for stay in self._stays.values():
                self._connection.kill(stay.actor)
            self._connection.close()
        Path(self._home.mark).unlink(missing_ok=True)
        if self._process_pool is not None:
            self._process_pool.close()
        self._stays.clear()
        self._connection = self._process_pool = None

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        raise NotImplementedError  # Hydra's interface, for sweepers of others: hydra_plugins.part_faults() refuses them

    def _connected(self) -> ray_connection.Connection:
        if self._connection is None:
            self._connection = ray_connection.connect(self._address)
        return self._connection

    def _demand(self, device: str) -> dict[str, float]:
        return demand_of(
            device,
            num_cpus=self._num_cpus,
            num_gpus=self._num_gpus,
            gpu_slots=self._gpu_slots,
            resources=self._resources,
        )

    def _ask(self, prepared: Prepared, device: str) -> Stay:
        demand = self._demand(device)
        # a look at a GPU would make a context of some 400 MB on it
        environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        actor = self._connected().actor(Site, demand, self._runtime_env, self._home, environment)
        folder = self._folder / prepared.job.folder_name
        return Stay(prepared.job.name, folder, device, demand, actor, actor.arrived.remote(), time.monotonic())

    def _request(self, prepared: Prepared, assigned: Assignment, arrival: Arrival) -> Request:
        folder, config = self._folder / prepared.job.folder_name, prepared.config
        if arrival.job_files is not None:
            folder, config = Path(arrival.job_files), config.copy()
            config.hydra.sweep.dir, config.hydra.sweep.subdir = arrival.job_files, "."
            # it lies in the person's files: nobody is given up here
            assigned = dataclasses.replace(assigned, study=None)
            if config.tracking.enabled and store_uri.sqlite_path(str(config.tracking.uri)):
                assigned = dataclasses.replace(assigned, publishes=False)  # the sweep does, when it is home
        return Request(
            prepared.job.number,
            "runner.sweep.jobs.run_job:run_pickled",
            pickle.dumps((config, self._context)),
            str(folder / CONSOLE),
            variables_of(OmegaConf.to_yaml(config), os.environ) | {VARIABLE: assigned.as_text()},
            self._grace_seconds,
        )

    def _job_files(self, stay: Stay) -> bytes:
        is_away = stay.arrival is not None and stay.arrival.job_files is not None
        return pack(stay.folder) if is_away else b""

    def _look(self, seconds: float = 0.0) -> None:
        if seconds == 0.0 and time.monotonic() - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        open_ = [stay.arrived if stay.arrival is None else stay.ended for stay in self._stays.values()]
        self._ready |= self._connected().wait([promise for promise in open_ if promise not in self._ready], seconds)
        self._looked_at = time.monotonic()

    def _farewell(self, number: int, stay: Stay) -> Ended:
        del self._stays[number]
        self._ready -= {stay.arrived, stay.ended}
        cause, code = stay.problem, None
        if stay.problem is None:
            try:
                code, job_files = self._connected().get(stay.ended)
                if stay.arrival is not None and stay.arrival.job_files is not None:
                    unpack(job_files, stay.folder)
            except ray_connection.Lost as lost:
                where = self._connected().name_of(stay.arrival.node_id) if stay.arrival else "?"
                cause = f"its place on {where} was lost: {lost}"
        self._connected().kill(stay.actor)
        return Ended(number, code, cause)

    def _say_why_it_waits(self, stay: Stay) -> None:
        what = in_words(stay.demand)
        is_idle = all(other.ended is None for other in self._stays.values())
        if fits_nowhere(stay.demand, self._connected().nodes()):
            self._say(f"waiting: no node of the cluster has {what}; it is needed for {stay.job_name}")
        elif is_idle and time.monotonic() - stay.asked_at > BUSY_SECONDS:
            self._say(f"waiting: others use the cluster; {what} is needed for {stay.job_name}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            print(text, flush=True)
