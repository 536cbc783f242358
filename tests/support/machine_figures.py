"""Figures as a machine with a GPU could measure them."""

import math

from runner.device import Gpu, Hardware
from runner.device.benchmark.measure import Sizes
from runner.device.hardware import GIB

TINY = Sizes(
    first_large=8,
    most_large=32,
    small=4,
    product_seconds=1e-9,
    batch_seconds=1e-9,
    copy_bytes=1024,
    memory_bytes=1024,
    repeats=2,
    most_spread=math.inf,
)
MACHINE = Hardware(
    cpu_name="Some CPU",
    num_cpus=8,
    memory_bytes=32 * GIB,
    torch_version="2.13.0",
    cuda_build="13.0",
    arch_list=("sm_90",),
    cuda=(Gpu("Some GPU", 80 * GIB, 79 * GIB, (9, 0), "a-b-c"),),
)


def device(name, *, tflops, gb_per_s, copies):
    medians = {
        "matmul_tflops": tflops,
        "small_matmul_us": dict.fromkeys(tflops, 7.0),
        "memory_gb_per_s": gb_per_s,
        **copies,
        "launch_us": 4.0,
        "host_read_us": 12.0,
    }
    found = {"name": name, "matmul_size": dict.fromkeys(tflops, 4096), **medians}
    return found | {"lowest": scaled(medians, 0.9), "highest": scaled(medians, 1.2)}


def scaled(values, factor):
    return {
        name: scaled(value, factor) if isinstance(value, dict) else value * factor for name, value in values.items()
    }


def facts():
    """As measure() returns them."""
    directions = {
        f"copy_{way}_device_gb_per_s": {"pageable": 8.0, "pinned": 50.0 if way == "to" else 51.0}
        for way in ("to", "from")
    }
    return {
        "small_size": 64,
        "measured_at": "2026-01-02T03:04:05+00:00",
        "num_threads": 7,
        "devices": {
            "cuda:0": device("Some GPU", tflops={"fp32": 42.0, "bf16": 700.0}, gb_per_s=4000.0, copies=directions),
            "cpu": device("Some CPU", tflops={"fp32": 0.1}, gb_per_s=53.0, copies={"memcpy_gb_per_s": 18.0}),
        },
        "failed": {},
    }
