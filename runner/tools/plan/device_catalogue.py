"""A table of common devices from their data sheets: memory, bandwidth, arithmetic (dense). For plan.device_name."""

from __future__ import annotations

from dataclasses import dataclass

from runner.device.hardware import GIB, Speeds
from runner.device.unavailable import AMPERE
from runner.errors import RunnerError, nearest

GB, TERA = 1e9, 1e12


@dataclass(frozen=True)
class DeviceModel:
    """A device with the speeds of its data sheet, without sparsity."""

    kind: str
    memory_bytes: int
    speeds: Speeds
    capability: tuple[int, int] | None = None


def _nvidia(
    gib: float, gb_per_s: float, capability: tuple[int, int], *, fp32: float, half: float, tf32: float = 0.0
) -> DeviceModel:
    flops = {"fp32": fp32, "fp16": half}
    if capability >= AMPERE:
        flops |= {"bf16": half, "tf32": tf32}
    speeds = Speeds({name: value * TERA for name, value in flops.items()}, gb_per_s * GB)
    return DeviceModel("cuda", int(gib * GIB), speeds, capability)


def _apple(gib: float, gb_per_s: float, fp32: float) -> DeviceModel:
    flops = {"fp32": fp32 * TERA, "fp16": fp32 * TERA, "bf16": fp32 * TERA}
    return DeviceModel("mps", int(gib * GIB), Speeds(flops, gb_per_s * GB))


#: values of plan.device_name. Memory is what the device reports, a little less than on the data sheet; of a Mac, the part
#: that the GPU may use (about two thirds up to 32 GiB, three quarters above)
MODELS = {
    "T4": _nvidia(14.6, 320, (7, 5), fp32=8.1, half=65),
    "V100-16GB": _nvidia(15.8, 900, (7, 0), fp32=15.7, half=125),
    "V100-32GB": _nvidia(31.7, 900, (7, 0), fp32=15.7, half=125),
    "RTX-3060": _nvidia(11.8, 360, (8, 6), fp32=12.7, half=51, tf32=25),
    "RTX-3090": _nvidia(23.7, 936, (8, 6), fp32=35.6, half=71, tf32=35.6),
    "RTX-4070": _nvidia(11.7, 504, (8, 9), fp32=29.1, half=58, tf32=29.1),
    "RTX-4090": _nvidia(23.5, 1008, (8, 9), fp32=82.6, half=165, tf32=82.6),
    "A10": _nvidia(22.1, 600, (8, 6), fp32=31.2, half=125, tf32=62.5),
    "L4": _nvidia(22.2, 300, (8, 9), fp32=30.3, half=121, tf32=60),
    "L40S": _nvidia(44.5, 864, (8, 9), fp32=91.6, half=362, tf32=183),
    "A100-40GB": _nvidia(39.4, 1555, (8, 0), fp32=19.5, half=312, tf32=156),
    "A100-80GB": _nvidia(79.3, 2039, (8, 0), fp32=19.5, half=312, tf32=156),
    "H100": _nvidia(79.6, 3350, (9, 0), fp32=67, half=989, tf32=494),
    "H200": _nvidia(139.8, 4800, (9, 0), fp32=67, half=989, tf32=494),
    "M1-8GB": _apple(5.3, 68, 2.6),
    "M1-16GB": _apple(10.7, 68, 2.6),
    "M2-16GB": _apple(10.7, 100, 3.6),
    "M3-24GB": _apple(16, 100, 4.1),
    "M1-Max-64GB": _apple(48, 400, 10.4),
    "M2-Max-64GB": _apple(48, 400, 13.6),
    "M3-Max-64GB": _apple(48, 400, 14.2),
    "M2-Ultra-128GB": _apple(96, 800, 27.2),
}


def model(name: str, *, kind: str) -> DeviceModel:
    """Return the device with this name. Raises: RunnerError with the nearest name, or for a device of another kind."""
    names = [other for other, found in MODELS.items() if found.kind == kind]
    if name in names:
        return MODELS[name]
    asked = f"plan.device_name={name}"
    if not names:
        hits = [name] if name in MODELS else nearest(name, MODELS)
        ways = [f"device={MODELS[hit].kind} plan.device_name={hit}" for hit in hits] or ["plan.device_memory=16GiB"]
        raise RunnerError.suggest(asked, f"no known device has the kind `{kind}`", ways)
    near = nearest(name, names) or names
    problem = f"there is no device `{name}`; for `{kind}` there are {', '.join(names)}"
    raise RunnerError.of(asked, problem, f"use `plan.device_name={near[0]}`, or `plan.device_memory=80GiB`")


def fits(num_bytes: int, *, kind: str, share: float) -> list[str]:
    """Return the devices of this kind with enough memory, `share` of which is usable, the smallest first."""
    found = [name for name, each in MODELS.items() if each.kind == kind and num_bytes <= each.memory_bytes * share]
    return sorted(found, key=lambda name: MODELS[name].memory_bytes)
