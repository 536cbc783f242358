"""The launcher for a Ray cluster (hydra/launcher=ray): request an actor from Ray for each job, and run the job in it.

RayCluster is in the sweep's process, and Site in the actors. Each job keeps its actor until it ends. The machines share the
directory of the sweep.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config.packages import not_installed
from runner.device import Hardware
from runner.errors import Problem, RunnerError
from runner.experiment.context import RunContext
from runner.experiment.directory import CONSOLE
from runner.sweep.jobs.prepare import DevicesFor, PreparedJob
from runner.sweep.launchers.local import Capacity
from runner.sweep.launchers.process_pool import Ended, ProcessPool
from runner.sweep.launchers.worker import Request
from runner.version import PACKAGES, python_path

MARK = (
    ".ray"  # in the sweep's directory while the sweep runs: a machine that reads the secret in it shares the directory
)
MAX_REQUESTED = 64  # maximum number of actors requested in advance, for the CPU and for GPUs separately
SECONDS_TO_ANSWER = 5.0
LOOK_SECONDS = 0.1


class Site:
    """The Ray actor of one job: a separate process that holds the job's share of the machine's resources.

    The job is a child process, so that it can receive a signal to save its state, and so that a crash has an exit code. When
    the actor ends, for any reason, its job gets a SIGTERM and its grace period (runner.sweep.launchers.worker). All methods run
    in one thread.
    """

    def __init__(self, folder: str, environment: dict[str, str]) -> None:
        """folder: The user's current directory. environment: Variables added to the environment that Ray sets."""
        if Path(folder).is_dir():
            os.chdir(folder)  # relative paths in the configuration are relative to the user's directory
        self._process_pool = ProcessPool(environment)

    async def arrived(self, mark: str, secret: str) -> tuple[str, bool]:
        """Return the id of the node, and whether it shares the sweep's directory, in which `mark` is."""
        import ray

        is_shared = False
        with contextlib.suppress(OSError):  # a missing or unreadable file: another directory
            is_shared = Path(mark).read_text() == secret
        return ray.get_runtime_context().get_node_id(), is_shared

    async def run(self, request: Request) -> int | None:
        """Return the exit code, or minus the signal."""
        self._number = request.number
        self._process_pool.start(request)
        try:
            while not (ended := self._process_pool.ended()):
                await asyncio.sleep(LOOK_SECONDS)
            return ended[0].code
        finally:
            self._process_pool.close()

    async def stop(self, what: int) -> None:
        self._process_pool.signal(self._number, signal.Signals(what), whole_group=what == signal.SIGKILL)


@dataclass
class Stay:
    """A job and its actor, from the actor's request to the job's end."""

    device: str
    actor: Any
    promise: Any  # Ray's, of the node; of a running job: of its exit code
    node: str | None = None  # its id; None: Ray has not placed the actor yet
    problem: str | None = None  # why it did not start


