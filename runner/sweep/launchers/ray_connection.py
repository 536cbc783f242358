"""Joins a Ray cluster, or starts one, and asks it for processes and their results. The one module that imports ray.

For ray.py: it keeps the connection, and what the cluster's nodes were when last asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.packages import install
from runner.errors import Fault, RunnerError
from runner.version import PACKAGES, python_path

SECONDS_TO_ANSWER = 5.0
SECONDS_BETWEEN_NODES = 5.0  # the list of nodes is asked for at most so often


class Lost(Exception):
    """What was promised will not come: a worker or its machine is gone. Says why, in a line."""


class Connection:
    """This process as a driver of the cluster."""

    def __init__(self, ray: Any, address: str, *, is_ours: bool) -> None:
        """Use connect(). is_ours: whether to leave the cluster at the end, and to end it if it was started here."""
        self._ray, self._address, self._is_ours = ray, address, is_ours
        self._nodes: list[dict[str, Any]] = []
        self._asked_at = float("-inf")

    def __str__(self) -> str:
        nodes = [node for node in self.nodes() if node["Alive"]]
        counts = [f"{len(nodes)} node{'s' * (len(nodes) != 1)}"]
        counts += [f"{self.num(kind):g} {kind}{'s' * (self.num(kind) != 1)}" for kind in ("CPU", "GPU")]
        return f"Ray {self._address}: {', '.join(counts)}"

    def num(self, kind: str) -> float:
        """How much of a resource the cluster has, busy or not."""
        return float(sum(node["Resources"].get(kind, 0) for node in self.nodes() if node["Alive"]))

    def nodes(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._asked_at > SECONDS_BETWEEN_NODES:
            self._nodes, self._asked_at = self._ray.nodes(), time.monotonic()
        return self._nodes

    def name_of(self, node_id: str) -> str:
        """The node's name, if it was given one, else its host's."""
        node = next((node for node in self.nodes() if node["NodeID"] == node_id), None)
        if node is None:
            return node_id[:8]
        named = node.get("NodeName") not in (None, "", node["NodeManagerAddress"])
        return str(node["NodeName"] if named else node["NodeManagerHostname"])

    def actor(self, kind: type, demand: Mapping[str, float], runtime_env: Any, *arguments: Any) -> Any:
        """Asks for a process of this kind on a node that has what it demands; returns at once."""
        own = {name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")}
        # no upload: the package is installed there, or lies in a folder that the machines share, as the person's modules
        variables = {"PYTHONPATH": python_path(own=True), **runtime_env.get("env_vars", {})}
        if sys.flags.safe_path:  # of what the place starts, too
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
        """Those that are fulfilled or broken; waits for the first one, at most so long."""
        if not promises:
            time.sleep(seconds)
            return set()
        first, _ = self._ray.wait(list(promises), num_returns=1, timeout=seconds)
        if not first:
            return set()
        ready, _ = self._ray.wait(list(promises), num_returns=len(promises), timeout=0)
        return set(ready)

    def get(self, promise: Any) -> Any:
        """What was promised. Raises: Lost."""
        try:
            return self._ray.get(promise)
        except self._ray.exceptions.RayError as error:
            raise Lost(_line_of(error)) from None

    def kill(self, actor: Any) -> None:
        """Ends the process; one that is not there yet never comes."""
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        if self._is_ours:
            self._ray.shutdown()


def connect(address: str | None) -> Connection:
    """Joins the cluster, or starts one on this machine, which ends with close(): 1 to 5 s.

    address: None means RAY_ADDRESS, and without that a cluster of this sweep's own.
    Raises: RunnerError when Ray is not installed, or does not answer.
    """
    try:
        import ray
    except ImportError:
        raise RunnerError(Fault("hydra/launcher=ray", "Ray is not installed", install("ray"))) from None
    if ray.is_initialized():  # in a notebook
        return Connection(ray, "as it is connected here", is_ours=False)
    where = address or os.environ.get("RAY_ADDRESS") or "local"
    if not _listens(where):  # Ray itself would try for minutes
        raise RunnerError(_no_answer(where, ConnectionError("nothing listens there")))
    starts: dict[str, Any] = {"include_dashboard": False} if where == "local" else {}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.chdir(PACKAGES):  # Ray has its workers find modules in the current folder before all others
            ray.init(where, logging_level=logging.ERROR, log_to_driver=False, **starts)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise RunnerError(_no_answer(where, error)) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's would end the process where the sweep has jobs to see off
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


def _no_answer(where: str, error: Exception) -> Fault:
    text = _line_of(error)
    asked = f"hydra.launcher.address={where}"
    if "token" in str(error).lower():
        fix = "RAY_AUTH_MODE and the token as the cluster has them (docs.ray.io: token authentication)"
        return Fault(asked, text, fix)
    fix = "hydra.launcher.address=HOST:PORT as ray start --head printed it, or null for a cluster that is started here"
    return Fault(asked, f"Ray does not answer there: {text}", fix)


def _line_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    causes = ("The actor is dead", "The node", "Worker exit", "The actor died")
    told = [line for cause in causes for line in lines if line.startswith(cause)]
    text = (told or lines or [type(error).__name__])[0]
    return text.partition(" Some common causes")[0][:300]
