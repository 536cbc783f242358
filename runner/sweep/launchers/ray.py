"""The launcher for a Ray cluster (hydra/launcher=ray): request an actor from Ray for each job, and run the job in it.

This module runs in the sweep's process, and ray_worker.py in the actors. Each job keeps its actor until it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config.packages import not_installed
from runner.device import Hardware
from runner.errors import Problem, RunnerError
from runner.experiment.directory import CONSOLE
from runner.sweep.jobs.prepare import DevicesFor, PreparedJob
from runner.sweep.jobs.run_job import VARIABLE, Assignment
from runner.sweep.launchers.local import Capacity
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.ray_worker import Arrival, Home, Site, pack, unpack, variables_of
from runner.sweep.launchers.worker import Request
from runner.tracking import store_uri
from runner.version import PACKAGES, python_path

SECONDS_TO_ANSWER = 5.0
SECONDS_BETWEEN_NODES = 5.0  # minimum interval between two queries for the list of nodes


class Lost(Exception):
    """The result of a promise is lost: a worker or its machine failed. The message is one line with the reason."""


class Connection:
    """This process's connection to the cluster, as a Ray driver."""

    def __init__(self, ray: Any, address: str, *, is_ours: bool) -> None:
        """Use connect(). is_ours: Whether close() disconnects from the cluster, and stops it if it was started here."""
        self._ray, self._address, self._is_ours = ray, address, is_ours
        self._nodes: list[dict[str, Any]] = []
        self._looked_at = float("-inf")

    def __str__(self) -> str:
        nodes = [node for node in self.nodes() if node["Alive"]]
        counts = [f"{len(nodes)} node{'s' * (len(nodes) != 1)}"]
        counts += [f"{self.num(kind):g} {kind}{'s' * (self.num(kind) != 1)}" for kind in ("CPU", "GPU")]
        return f"Ray {self._address}: {', '.join(counts)}"

    def num(self, kind: str) -> float:
        """Return the amount of a resource in the cluster, busy or not."""
        return float(sum(node["Resources"].get(kind, 0) for node in self.nodes() if node["Alive"]))

    def nodes(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._looked_at > SECONDS_BETWEEN_NODES:
            self._nodes, self._looked_at = self._ray.nodes(), time.monotonic()
        return self._nodes

    def name_of(self, node_id: str) -> str:
        """Return the node's name if it has one, else its host name."""
        node = next((node for node in self.nodes() if node["NodeID"] == node_id), None)
        if node is None:
            return node_id[:8]
        named = node.get("NodeName") not in (None, "", node["NodeManagerAddress"])
        return str(node["NodeName"] if named else node["NodeManagerHostname"])

    def actor(self, kind: type, demand: Mapping[str, float], runtime_env: Any, *arguments: Any) -> Any:
        """Request an actor of this class on a node with the demanded resources; returns immediately."""
        own = {name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")}
        # no upload: the package and the user's modules are installed there, or are in a directory that the machines share
        variables = {"PYTHONPATH": python_path(own=True), **runtime_env.get("env_vars", {})}
        if sys.flags.safe_path:  # also for the processes that the actor starts
            variables["PYTHONSAFEPATH"] = "1"
        options = {
            "num_cpus": demand.get("CPU", 0),
            "num_gpus": demand.get("GPU", 0),
            "resources": own,
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {**runtime_env, "env_vars": variables},
        }
        return self._ray.remote(kind).options(**options).remote(*arguments)

    def wait(self, promises: Sequence[Any], seconds: float) -> set[Any]:
        """Return the promises that are fulfilled or failed; waits at most `seconds` for the first one."""
        if not promises:
            time.sleep(seconds)
            return set()
        first, _ = self._ray.wait(list(promises), num_returns=1, timeout=seconds)
        if not first:
            return set()
        ready, _ = self._ray.wait(list(promises), num_returns=len(promises), timeout=0)
        return set(ready)

    def get(self, promise: Any) -> Any:
        """Return the result of a promise. Raises: Lost."""
        try:
            return self._ray.get(promise)
        except self._ray.exceptions.RayError as error:
            raise Lost(_line_of(error)) from None

    def kill(self, actor: Any) -> None:
        """Kill the actor, or cancel it if it has not started."""
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        if self._is_ours:
            self._ray.shutdown()


def connect(address: str | None) -> Connection:
    """Connect to the cluster, or start one on this machine that close() stops. Takes 1 to 5 s.

    address: None means RAY_ADDRESS; if that is not set, start a cluster for this sweep.
    Raises: RunnerError if Ray is not installed or does not answer.
    """
    try:
        import ray
    except ImportError:
        raise not_installed("hydra/launcher=ray", "Ray is not installed", "ray") from None
    if ray.is_initialized():  # in a notebook
        return Connection(ray, "as it is connected here", is_ours=False)
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    if not _listens(where):  # Ray would retry for minutes
        raise RunnerError(_no_answer(where, ConnectionError("nothing listens there")))
    starts: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.chdir(PACKAGES):  # Ray's workers search the current directory for modules first
            ray.init(where, logging_level=logging.ERROR, log_to_driver=False, **starts)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RunnerError(_no_answer(where, error)) from None
    finally:
        signal.signal(
            signal.SIGTERM, handler
        )  # Ray's handler would end the process while the sweep still has jobs to stop
    return Connection(ray, "started here" if where == "local" else f"at {where}", is_ours=True)


def _listens(where: str) -> bool:
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return True  # auto, local
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_TO_ANSWER).close()
    except OSError:
        return False
    return True


def _no_answer(where: str, error: Exception) -> Problem:
    text = _line_of(error)
    source = f"hydra.launcher.address={where}"
    if "token" in str(error).lower():
        fix = "set `RAY_AUTH_MODE` and the cluster's token (docs.ray.io: token authentication)"
        return Problem(source, text, fix)
    fix = "use the `hydra.launcher.address=HOST:PORT` that `ray start --head` printed, or null to start a cluster here"
    return Problem(source, f"Ray doesn't answer at {where}: {text}", fix)


def _line_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    causes = ("The actor is dead", "The node", "Worker exit", "The actor died")
    known = [line for cause in causes for line in lines if line.startswith(cause)]
    text = (known or lines or [type(error).__name__])[0]
    return text.partition(" Some common causes")[0][:300]


def devices_in(policy: tuple[str, ...], hardware: Hardware, *, has_gpus: bool) -> tuple[str, ...]:
    """Return the first preference that the cluster has, "cuda" or "cpu". `auto` takes a GPU if the cluster has one.

    hardware: The sweep's machine; not used here.
    Raises: RunnerError if no preferred device is in the cluster, with the reasons.
    """
    problems = []
    for item in policy:
        if item in ("auto", "all"):
            return ("cuda",) if has_gpus else ("cpu",)
        if item == "cpu" or (item == "cuda" and has_gpus):
            return (item,)
        problems.append(_not_there(item, has_gpus=has_gpus))
    raise RunnerError(*problems)


def fits_nowhere(demand: Mapping[str, float], nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether no live node could run the job, even an idle one. nodes: The result of ray.nodes()."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return not any(all(node.get(name, 0) >= amount for name, amount in demand.items()) for node in alive)


def in_words(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:.2g} {name}" for name, amount in demand.items()) or "nothing"


def _not_there(item: str, *, has_gpus: bool) -> Problem:
    source = f"device={item} on Ray"
    if item.startswith("cuda:") and has_gpus:
        return Problem.suggest(source, "Ray chooses which GPU a job gets", ["device=cuda"])
    if item.startswith("cuda"):
        fix = "use `device=cpu`, or start a node with `ray start --num-gpus=N`"
        return Problem(source, "no node of the cluster has a GPU", fix)
    problem = "Ray supports only CPUs and NVIDIA GPUs"
    fix = f"use `device={'cuda' if has_gpus else 'cpu'}`, or `hydra/launcher=slots` on a machine with `{item}`"
    return Problem(source, problem, fix)


MARK = ".ray"  # in the sweep's directory while the sweep runs: a machine that can read it shares the user's files
MAX_REQUESTED = 64  # maximum number of actors requested in advance, for the CPU and for GPUs separately
BUSY_SECONDS = 30.0  # time without a running job or a new actor before a message is printed
SECONDS_BETWEEN_LOOKS = 0.2


@dataclasses.dataclass
class Stay:
    """A job and its actor, from the actor's request to the job's end."""

    job_name: str
    folder: Path
    device: str
    demand: dict[str, float]
    actor: Any
    promise: Any  # Ray's, of an Arrival; of a running job: of its exit code and directory
    requested_at: float
    arrival: Arrival | None = None  # None: it does not run yet
    problem: str | None = None  # why it did not start


class RayCluster:
    """Ray decides when and where a job runs, and which GPU it gets; `device=` decides which resources it requests."""

    is_here = False
    follows = False
    preload = ("torch",)
    environment: Mapping[str, str] = {}

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
        self._connection: Connection | None = None
        self._stays: dict[int, Stay] = {}
        self._ready: set[Any] = set()  # fulfilled promises of arrivals and ends
        self._looked_at = 0.0
        self._printed: set[str] = set()
        self._is_killing = False

    def setup(self, context: Any, config: DictConfig) -> None:
        self._context = context
        self._gpu_slots = int(config.sweep.slots.cuda)
        self._grace_seconds = float(config.sweep.grace_seconds)
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._home = Home(str(Path.cwd()), str(self._folder / MARK), uuid.uuid4().hex)

    @property
    def devices_for(self) -> DevicesFor:
        return functools.partial(devices_in, has_gpus=self._connected().num("GPU") > 0)

    def open(self, pool: ProcessPool, hardware: Hardware, devices: Collection[str]) -> Capacity:
        self._folder.mkdir(parents=True, exist_ok=True)
        Path(self._home.mark).write_text(self._home.secret)
        demands = [f"; a job on {name} takes {in_words(self.demand(name))}" for name in sorted(devices)]
        return Capacity(f"{self._connected()}{''.join(demands)}")

    def start(self, prepared: PreparedJob, assigned: Assignment) -> str | None:
        """Request an actor from Ray, and start the job in it once it runs."""
        stay = self._stays.get(prepared.job.number)
        if stay is None:
            device = prepared.devices[0]
            if sum(other.device == device and other.arrival is None for other in self._stays.values()) < MAX_REQUESTED:
                self._stays[prepared.job.number] = self._request_actor(prepared, device)
            return None
        self._look()
        if stay.promise not in self._ready:
            self._print_why_it_waits(stay)
            return None
        self._ready.remove(stay.promise)
        try:
            stay.arrival = self._connected().get(stay.promise)
        except Lost as lost:
            stay.problem = f"Ray gave it no place: {lost}"
            return stay.device
        job_files = pack(stay.folder) if stay.arrival.job_files is not None else b""
        stay.promise = stay.actor.run.remote(self._request(prepared, assigned, stay.arrival), job_files)
        return f"{stay.device} at {self._connected().name_of(stay.arrival.node_id)}"

    def ended(self, seconds: float) -> list[Ended]:
        self._look(seconds)
        return [self._end_of(number, stay) for number, stay in list(self._stays.items()) if self._is_over(stay)]

    def _is_over(self, stay: Stay) -> bool:
        return stay.problem is not None or (stay.arrival is not None and stay.promise in self._ready)

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        for stay in self._stays.values():
            if stay.arrival is not None:
                stay.actor.stop.remote(int(what))
                if self._is_killing:  # its machine no longer answers
                    self._connected().kill(stay.actor)
        self._is_killing = what == signal.SIGKILL

    def close(self) -> None:
        if self._connection is not None:
            for stay in self._stays.values():
                self._connection.kill(stay.actor)
            self._connection.close()
        Path(self._home.mark).unlink(missing_ok=True)
        self._stays.clear()
        self._connection = None

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self._address)
        return self._connection

    def demand(self, device: str) -> dict[str, float]:
        """Return the resources that one job requests, by Ray's names. A job on a GPU takes num_gpus, or its slot's share."""
        gpus = 0.0 if device == "cpu" else (1 / self._gpu_slots if self._num_gpus is None else self._num_gpus)
        amounts = {"CPU": self._num_cpus, "GPU": gpus, **self._resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def _request_actor(self, prepared: PreparedJob, device: str) -> Stay:
        demand = self.demand(device)
        # a query would create a context of about 400 MB on a GPU
        environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        actor = self._connected().actor(Site, demand, self._runtime_env, self._home, environment)
        folder = self._folder / prepared.job.folder_name
        return Stay(prepared.job.name, folder, device, demand, actor, actor.arrived.remote(), time.monotonic())

    def _request(self, prepared: PreparedJob, assigned: Assignment, arrival: Arrival) -> Request:
        folder, config = self._folder / prepared.job.folder_name, prepared.config
        if arrival.job_files is not None:
            folder, config = Path(arrival.job_files), config.copy()
            config.hydra.sweep.dir, config.hydra.sweep.subdir = arrival.job_files, "."
            # the study is in the user's files, which this machine does not share: no trial is pruned here
            # the sweep publishes to a file of the user, once the job's files are back
            is_file = config.tracking.enabled and store_uri.sqlite_path(str(config.tracking.uri))
            assigned = dataclasses.replace(assigned, study=None, publishes=assigned.publishes and not is_file)
        return Request(
            prepared.job.number,
            "runner.sweep.jobs.run_job:run_pickled",
            pickle.dumps((config, self._context)),
            str(folder / CONSOLE),
            variables_of(OmegaConf.to_yaml(config), os.environ) | {VARIABLE: assigned.as_text()},
            self._grace_seconds,
        )

    def _look(self, seconds: float = 0.0) -> None:
        if seconds == 0.0 and time.monotonic() - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        promises = [stay.promise for stay in self._stays.values() if stay.promise not in self._ready]
        self._ready |= self._connected().wait(promises, seconds)
        self._looked_at = time.monotonic()

    def _end_of(self, number: int, stay: Stay) -> Ended:
        del self._stays[number]
        self._ready.discard(stay.promise)
        cause, code = stay.problem, None
        if stay.problem is None:
            try:
                code, job_files = self._connected().get(stay.promise)
                if stay.arrival is not None and stay.arrival.job_files is not None:
                    unpack(job_files, stay.folder)
            except Lost as lost:
                where = self._connected().name_of(stay.arrival.node_id) if stay.arrival else "?"
                cause = f"its place on {where} was lost: {lost}"
        self._connected().kill(stay.actor)
        return Ended(number, code, cause)

    def _print_why_it_waits(self, stay: Stay) -> None:
        what = in_words(stay.demand)
        is_idle = all(other.arrival is None for other in self._stays.values())
        if fits_nowhere(stay.demand, self._connected().nodes()):
            self._print(f"waiting: no node of the cluster has {what}; it is needed for {stay.job_name}")
        elif is_idle and time.monotonic() - stay.requested_at > BUSY_SECONDS:
            self._print(f"waiting: others use the cluster; {what} is needed for {stay.job_name}")

    def _print(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            print(text, flush=True)