class RayCluster:
    """Ray decides when and where a job runs, and which GPU it gets; `device=` decides which resources it requests."""

    is_here = False
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
        self._runtime_env: Any = OmegaConf.to_container(OmegaConf.create(dict(runtime_env or {})), resolve=True)
        self._ray: Any = None  # the module, once it is connected
        self._is_ours = True  # whether close() disconnects from the cluster, and stops it if it was started here
        self._stays: dict[int, Stay] = {}
        self._ready: set[Any] = set()  # fulfilled promises
        self._is_killing = False

    def setup(self, context: Any, config: DictConfig) -> None:
        self._hydra_context = context
        self._gpu_slots = int(config.sweep.slots.cuda)
        self._grace_seconds = float(config.sweep.grace_seconds)
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._mark, self._secret = self._folder / MARK, uuid.uuid4().hex

    @property
    def devices_for(self) -> DevicesFor:
        return functools.partial(devices_in, has_gpus=self._amount("GPU") > 0)

    def open(self, pool: ProcessPool, hardware: Hardware, devices: Collection[str]) -> Capacity:
        self._mark.write_text(self._secret)
        counts = [(len(self._nodes()), "node"), *((self._amount(kind), kind) for kind in ("CPU", "GPU"))]
        cluster = ", ".join(f"{count:g} {name}{'s' * (count != 1)}" for count, name in counts)
        demands = [f"; a job on {name} takes {in_words(self.demand(name))}" for name in sorted(devices)]
        return Capacity(f"Ray {self._where}: {cluster}{''.join(demands)}")

    def start(self, prepared: PreparedJob, context: RunContext) -> str | None:
        """Request an actor from Ray, and start the job in it once it runs."""
        number = prepared.job.number
        stay = self._stays.get(number)
        if stay is None:
            device = prepared.devices[0]
            if sum(other.device == device and other.node is None for other in self._stays.values()) < MAX_REQUESTED:
                self._stays[number] = self._request_actor(device, prepared.job.name)
            return None
        if stay.promise not in self._ready:
            return None
        self._ready.remove(stay.promise)
        try:
            stay.node, is_shared = self._ray.get(stay.promise)
        except self._ray.exceptions.RayError as error:
            stay.problem = f"Ray gave it no place: {_line_of(error)}"
            return stay.device
        name = self._name_of(stay.node)
        if is_shared:
            stay.promise = stay.actor.run.remote(self._request(prepared, context))
        else:
            fix = "use a directory that all machines share: `hydra.sweep.dir=/SHARED/DIRECTORY`"
            stay.problem = f"{name} does not have the directory {self._folder}; {fix}"
        return f"{stay.device} at {name}"

    def ended(self, seconds: float) -> list[Ended]:
        promises = [stay.promise for stay in self._stays.values() if stay.promise not in self._ready]
        if promises:
            self._ray.wait(promises, num_returns=1, timeout=seconds)
            self._ready |= {*self._ray.wait(promises, num_returns=len(promises), timeout=0)[0]}
        else:
            time.sleep(0.0 if self._ready else seconds)
        over = {number: stay for number, stay in self._stays.items() if self._is_over(stay)}
        return [self._end_of(number, stay) for number, stay in over.items()]

    def _is_over(self, stay: Stay) -> bool:
        return stay.problem is not None or (stay.node is not None and stay.promise in self._ready)

    def stop(self, what: signal.Signals = signal.SIGTERM) -> None:
        for stay in self._stays.values():
            if stay.node is not None and stay.problem is None:
                stay.actor.stop.remote(int(what))
                if self._is_killing:  # its machine no longer answers
                    self._ray.kill(stay.actor)
        self._is_killing = what == signal.SIGKILL

    def close(self) -> None:
        if self._ray is not None:
            for stay in self._stays.values():
                self._ray.kill(stay.actor)
            if self._is_ours:
                self._ray.shutdown()
        self._mark.unlink(missing_ok=True)

    def demand(self, device: str) -> dict[str, float]:
        """Return the resources that one job requests, by Ray's names. A job on a GPU takes num_gpus, or its slot's share."""
        gpus = 0.0 if device == "cpu" else (1 / self._gpu_slots if self._num_gpus is None else self._num_gpus)
        amounts = {"CPU": self._num_cpus, "GPU": gpus, **self._resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def actor(self, kind: type, demand: Mapping[str, float], *arguments: Any) -> Any:
        """Request an actor of this class on a node with the demanded resources; returns immediately."""
        # no upload: the package and the user's modules are installed there, or are in a directory that the machines share
        variables = {"PYTHONPATH": python_path(own=True), **self._runtime_env.get("env_vars", {})}
        if sys.flags.safe_path:  # also for the processes that the actor starts
            variables["PYTHONSAFEPATH"] = "1"
        options = {
            "num_cpus": demand.get("CPU", 0),
            "num_gpus": demand.get("GPU", 0),
            "resources": {name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")},
            "max_restarts": 0,
            "max_task_retries": 0,
            "runtime_env": {**self._runtime_env, "env_vars": variables},
        }
        return self.connect().remote(kind).options(**options).remote(*arguments)

    def connect(self) -> Any:
        """Connect to the cluster, or start one on this machine that close() stops; return the module. Takes 1 to 5 s.

        Raises: RunnerError if Ray is not installed or does not answer.
        """
        if self._ray is None:
            try:
                import ray
            except ImportError:
                raise not_installed("hydra/launcher=ray", "Ray is not installed", "ray") from None
            address = self._address or os.environ.get("RAY_ADDRESS") or "local"
            self._is_ours = not ray.is_initialized()
            if self._is_ours:
                self._where = "started here" if address == "local" else f"at {address}"
                _start(ray, address)
            else:
                self._where = "as it is connected here"  # in a notebook
            self._ray = ray
        return self._ray

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self.connect().nodes() if node["Alive"]]

    def _amount(self, kind: str) -> float:
        return float(sum(node["Resources"].get(kind, 0) for node in self._nodes()))

    def _name_of(self, node_id: str) -> str:
        node = next((node for node in self._ray.nodes() if node["NodeID"] == node_id), None)
        if node is None:
            return node_id[:8]
        named = node.get("NodeName") not in (None, "", node["NodeManagerAddress"])
        return str(node["NodeName"] if named else node["NodeManagerHostname"])

    def _request_actor(self, device: str, name: str) -> Stay:
        demand = self.demand(device)
        if fits_nowhere(demand, self._nodes()):
            print(f"waiting: no node of the cluster has {in_words(demand)}; it is needed for {name}", flush=True)
        # a query would create a context of about 400 MB on a GPU
        environment = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        actor = self.actor(Site, demand, str(Path.cwd()), environment)
        return Stay(device, actor, actor.arrived.remote(str(self._mark), self._secret))

    def _request(self, prepared: PreparedJob, context: RunContext) -> Request:
        return Request(
            prepared.job.number,
            "runner.sweep.jobs.run_job:run_pickled",
            pickle.dumps((prepared.config, self._hydra_context, context)),
            str(self._folder / prepared.job.folder_name / CONSOLE),
            variables_of(OmegaConf.to_yaml(prepared.config), os.environ),
            self._grace_seconds,
        )

    def _end_of(self, number: int, stay: Stay) -> Ended:
        del self._stays[number]
        self._ready.discard(stay.promise)
        code: int | None = None if stay.node is None else 1  # lost by Ray, or its machine lacks the directory
        cause = stay.problem
        if stay.node is not None and cause is None:
            try:
                code = self._ray.get(stay.promise)
            except self._ray.exceptions.RayError as error:
                code, cause = None, f"its place on {self._name_of(stay.node)} was lost: {_line_of(error)}"
        self._ray.kill(stay.actor)
        return Ended(number, code, cause)


def _start(ray: Any, address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if port.isdigit():  # Ray would retry for minutes where nothing listens
            socket.create_connection((host, int(port)), timeout=SECONDS_TO_ANSWER).close()
        with contextlib.chdir(PACKAGES):  # Ray's workers search the current directory for modules first
            dashboard = {"include_dashboard": False} if address == "local" else {}
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False, **dashboard)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        problem = f"Ray doesn't answer at {address}: {_line_of(error)}"
        fix = "use the `hydra.launcher.address=HOST:PORT` that `ray start --head` printed, or null to start a cluster here"
        raise RunnerError.of(f"hydra.launcher.address={address}", problem, fix) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's would end the process while the sweep still has jobs to stop


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


def variables_of(config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a job needs: those in its YAML, the runner's and MLflow's."""
    named = set(re.findall(r"\$\{oc\.env:\s*([A-Za-z_]\w*)", config))
    return {
        name: value for name, value in environment.items() if name in named or name.startswith(("RUNNER_", "MLFLOW_"))
    }
