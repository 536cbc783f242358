"""Sets torch's process-wide switches for a run's device; hides what differs by its kind: threads, generators, memory."""

from __future__ import annotations

import os
import platform
import random
import resource
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from runner.device import host_memory
from runner.device.precision import set_float32

#: torch's default, before any run changes it
THREADS = torch.get_num_threads()
#: texts of failed allocations that are not a torch.OutOfMemoryError
OUT_OF_MEMORY = (
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough",
    "Invalid buffer size",  # Metal
    "CUDA error: out of memory",  # a context, a graph or a pinned block
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine to execute this computation",  # cuDNN, without memory for a workspace
    "Cuda failure 'out of memory'",  # NCCL
)
#: default limit of MPS' allocator, as a part of the recommended memory (MPSAllocator.h)
MPS_MEMORY_FRACTION = 1.7


def set_switches(
    device: torch.device,
    *,
    precision: str,
    deterministic: bool,
    num_threads: int | None = None,
    memory_fraction: float | None = None,
    cudnn_benchmark: bool = True,
    cudnn_tf32: bool = True,
) -> None:
    """Set what torch keeps per process, each switch in both directions, so that no run inherits the previous one's."""
    if device.type == "cuda":
        # torch reads it once, at the first product of the process, and a later deterministic run needs it (32 MiB)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the call imports torch's compiler, seconds
        torch.use_deterministic_algorithms(deterministic)
    set_float32(has_tf32_products=precision == "tf32", has_tf32_cudnn=precision == "tf32" or cudnn_tf32)
    if device.type == "cpu":
        torch.set_num_threads(num_threads or automatic_threads())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
        torch.cuda.set_per_process_memory_fraction(memory_fraction or 1.0, device)
        torch.cuda.reset_peak_memory_stats(device)
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # precision_note() says it, with the setting
    elif device.type == "mps":
        usual = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", MPS_MEMORY_FRACTION))
        torch.mps.set_per_process_memory_fraction(memory_fraction or usual)
    elif device.type != "cpu":
        torch.accelerator.set_device_index(device)
        torch.accelerator.reset_peak_memory_stats(device)


def backward_in_this_thread() -> AbstractContextManager[Any]:
    """Take backward passes in the thread that calls them. By default torch wakes a thread of the device for each."""
    return torch.autograd.set_multithreading_enabled(False)


def automatic_threads(num_processes: int = 1) -> int:
    """Return the threads of a training on the CPU: all but one, which the uploader needs, divided among its processes.

    A parallel kernel waits for its slowest thread, so sharing one core would slow all of them. OMP_NUM_THREADS is obeyed.
    """
    has_others = sys.platform == "darwin" and platform.machine() == "arm64"  # torch counts only the fast cores there
    free = THREADS if has_others else THREADS - 1
    return THREADS if "OMP_NUM_THREADS" in os.environ else max(1, free // num_processes)


def limit_threads(most: int) -> None:
    """Limit the threads of this process, because other processes compute at the same time."""
    global THREADS
    THREADS = min(THREADS, most)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device; weights and permutations draw from CPU generators only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator, as tensors and plain values; does not wait for the device."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *(float(value) for value in rest)],
        "cpu": torch.get_rng_state(),
    }
    if device.type != "cpu":
        states["device"] = getattr(torch, device.type).get_rng_state(*_argument(device))
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore every generator; that of another kind of device keeps its seed."""
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(states["cpu"])
    if "device" in states and device.type != "cpu":
        getattr(torch, device.type).set_rng_state(states["device"], *_argument(device))


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Restore every generator after the block, which may draw."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generator_states(states, device)


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Return the peak of the run's memory in bytes, and its source; MPS has no peak."""
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver, at the end"
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device)), "allocator, at most"
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024, "process, at most"  # bytes on macOS, KiB elsewhere


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on any device."""
    is_known = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return is_known or isinstance(error, torch.OutOfMemoryError)


def use_in_thread(device: torch.device) -> None:
    """Make the device the thread's current one. By default that is the first GPU, and an event would take 500 MB there."""
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device)


def empty_cache(device: torch.device) -> None:
    """Free the allocator's reserve, so that tensors of another size find room. Waits for the device."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type != "cpu":
        torch.accelerator.empty_cache()


def free_memory_bytes(device: torch.device, *, memory_fraction: float | None = None) -> int | None:
    """Return the memory that this process can still use on the device; None if unknown.

    On CUDA that includes what torch's allocator holds in reserve.

    Args:
        memory_fraction: Maximum part of the GPU's memory for this process.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(host_memory.own_part(free), int(total * (memory_fraction or 1.0)))
    if device.type == "mps":
        recommended = int(torch.mps.recommended_max_memory() * (memory_fraction or 1.0))
        # the memory is the machine's, and other programs hold some of it
        return min(max(0, recommended - torch.mps.driver_allocated_memory()), available)
    if device.type == "cpu":
        return available
    try:
        return int(torch.accelerator.get_memory_info(device)[0])
    except RuntimeError:  # some of Intel's GPUs don't report it
        return None


def _argument(device: torch.device) -> list[torch.device]:
    return [] if device.type == "mps" else [device]  # a Mac has one GPU
