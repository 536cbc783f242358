"""Chooses the device that `device=` asks for on a machine, and says why, or why there is none. Parses what may be asked.

Pure, but that explained() has the driver asked where a device is missing. For experiment/check.py, runs/load.py, a sweep's slots.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.device.hardware import GIB, Gpu, Hardware, diagnose, other_kind
from runner.device.unavailable import why_not
from runner.errors import Problem, RunnerError, nearest

FORMS = "auto, cpu, cuda, cuda:N, mps, xpu, xpu:N, all, or a list of them such as [cuda:1,cpu]"
FORM = re.compile(r"auto|all|cpu|mps|(cuda|xpu)(:\d+)?")
OTHER_NAMES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",  # torch calls AMD's GPUs so, too
    "hip": "cuda",
    "metal": "mps",
    "apple": "mps",
    "mps:0": "mps",
    "cpu:0": "cpu",
    "intel": "xpu",
}


@dataclass(frozen=True)
class Choice:
    device: str  # cpu, cuda:N, mps, xpu:N
    reason: str
    local: str | None = None  # what this process calls it, where it sees but a part of the machine (None: the same)

    @property
    def here(self) -> str:
        """The name for torch."""
        return self.local or self.device


def choose(value: Any, hardware: Hardware) -> Choice:
    """parse() and resolve(), with the real reason where something is missing."""
    policy = parse(value)
    return resolve(policy, explained(policy, hardware))


def explained(policy: tuple[str, ...], hardware: Hardware) -> Hardware:
    """The machine, with what its driver says where something that is asked for is missing, or auto takes the CPU."""
    kinds = [item for item in policy if item not in ("auto", "all")]
    if "auto" in policy and [*hardware.devices()] == ["cpu"]:
        kinds.append("cuda")
    if hardware.driver is None and any(why_not(item, hardware) for item in kinds):
        return diagnose(hardware)
    return hardware


def parse(value: Any) -> tuple[str, ...]:
    """The preferences, best first; a single value is a list of one.

    Raises: RunnerError for every form that is none, with the nearest one that is.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = list(value)
        if not items:
            raise _no_device("device=[]", "the list names no device", "device=auto, or 'device=[cuda:1,cpu]'")
        parsed = [_one(item) for item in items]
        if "all" in parsed and len(parsed) > 1:
            raise _no_device(f"device={items}", "all is no preference among others", "device=all")
        return tuple(parsed)
    return (_one(value),)


def _no_device(source: str, message: str, help: str) -> RunnerError:
    return RunnerError(Problem(source, message, help, code="unknown-device"))


def resolve(policy: tuple[str, ...], hardware: Hardware) -> Choice:
    """The first preference that this machine has, and why it.

    auto and cuda take the CUDA device with the most free memory; auto goes on to MPS, XPU and the CPU.
    Raises: RunnerError for a device that is not there, with the cause, the mend and what is there. Nothing falls back.
    """
    passed_over: list[str] = []
    problems: list[Problem] = []
    for item in policy:
        found = _find(item, hardware)
        if isinstance(found, Choice):
            if passed_over:
                return Choice(found.device, f"{found.reason}; {'; '.join(passed_over)}")
            return found
        problems.append(found)
        passed_over.append(f"not {item}: {found.message}")
    raise RunnerError(*problems)


def _find(item: str, hardware: Hardware) -> Choice | Problem:
    if item == "auto":
        return _auto(hardware)
    if item == "all":
        return _all(hardware)
    if item == "cpu":
        return Choice("cpu", "as asked")
    why = why_not(item, hardware)
    if why is not None:
        best, there = _auto(hardware).device, ", ".join(hardware.devices())
        write = f"device={best} (here: {there})"
        write = write if why.mend in write else f"{write}; to have it: {why.mend}"
        return Problem(f"device={item}", why.cause, write, (f"device={best}",), code="missing-device")
    if item == "cuda":
        device, reason = _most_free(hardware)
        return Choice(device, f"cuda: {reason}")
    return Choice(item if ":" in item or item == "mps" else f"{item}:0", "as asked")


