"""Describes this machine as a frozen value. Only this module queries the hardware."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.device import torch_private

if TYPE_CHECKING:
    import torch

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One accelerator. None: unknown."""

    name: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None  # CUDA's compute capability
    uuid: str = ""
    is_exclusive: bool = False  # only one process at a time may compute on it


@dataclass(frozen=True)
class Speeds:
    """How fast a device is, at its best on a data sheet, or as medians of a measurement. None: unknown."""

    #: of products, by precision: fp32, tf32, bf16, fp16, fp64
    flops_per_second: dict[str, float] = field(default_factory=dict)
    memory_bytes_per_second: float | None = None  # read and written
    copy_bytes_per_second: float | None = None  # to the device, from pinned memory if there is any; on the CPU a memcpy
    launch_seconds: float | None = None
    measured_at: str = ""  # ISO date and time, UTC

    def flops_of(self, dtype: torch.dtype, *, tf32: bool) -> float | None:
        """Return the speed of products in a type, or that of fp32 if it is not known."""
        short = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
        name = short.get(str(dtype).removeprefix("torch."), "tf32" if tf32 else "fp32")
        return self.flops_per_second.get(name) or self.flops_per_second.get("fp32")


@dataclass(frozen=True)
class Driver:
    """Facts that explain a missing GPU. A separate process finds them, since cuInit in this one would break later forks."""

    library_error: str | None = None  # why libcuda does not load; None: it loads
    cuda: int | None = None  # the newest CUDA it can serve, 12040 for 12.4
    init_code: int | None = None  # cuInit's answer; 0 is well
    num_gpus: int = 0
    kernel_module: str = ""  # the first line of /proc/driver/nvidia/version
    gpu_on_bus: bool = False
    in_container: bool = False
    in_wsl: bool = False
    mig: bool = False  # a GPU is in MIG mode


@dataclass(frozen=True)
class Hardware:
    """A machine, as far as the choice of a device needs it."""

    system: str = "linux"  # sys.platform
    machine: str = "x86_64"
    macos: str = ""
    rosetta: bool = False  # an x86 Python on an Apple-silicon Mac
    cpu_name: str = "CPU"
    num_cpus: int = 1
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    torch_version: str = ""
    cuda_build: str | None = None  # the CUDA that torch was built for
    hip_build: str | None = None
    arch_list: tuple[str, ...] = ()  # sm_90, compute_120, ...: what torch has kernels for
    mps_built: bool = False
    xpu_built: bool = False
    cuda: tuple[Gpu, ...] = ()  # by index
    xpu: tuple[Gpu, ...] = ()
    mps: Gpu | None = None
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    container_visible: str | None = None  # NVIDIA_VISIBLE_DEVICES
    driver: Driver | None = None  # None: not queried yet

    def devices(self) -> dict[str, Gpu]:
        """Return the devices by the name that `device=` takes; the CPU last."""
        return {
            **{f"cuda:{index}": gpu for index, gpu in enumerate(self.cuda)},
            **({"mps": self.mps} if self.mps else {}),
            **{f"xpu:{index}": gpu for index, gpu in enumerate(self.xpu)},
            "cpu": Gpu(self.cpu_name, self.memory_bytes, self.free_memory_bytes),
        }

    @property
    def in_words(self) -> str:
        """Name and number of cores of the CPU."""
        return f"{self.cpu_name}, {self.num_cpus} core{'s' * (self.num_cpus != 1)}"

    def name_of(self, device: str) -> str:
        return self.devices()[device].name


def num_usable_cpus() -> int:
    """Return the CPUs that this process may use; a container or a queue's job may have fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def probe() -> Hardware:
    """Describe this machine as torch sees it. Takes milliseconds without a GPU; on one the first call initializes CUDA."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    return Hardware(
        system=sys.platform,
        machine=platform.machine(),
        macos=platform.mac_ver()[0],
        rosetta=_under_rosetta(),
        cpu_name=_cpu_name(),
        num_cpus=os.cpu_count() or 1,
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        torch_version=str(torch.__version__),
        cuda_build=torch.version.cuda,
        hip_build=torch.version.hip,
        arch_list=torch_private.cuda_architectures(),
        mps_built=torch.backends.mps.is_built(),
        xpu_built=torch_private.xpu_is_compiled(),
        cuda=_cuda_gpus(),
        xpu=_xpu_gpus(),
        mps=_mps_gpu(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        container_visible=os.environ.get("NVIDIA_VISIBLE_DEVICES"),
    )


