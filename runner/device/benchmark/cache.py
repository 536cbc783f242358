"""Stores what `devices --bench` measured in the user's cache directory, and reads it. Imports neither torch nor matplotlib."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.device import Hardware
from runner.device.hardware import GIB, num_usable_cpus

VERSION = 1  # of the file


@dataclass(frozen=True)
class MeasuredDevice:
    """Medians of one device."""

    flops_per_second: dict[str, float]  # of large products, by precision: fp32, tf32, bf16, fp16, fp64
    memory_bytes_per_second: float  # read and written
    copy_bytes_per_second: float  # to the device, from pinned memory if there is any; on the CPU a memcpy
    launch_seconds: float
    measured_at: str  # ISO date and time, UTC


def read(hardware: Hardware) -> dict[str, MeasuredDevice]:
    """Return the figures of this machine by device; empty for a missing or damaged file. Takes about 0.1 ms."""
    try:
        stored = json.loads(path(hardware).read_text(encoding="utf-8"))
        if stored["of"] != identity(hardware):
            return {}
        at = str(stored["measured_at"])
        return {name: _device(facts, at) for name, facts in stored["devices"].items()}
    # also where the user has no home directory
    except (OSError, RuntimeError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep(facts: Mapping[str, Any], hardware: Hardware) -> Path:
    """Replace the stored figures of this machine, and return the file.

    Raises:
        OSError: The directory can't be written to. The earlier file stays whole.
        RuntimeError: The user has no home directory.
    """
    file = path(hardware)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"of": identity(hardware), **facts}, indent=2), encoding="utf-8")
        temporary.replace(file)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise
    return file


def path(hardware: Hardware) -> Path:
    """Return the file of this machine, whether it exists or not. Raises: RuntimeError if the user has no home directory."""
    digest = hashlib.sha256(json.dumps(identity(hardware), sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"bench-{digest}.json"


def folder() -> Path:
    """Return the user's cache directory of this program. Raises: RuntimeError if the user has no home directory."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData/Local") / "runner"
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "runner"  # XDG ignores relative paths


def identity(hardware: Hardware) -> dict[str, Any]:
    """Return what makes figures comparable: the machine's parts, torch, the threads. The host name of a container changes."""
    threads = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    return {
        "version": VERSION,
        "system": hardware.system,
        "machine": hardware.machine,
        "cpu": hardware.cpu_name,
        "num_cpus": hardware.num_cpus,
        "memory_gib": round((hardware.memory_bytes or 0) / GIB),
        "torch": hardware.torch_version,
        "cuda": hardware.cuda_build,
        "hip": hardware.hip_build,
        "gpus": {name: [gpu.name, gpu.uuid] for name, gpu in hardware.devices().items() if name != "cpu"},
        "threads": threads[0] if threads else str(num_usable_cpus()),
    }


def _device(facts: Mapping[str, Any], at: str) -> MeasuredDevice:
    copies = facts.get("copy_to_device_gb_per_s") or {"pageable": facts.get("memcpy_gb_per_s")}
    return MeasuredDevice(
        flops_per_second={name: _positive(value) * 1e12 for name, value in facts["matmul_tflops"].items()},
        memory_bytes_per_second=_positive(facts["memory_gb_per_s"]) * 1e9,
        copy_bytes_per_second=_positive(copies.get("pinned", copies.get("pageable"))) * 1e9,
        launch_seconds=_positive(facts["launch_us"]) / 1e6,
        measured_at=at,
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value} is not a positive number")
    return number


def figure(value: float) -> str:
    """Write a number with three significant digits; large ones whole, without an exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.9995 else f"{value:#.3g}"
