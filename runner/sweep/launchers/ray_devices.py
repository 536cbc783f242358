"""Says what a job may take of a Ray cluster, by its `device=`, and asks Ray for, or why it can't run. Pure. For ray.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runner.device import Hardware
from runner.errors import Fault, RunnerError


def devices_in(policy: tuple[str, ...], hardware: Hardware, *, has_gpus: bool) -> tuple[str, ...]:
    """The first preference that the cluster has, "cuda" or "cpu". `auto` takes a GPU where there is any.

    hardware: of the machine that asks; it does not matter here.
    Raises: RunnerError when the cluster has none of them, with the reasons.
    """
    faults = []
    for item in policy:
        if item in ("auto", "all"):
            return ("cuda",) if has_gpus else ("cpu",)
        if item == "cpu" or (item == "cuda" and has_gpus):
            return (item,)
        faults.append(_not_there(item, has_gpus=has_gpus))
    raise RunnerError(*faults)


def demand_of(
    device: str, *, num_cpus: float, num_gpus: float | None, gpu_slots: int, resources: Mapping[str, float]
) -> dict[str, float]:
    """What one job asks Ray for, under Ray's names.

    num_gpus: of a job on a GPU; None: as much of one as lets `gpu_slots` jobs share it.
    """
    gpus = 0.0 if device == "cpu" else (1 / gpu_slots if num_gpus is None else num_gpus)
    wanted = {"CPU": num_cpus, "GPU": gpus, **resources}
    return {name: amount for name, amount in wanted.items() if amount}


def fits_nowhere(demand: Mapping[str, float], nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Whether no node that is alive could ever take the job, even when it is idle. nodes: as ray.nodes() has them."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return not any(all(node.get(name, 0) >= amount for name, amount in demand.items()) for node in alive)


def in_words(demand: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:.2g} {name}" for name, amount in demand.items()) or "nothing"


def _not_there(item: str, *, has_gpus: bool) -> Fault:
    asked = f"device={item} on Ray"
    if item.startswith("cuda:") and has_gpus:
        return Fault(asked, "Ray chooses which GPU a job gets", "device=cuda")
    if item.startswith("cuda"):
        fix = "device=cpu, or start a node with ray start --num-gpus=N"
        return Fault(asked, "no node of the cluster has a GPU", fix)
    problem = "Ray knows CPUs and NVIDIA GPUs alone"
    fix = f"device={'cuda' if has_gpus else 'cpu'}, or hydra/launcher=slots on a machine with {item}"
    return Fault(asked, problem, fix)