def _auto(hardware: Hardware) -> Choice:
    unusable = [
        f"not cuda:{index}: {why.cause}"
        for index in range(len(hardware.cuda))
        if (why := why_not(f"cuda:{index}", hardware))
    ]
    if len(unusable) < len(hardware.cuda):
        device, reason = _most_free(hardware)
        return Choice(device, "; ".join([f"auto: {reason}", *unusable]))
    if hardware.mps is not None:
        return Choice("mps", "auto: the Mac's GPU")
    if hardware.xpu:
        return Choice("xpu:0", "auto: the first Intel GPU")
    if hardware.others:
        return Choice(f"{hardware.other_kind}:0", f"auto: the first {hardware.other_kind} that torch knows here")
    kind = "mps" if hardware.system == "darwin" else "cuda"
    why = why_not(kind, hardware)
    reasons = unusable or ([f"no {kind}: {why.cause}"] if why else [])
    return Choice("cpu", "; ".join(["auto: no GPU found", *reasons]))


def _all(hardware: Hardware) -> Choice:
    accelerators = [name for name in hardware.devices() if name != "cpu" and why_not(name, hardware) is None]
    if len(accelerators) > 1:
        return Choice(accelerators[0], f"all: the first of {', '.join(accelerators)}")
    device = accelerators[0] if accelerators else "cpu"
    return Choice(device, "all: the only accelerator" if accelerators else "all: no GPU found")


def _most_free(hardware: Hardware) -> tuple[str, str]:
    usable = {index: gpu for index, gpu in enumerate(hardware.cuda) if why_not(f"cuda:{index}", hardware) is None}
    best = max(usable, key=lambda index: (usable[index].free_bytes or 0, -index))
    memory = _memory(usable[best])
    reason = f"the only GPU{memory and ', '}{memory}" if len(usable) == 1 else f"the most free memory, {memory}"
    return f"cuda:{best}", reason


def _memory(gpu: Gpu) -> str:
    if gpu.free_bytes is None or gpu.total_bytes is None:
        return ""
    busy = "; nearly full" if gpu.free_bytes < 0.05 * gpu.total_bytes else ""
    return f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free{busy}"


def _one(value: Any) -> str:
    asked = f"device={'null' if value is None else value}"
    if isinstance(value, str) and (FORM.fullmatch(value) or _is_other(value)):
        return value
    if value is None or value == "":
        raise _no_device(asked, "it names no device", "device=auto")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _no_device(asked, f"a device is {FORMS}", "device=auto")
    if isinstance(value, int):
        fix = f"device=cuda:{value}" if value >= 0 else "device=cuda:0"
        raise _no_device(asked, "a number alone does not say which kind of device", fix)
    text = value.strip().lower()
    kind, _, number = text.partition(":")
    if text in OTHER_NAMES:
        if value == "mps:0":
            return "mps"
        raise _no_device(asked, f"a device is {FORMS}", f"device={OTHER_NAMES[text]}")
    if OTHER_NAMES.get(kind) in ("cuda", "xpu") and number.isdecimal():
        raise _no_device(asked, f"a device is {FORMS}", f"device={OTHER_NAMES[kind]}:{number}")
    if text.startswith("mps:"):
        raise _no_device(asked, "a Mac has one GPU, and it has no number", "device=mps")
    raise _no_device(asked, f"a device is {FORMS}", _nearest_form(text))


def _is_other(text: str) -> bool:
    kind, _, number = text.partition(":")
    return kind.isidentifier() and (not number or number.isdigit()) and kind == other_kind()


def _nearest_form(text: str) -> str:
    if "," in text:
        items = [f"cuda:{item}" if item.isdigit() else item for item in text.split(",")]
        return f"'device=[{','.join(items)}]' for the first that is there, or -m device={','.join(items)} for a run on each"
    if FORM.fullmatch(text):
        return f"device={text}"
    kind = re.match(r"(cuda|xpu)\W*(\d*)", text)
    if kind:
        return f"device={kind[1]}:{kind[2] if kind[2] and '-' not in text else 0}"
    hits = nearest(text.partition(":")[0], ["auto", "cpu", "cuda", "mps", "xpu", "all", *filter(None, [other_kind()])])
    return " or ".join(f"device={hit}" for hit in hits) or "device=auto"
