"""Reads this process's rank from the environment that torchrun, Slurm's srun or this program has set."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runner.errors import RunnerError


class UnmetError(RunnerError):
    """Not all processes of a run have joined; each that waited reports it, since the first one may be missing."""


#: ports outside the system's ephemeral range; a job's number chooses one
FIRST_PORT, NUM_PORTS = 15_000, 10_000


@dataclass(frozen=True)
class RankInfo:
    """One of several processes; `local` is among those of its machine."""

    rank: int
    num: int
    local_rank: int
    local_num: int
    address: str
    port: int
    by: str  # torchrun | srun


def rank_here(environ: Mapping[str, str], *, first_host: Callable[[str], str] | None = None) -> RankInfo | None:
    """Return this process's rank, or None for a single process. Free, except for one `scontrol` in Slurm.

    first_host: returns the first of Slurm's list of hosts (None: by `scontrol`).
    Raises: RunnerError for variables that are not whole numbers or not a rank.
    """
    if "WORLD_SIZE" in environ and "RANK" in environ:
        num = _number(environ, "WORLD_SIZE")
        if num <= 1:
            return None
        by, rank, local_rank = "torchrun", _number(environ, "RANK"), _number(environ, "LOCAL_RANK", "0")
        local_num = _number(environ, "LOCAL_WORLD_SIZE", str(num))
        port = _number(environ, "MASTER_PORT", "29500")
        address = environ.get("MASTER_ADDR", "127.0.0.1")
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:  # a batch script has only the first one
        num = _number(environ, "SLURM_STEP_NUM_TASKS")
        if num <= 1:
            return None
        by, rank, local_rank = "srun", _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID", "0")
        tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", str(num))
        local_num = _tasks_of(tasks, _number(environ, "SLURM_NODEID", "0"))
        port = FIRST_PORT + _number(environ, "SLURM_JOB_ID", "0") % NUM_PORTS
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        address = (first_host or _first_host)(nodes) or environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    else:
        return None
    if not (rank < num and local_rank < local_num):
        problem = f"process {rank} of {num} (here {local_rank} of {local_num}) does not exist"
        raise RunnerError.of(f"what {by} has set", problem, "run `unset RANK WORLD_SIZE LOCAL_RANK`")
    return RankInfo(rank, num, local_rank, local_num, address, port, by)


def _first_host(nodes: str) -> str:
    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.split() or [""])[0]


def _tasks_of(text: str, node: int) -> int:
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts[min(node, len(counts) - 1)]


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None or not text.isdigit():
        problem = f"`{name}` must be a whole number, the rank of a process"
        raise RunnerError.of(f"{name}={text}", problem, f"run `unset {name}`, or use torchrun, which sets it")
    return int(text)
