"""Keeps what was measured on this machine in a file, and reads it again, or None. Imports neither torch nor matplotlib.

show.py writes it; `plan` and what a sweep says before it runs read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.device import Hardware
from runner.device.hardware import GIB, num_usable_cpus

VERSION = 1  # of the file


@dataclass(frozen=True)
class MeasuredDevice:
    """What one device did, as medians."""

    flops_per_second: dict[str, float]  # of large products, by precision: fp32, tf32, bf16, fp16, fp64
    memory_bytes_per_second: float  # read and written
    copy_bytes_per_second: float  # to the device, from pinned memory where there is such; on the CPU a memcpy
    launch_seconds: float
    host_read_seconds: float  # of a tiny operation and the read of its result
    measured_at: str  # ISO date and time, UTC


@dataclass(frozen=True)
class Measured:
    """What `devices --bench` found on this machine, with this torch and this number of threads."""

    devices: dict[str, MeasuredDevice]  # by the name that device= takes


def read(hardware: Hardware) -> Measured | None:
    """What was measured on this machine; None where nothing was, or the file is damaged or of another machine.

    Costs one small file, about 0.1 ms.
    """
    try:
        kept = json.loads(path(hardware).read_text(encoding="utf-8"))
        if kept["of"] != identity(hardware):
            return None
        at = str(kept["measured_at"])
        return Measured({name: _device(facts, at) for name, facts in kept["devices"].items()})
    # a person without a home, too
    except (OSError, RuntimeError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(facts: Mapping[str, Any], hardware: Hardware) -> Path:
    """Writes what was measured in place of what was; returns the file.

    Raises: OSError or RuntimeError where there is no folder to write to; the file before stays whole.
    """
    file = path(hardware)
    write_whole(file, json.dumps({"of": identity(hardware), **facts}, indent=2).encode())
    return file


def path(hardware: Hardware) -> Path:
    """The file of this machine, whether it is there or not. Raises: RuntimeError where the person has no home."""
    digest = hashlib.sha256(json.dumps(identity(hardware), sort_keys=True).encode()).hexdigest()[:12]
    return folder() / f"bench-{digest}.json"


def folder() -> Path:
    """Where this person's caches lie, by the system's custom. Raises: RuntimeError where the person has no home."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData/Local") / "runner"
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "runner"  # XDG ignores relative paths


def identity(hardware: Hardware) -> dict[str, Any]:
    """What makes figures comparable: the parts of the machine, torch, the threads. Not its name: a container's changes."""
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
        "threads": _threads(),
    }


def write_whole(file: Path, content: bytes) -> None:
    """The whole file or what was there before, whatever happens meanwhile. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        Path(name).replace(file)
    except BaseException:  # Ctrl-C too
        Path(name).unlink(missing_ok=True)
        raise


def _threads() -> str:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if variable in os.environ:
            return f"{variable}={os.environ[variable]}"
    return str(num_usable_cpus())


def _device(facts: Mapping[str, Any], at: str) -> MeasuredDevice:
    copies = facts.get("copy_to_device_gb_per_s") or {"pageable": facts.get("memcpy_gb_per_s")}
    return MeasuredDevice(
        flops_per_second={name: _positive(value) * 1e12 for name, value in facts["matmul_tflops"].items()},
        memory_bytes_per_second=_positive(facts["memory_gb_per_s"]) * 1e9,
        copy_bytes_per_second=_positive(copies.get("pinned", copies.get("pageable"))) * 1e9,
        launch_seconds=_positive(facts["launch_us"]) / 1e6,
        host_read_seconds=_positive(facts["host_read_us"]) / 1e6,
        measured_at=at,
    )


def _positive(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value} is no measured figure")
    return number
