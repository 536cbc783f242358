"""Find the device of a plan from `device=` and plan.*, and its assumed properties with their sources. For command.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.device import Choice, Gpu, Hardware, benchmark, choose, parse
from runner.device.hardware import Speeds
from runner.device.unavailable import AMPERE
from runner.errors import RunnerError
from runner.tools.plan import device_catalogue

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class PlannedDevice:
    """The device, and the source of each assumed property. None: nothing is assumed."""

    choice: Choice
    hardware: Hardware  # this machine, with the device in it
    memory_bytes: int | None
    memory_from: str
    speeds: Speeds
    speeds_from: str
    capability: tuple[int, int] | None

    @property
    def device(self) -> str:
        return self.choice.device


def find(cfg: DictConfig, hardware: Hardware) -> PlannedDevice:
    """Raises: RunnerError for an invalid device= or plan.*."""
    policy = parse(OmegaConf.select(cfg, "device"))
    if policy == ("auto",) and (known := device_catalogue.MODELS.get(str(cfg.plan.device_name))):
        policy = (known.kind,)
    choice, here = _choice(policy, hardware)
    kind = choice.device.partition(":")[0]
    gpu = here.devices()[choice.device]
    named = cfg.plan.device_name
    model = device_catalogue.model(str(named), kind=kind) if named is not None else None
    memory, memory_from = _memory(
        cfg.plan.device_memory, model, named, gpu, is_here=choice.device in hardware.devices()
    )
    capability = model.capability if model else gpu.capability
    if model and kind == "cuda":
        index = int(choice.device.partition(":")[2])
        gpus = list(here.cuda)
        gpus[index] = replace(gpus[index], name=str(named), capability=capability)
        here = replace(here, cuda=tuple(gpus))
    speeds, speeds_from = Speeds(), "not known"
    if model is not None:
        speeds, speeds_from = model.speeds, f"the data sheet of {named}"
    elif (measured := benchmark.read(hardware).get(choice.device)) is not None:
        speeds, speeds_from = measured, f"measured here by devices --bench, {measured.measured_at[:10]}"
    return PlannedDevice(choice, here, memory, memory_from, speeds, speeds_from, capability)


def num_bytes(text: Any) -> int:
    """Parse 80GiB, 16G, 512MiB or plain bytes. GB counts as GiB. Raises: RunnerError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", str(text), flags=re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        problem = "`plan.device_memory` must be a number with its unit: 16GiB, 512MiB"
        raise RunnerError.suggest(f"plan.device_memory={text}", problem, ["plan.device_memory=80GiB"])
    return int(float(found[1]) * UNITS[found[2].upper()])


def _choice(policy: tuple[str, ...], hardware: Hardware) -> tuple[Choice, Hardware]:
    first = policy[0]
    if first in ("auto", "all", "cpu"):
        return choose(first, hardware), hardware
    if first in ("cuda", "xpu") and getattr(hardware, first):
        return choose(first, hardware), hardware
    kind, _, index = first.partition(":")
    device = first if kind == "mps" else f"{kind}:{index or 0}"
    if device in hardware.devices():
        return choose(device, hardware), hardware
    if kind == "xpu":
        problem = "`plan` can't simulate Intel GPUs, only `cpu`, `cuda:N` and `mps`"
        raise RunnerError.of(f"plan device={first}", problem, "use `device=cuda:0` or `device=cpu`")
    choice = Choice(device, "as asked; it is not on this machine, and is simulated")
    if kind == "mps":
        return choice, replace(hardware, mps=Gpu("Apple GPU, simulated"))
    gpus = [*hardware.cuda]
    while len(gpus) <= int(index or 0):
        gpus.append(Gpu("NVIDIA GPU, simulated", capability=AMPERE))
    return choice, replace(hardware, cuda=tuple(gpus))


def _memory(
    given: Any, model: device_catalogue.DeviceModel | None, named: Any, gpu: Gpu, *, is_here: bool
) -> tuple[int | None, str]:
    if given is not None:
        return num_bytes(given), f"plan.device_memory={given}"
    if model is not None:
        return model.memory_bytes, f"the data sheet of {named}"
    if is_here and gpu.total_bytes:
        return gpu.total_bytes, "this machine's"
    return None, "not known: plan.device_memory=80GiB or plan.device_name=A100-80GB tells it"
