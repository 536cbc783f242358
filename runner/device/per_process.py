"""Chooses the device of each process that trains a run, by `device=` and `train.num_processes`. Pure.

Called by experiment/processes.py; for one process it is choose.py's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.device.choose import Choice, resolve
from runner.device.hardware import Hardware
from runner.device.unavailable import why_not
from runner.errors import Problem, RunnerError

#: how processes on a kind of device talk to each other
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


def devices_of_processes(
    policy: tuple[str, ...], count: Any, hardware: Hardware, *, choice: Choice | None = None, by_number: bool = False
) -> tuple[Choice, ...]:
    """A choice for each process of this machine, in the order of their ranks; one alone where nothing asks for more.

    policy: as runner.device.parse() gives it. count: of processes, or "auto". choice: what is taken where one is enough
        (None: what the policy resolves to). by_number: the first ones, and not those with the most free memory.
    Raises: RunnerError where there are fewer devices than processes, with what is there.
    """
    choice = choice or resolve(policy, hardware)
    kind = choice.device.partition(":")[0]
    asked = _asked(policy, kind)
    if count == "auto":
        several = _usable(kind, hardware) if asked == "all" else [choice.device]
        return _each(several, asked) if len(several) > 1 else (choice,)
    if count == 1:
        return (choice,)
    if kind == "cpu":
        return (choice,) * int(count)
    words = f"device={asked} train.num_processes={count}"
    if kind == "mps":
        problem = "a Mac has one GPU, and only one process can train on it"
        raise RunnerError(Problem(words, problem, "train.num_processes=1, or device=cpu"))
    if ":" in asked:
        problem = f"{asked} is one device, and each process needs its own"
        raise RunnerError(Problem(words, problem, f"device={kind}, device=all, or train.num_processes=1"))
    usable = _usable(kind, hardware)
    if len(usable) < count:
        problem = f"each process needs a device of its own; here: {', '.join(usable)}"
        fix = f"train.num_processes={len(usable)}, or device=cpu"
        raise RunnerError(Problem(words, problem, fix))
    if asked != "all" and not by_number:
        devices = hardware.devices()
        usable.sort(key=lambda name: -(devices[name].free_bytes or 0))  # stable: by number where they are equal
    return _each(usable[: int(count)], asked)


def device_of_process(policy: tuple[str, ...], local_rank: int, local_num: int, hardware: Hardware) -> Choice:
    """The device of one of `local_num` processes that somebody else has started on this machine.

    Each of them chooses for itself, and by the time that it looks others may have memory on theirs: an order of free memory
    would not be the same to all, and two would take one GPU. A scheduler that gives each process a device of its own hides
    the others from it: then it is the only one it sees.
    Raises: RunnerError where there are fewer devices than processes.
    """
    choice = resolve(policy, hardware)
    kind = choice.device.partition(":")[0]
    if kind in ("cuda", "xpu") and local_num > 1 and len(_usable(kind, hardware)) == 1 and hardware.visible is not None:
        return Choice(choice.device, f"{_asked(policy, kind)}: the only one that process {local_rank} here may see")
    return devices_of_processes(policy, local_num, hardware, choice=choice, by_number=True)[local_rank]


def backend_of(device: str) -> str:
    """The name that torch.distributed has for what joins processes on this device."""
    return BACKENDS[device.partition(":")[0]]


def _asked(policy: tuple[str, ...], kind: str) -> str:
    return next((item for item in policy if item in ("auto", "all") or item.partition(":")[0] == kind), policy[0])


def _usable(kind: str, hardware: Hardware) -> list[str]:
    names = [name for name in hardware.devices() if name.partition(":")[0] == kind]
    return [name for name in names if kind == "cpu" or why_not(name, hardware) is None]


def _each(names: Sequence[str], asked: str) -> tuple[Choice, ...]:
    reason = f"{asked}: {len(names)} processes, on {', '.join(names)}"
    return tuple(Choice(name, reason) for name in names)