def diagnose(hardware: Hardware) -> Hardware:
    """Add the driver's facts, which explain a missing GPU."""
    return replace(hardware, driver=_driver())


@functools.cache
def _driver() -> Driver:
    try:
        facts: dict[str, Any] = json.loads(_output(sys.executable, "-I", "-c", _ASK_DRIVER, seconds=60))
    except ValueError:  # the driver ends the process, or hangs
        facts = {"init_code": 999}
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return Driver(
        **facts,
        kernel_module=_first_line("/proc/driver/nvidia/version"),
        gpu_on_bus=any(_first_line(str(vendor)) == "0x10de" for vendor in vendors),
        in_container=Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        in_wsl=Path("/dev/dxg").exists(),
        mig=["Enabled"] in _nvidia_smi("mig.mode.current"),
    )


def _cuda_gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    # by uuid, since the driver's order is not CUDA's
    reported = {
        row[0].removeprefix("GPU-"): row for row in _nvidia_smi("uuid,memory.free,compute_mode") if len(row) == 3
    }
    gpus = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        uuid = str(getattr(about, "uuid", ""))
        _, free, mode = reported.get(uuid, ("", "", ""))
        # mem_get_info creates a context of some 400 MB on the GPU, so it is the last resort
        free_bytes = int(free) * 2**20 if free.isdigit() else torch.cuda.mem_get_info(index)[0]
        # for a MIG slice the driver may report the whole GPU's memory
        free_bytes = min(free_bytes, about.total_memory)
        capability, is_exclusive = (about.major, about.minor), mode.startswith("Exclusive")
        gpus.append(Gpu(about.name, about.total_memory, free_bytes, capability, uuid, is_exclusive))
    return tuple(gpus)


def _xpu_gpus() -> tuple[Gpu, ...]:
    import torch

    count = torch.xpu.device_count() if torch.xpu.is_available() else 0
    each = (torch.xpu.get_device_properties(index) for index in range(count))
    return tuple(Gpu(about.name, about.total_memory) for about in each)


def _mps_gpu() -> Gpu | None:
    import torch

    if not torch.backends.mps.is_available():
        return None
    try:
        torch.zeros(1, device="mps")  # a virtual Mac may say that it has one and refuse every tensor (pytorch#125197)
        total = torch.mps.recommended_max_memory()
        return Gpu(f"{_cpu_name()} GPU", total, max(0, total - torch.mps.driver_allocated_memory()))
    except RuntimeError:
        return None


def _nvidia_smi(query: str) -> list[list[str]]:
    rows = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    return [[cell.strip() for cell in line.split(",")] for line in rows.splitlines()]


def _cpu_name() -> str:
    if sys.platform == "darwin":  # cron's PATH has no /usr/sbin
        return _output("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _output(*command: str, seconds: float = 5) -> str:
    """Return what a program prints; "" if it is missing, fails or hangs."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _under_rosetta() -> bool:
    if sys.platform != "darwin":
        return False
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    failed = ctypes.CDLL(None).sysctlbyname(b"sysctl.proc_translated", ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value == 1


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


#: queries NVIDIA's driver in a separate process, with only the standard library
_ASK_DRIVER = """
import ctypes, json, sys

facts = {}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    facts["library_error"] = str(error)
else:
    number = ctypes.c_int(0)
    if cuda.cuDriverGetVersion(ctypes.byref(number)) == 0:
        facts["cuda"] = number.value
    facts["init_code"] = cuda.cuInit(0)
    if facts["init_code"] == 0 and cuda.cuDeviceGetCount(ctypes.byref(number)) == 0:
        facts["num_gpus"] = number.value
print(json.dumps(facts))
"""
