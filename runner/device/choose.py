"""Parses `device=`, chooses the device of a run and of each of its processes, and gives the reason.

Pure, except that `explained()` queries the driver if a device is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.device.hardware import GIB, Hardware, diagnose
from runner.device.unavailable import Why, why_not
from runner.errors import Problem, RunnerError, nearest

FORMS = "auto, cpu, cuda, cuda:N, mps, xpu, xpu:N, all, or a list of them such as [cuda:1,cpu]"
KINDS = ("auto", "cpu", "cuda", "mps", "xpu", "all")
FORM = re.compile(r"auto|all|cpu|mps|(cuda|xpu)(:\d+)?")
OTHER_NAMES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",  # torch's name for AMD's GPUs, too
    "hip": "cuda",
    "metal": "mps",
    "apple": "mps",
    "intel": "xpu",
}


@dataclass(frozen=True)
class Choice:
    device: str  # cpu, cuda:N, mps, xpu:N
    reason: str
    local: str | None = None  # the name in this process, where it sees only some devices (None: the same)

    @property
    def here(self) -> str:
        """Name for torch in this process."""
        return self.local or self.device


def choose(value: Any, hardware: Hardware) -> Choice:
    """Parse `device=` and choose, with the driver's reason if a device is missing. Raises: RunnerError, as resolve()."""
    policy = parse(value)
    return resolve(policy, explained(policy, hardware))


def explained(policy: tuple[str, ...], hardware: Hardware) -> Hardware:
    """Add the driver's facts if a requested device is missing, or `auto` takes the CPU."""
    kinds = [item for item in policy if item not in ("auto", "all")]
    if "auto" in policy and [*hardware.devices()] == ["cpu"]:
        kinds.append("cuda")
    is_missing = any(why_not(item, hardware) for item in kinds)
    return diagnose(hardware) if is_missing and hardware.driver is None else hardware


def parse(value: Any) -> tuple[str, ...]:
    """Return the preferences, best first. Raises: RunnerError for an invalid form, with the nearest valid one."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = list(value)
        if not items:
            raise _no_device("device=[]", "the list names no device", "device=auto", "device=[cuda:1,cpu]")
        parsed = [_one(item) for item in items]
        if "all" in parsed and len(parsed) > 1:
            raise _no_device(f"device={items}", "`all` can't be in a list", "device=all")
        return tuple(parsed)
    return (_one(value),)


def _no_device(source: str, message: str, *suggestions: str) -> RunnerError:
    return RunnerError.suggest(source, message, suggestions, code="unknown-device")


def resolve(policy: tuple[str, ...], hardware: Hardware) -> Choice:
    """Choose the first preference that this machine has, and say why.

    `auto` and `cuda` take the CUDA device with the most free memory; without one, `auto` takes MPS, XPU or the CPU.

    Raises:
        RunnerError: The device is missing. The error has the cause, the help and the devices of this machine.
    """
    missing: dict[str, Why] = {}
    for item in policy:
        why = None if item in ("auto", "all") else why_not(item, hardware)
        if why is None:
            choice = _take(item, hardware)
            return replace(
                choice, reason="; ".join([choice.reason, *(f"not {a}: {b.cause}" for a, b in missing.items())])
            )
        missing[item] = why
    raise RunnerError(*(_missing(item, why, hardware) for item, why in missing.items()))


def _take(item: str, hardware: Hardware) -> Choice:
    if item in ("auto", "all"):
        return _auto(hardware) if item == "auto" else _all(hardware)
    if item == "cuda":
        return _most_free(item, hardware)
    return Choice("xpu:0" if item == "xpu" else item, "as asked")


def _missing(item: str, why: Why, hardware: Hardware) -> Problem:
    best = f"device={_auto(hardware).device}"
    fix = f"use `{best}` (here: {', '.join(hardware.devices())})"
    fix = fix if why.fix in fix else f"{fix}; to have `{item}`: {why.fix}"
    return Problem(f"device={item}", why.cause, fix, (best,), code="missing-device")


def _auto(hardware: Hardware) -> Choice:
    names = [f"cuda:{index}" for index in range(len(hardware.cuda))]
    reasons = [f"not {name}: {why.cause}" for name in names if (why := why_not(name, hardware))]
    if len(reasons) < len(names):
        choice = _most_free("auto", hardware)
    elif hardware.mps is not None:
        return Choice("mps", "auto: the Mac's GPU")
    elif hardware.xpu:
        return Choice("xpu:0", "auto: the first Intel GPU")
    else:
        choice, kind = Choice("cpu", "auto: no GPU found"), "mps" if hardware.system == "darwin" else "cuda"
        if not reasons and (why := why_not(kind, hardware)):
            reasons = [f"no {kind}: {why.cause}"]
    return replace(choice, reason="; ".join([choice.reason, *reasons]))


def _all(hardware: Hardware) -> Choice:
    accelerators = [name for name in hardware.devices() if name != "cpu" and why_not(name, hardware) is None]
    if not accelerators:
        return Choice("cpu", "all: no GPU found")
    others = f"the first of {', '.join(accelerators)}" if len(accelerators) > 1 else "the only accelerator"
    return Choice(accelerators[0], f"all: {others}")


def _most_free(requested: str, hardware: Hardware) -> Choice:
    devices, names = hardware.devices(), _usable("cuda", hardware)
    best = max(names, key=lambda name: devices[name].free_bytes or 0)  # the first of equal ones
    free, total = devices[best].free_bytes, devices[best].total_bytes
    reason = "the only GPU" if len(names) == 1 else "the most free memory"
    if free is not None and total is not None:
        reason += f", {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        reason += "; nearly full" if free < 0.05 * total else ""
    return Choice(best, f"{requested}: {reason}")


def _one(value: Any) -> str:
    if isinstance(value, str) and FORM.fullmatch(value):
        return value
    if value == "mps:0":
        return "mps"
    text = value.strip().lower() if isinstance(value, str) else f"cuda:{value}" if type(value) is int else ""
    source = f"device={'null' if value is None else value}"
    raise _no_device(source, f"a device is {FORMS}", *_nearest_forms(text))


def _nearest_forms(text: str) -> list[str]:
    if "," in text:
        items = [f"cuda:{item}" if item.isdigit() else item for item in text.split(",")]
        return [f"device=[{','.join(items)}]", f"-m device={','.join(items)}"]
    name, number = re.match(r"([a-z]*)[^a-z0-9]*(\d*)", text).groups()  # type: ignore[union-attr]
    kinds = [OTHER_NAMES[name]] if name in OTHER_NAMES else nearest(name, KINDS) if name else []
    number = "0" if "-" in text else number
    numbered = [f"{kind}:{number}" if number and kind in ("cuda", "xpu") else kind for kind in kinds]
    return [f"device={kind}" for kind in numbered or ["auto"]]


def devices_of_processes(
    policy: tuple[str, ...], count: Any, hardware: Hardware, *, choice: Choice | None = None, by_number: bool = False
) -> tuple[Choice, ...]:
    """Choose a device for each process of this machine, in the order of their ranks.

    Args:
        policy: The preferences, from `parse()`.
        count: Number of processes, or "auto".
        choice: The device of a single process (None: what the policy resolves to).
        by_number: Take the first devices, instead of those with the most free memory.

    Raises:
        RunnerError: There are fewer devices than processes.
    """
    choice = choice or resolve(policy, hardware)
    kind = choice.device.partition(":")[0]
    requested = _preference(policy, kind)
    if count == "auto":
        several = _usable(kind, hardware) if requested == "all" else [choice.device]
        return _each(several, requested) if len(several) > 1 else (choice,)
    if count == 1:
        return (choice,)
    if kind == "cpu":
        return (choice,) * int(count)
    source = f"device={requested} train.num_processes={count}"
    if kind == "mps":
        problem = "a Mac has one GPU, and only one process can train on it"
        raise RunnerError.suggest(source, problem, ["train.num_processes=1", "device=cpu"])
    if ":" in requested:
        problem = f"{requested} is one device, and each process needs its own"
        raise RunnerError.suggest(source, problem, [f"device={kind}", "device=all", "train.num_processes=1"])
    usable = _usable(kind, hardware)
    if len(usable) < count:
        problem = f"each process needs its own device; here: {', '.join(usable)}"
        raise RunnerError.suggest(source, problem, [f"train.num_processes={len(usable)}", "device=cpu"])
    if requested != "all" and not by_number:
        devices = hardware.devices()
        usable.sort(key=lambda name: -(devices[name].free_bytes or 0))  # stable: by number where they are equal
    return _each(usable[: int(count)], requested)


def device_of_process(policy: tuple[str, ...], local_rank: int, local_num: int, hardware: Hardware) -> Choice:
    """Choose the device of one of `local_num` processes that a scheduler started on this machine.

    The order is by number: free memory changes while the others start, and two would take one GPU. Under a scheduler that
    shows each process one device, that device is the choice. Raises: RunnerError if there are fewer devices than processes.
    """
    choice = resolve(policy, hardware)
    kind = choice.device.partition(":")[0]
    if kind in ("cuda", "xpu") and local_num > 1 and len(_usable(kind, hardware)) == 1 and hardware.visible is not None:
        reason = f"{_preference(policy, kind)}: the only one that process {local_rank} here may see"
        return Choice(choice.device, reason)
    return devices_of_processes(policy, local_num, hardware, choice=choice, by_number=True)[local_rank]


def backend_of(device: str) -> str:
    """Return torch.distributed's backend for processes on this device."""
    return {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}[device.partition(":")[0]]


def _preference(policy: tuple[str, ...], kind: str) -> str:
    return next((item for item in policy if item in ("auto", "all") or item.partition(":")[0] == kind), policy[0])


def _usable(kind: str, hardware: Hardware) -> list[str]:
    names = [name for name in hardware.devices() if name.partition(":")[0] == kind]
    return [name for name in names if why_not(name, hardware) is None]


def _each(names: Sequence[str], requested: str) -> tuple[Choice, ...]:
    reason = f"{requested}: {len(names)} processes, on {', '.join(names)}"
    return tuple(Choice(name, reason) for name in names)
