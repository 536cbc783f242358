"""Sets torch's process-wide switches for a run's device, and answers what differs by its kind: precision, generators, memory."""

from __future__ import annotations

import os
import platform
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runner.device import host_memory
from runner.device.linear import take_onednn
from runner.device.precision import AMPERE
from runner.errors import Problem, RunnerError

#: what torch would take by itself, before any run changes it
THREADS = torch.get_num_threads()
#: with so many inputs or more a 1x1 convolution with a stride is safe where channels lie last: a block of oneDNN's
SAFE_INPUTS = 16
#: how allocations fail beside torch.OutOfMemoryError: MPS', the CPU's, and CUDA's libraries
OUT_OF_MEMORY = (
    "MPS backend out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough",
    "Invalid buffer size",  # of Metal
    "CUDA error: out of memory",  # at a context, a graph or a pinned block
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "unable to find an engine to execute this computation",  # cuDNN's, where no workspace fits
    "Cuda failure 'out of memory'",  # NCCL's
)
#: of the recommended memory, what MPS' allocator takes at most where nobody says otherwise (MPSAllocator.h)
MPS_MEMORY_FRACTION = 1.7
#: settings of a kind of device that are lay_out()'s; the others are set_switches()'
OF_A_MODEL = ("channels_last", "onednn")
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NoScaler:
    """Leaves gradients as they are, where fp16 has a torch.amp.GradScaler."""

    def is_enabled(self) -> bool:
        return False

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, optimizer: Any) -> None:
        pass

    def get_scale(self) -> float:
        return 1.0

    def state_dict(self) -> None:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class Precision:
    """How a step computes: `autocast()` opens the context of each forward pass; `scaler` keeps fp16 gradients in range."""

    name: str
    autocast: Callable[[], AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler | NoScaler


def precision(name: str, *, device: torch.device) -> Precision:
    """fp32 and tf32 compute in float32; bf16 and fp16 by autocast, with weights and optimizer in float32."""
    if name not in HALVES:
        return Precision(name, nullcontext, NoScaler())
    scaler = torch.amp.GradScaler(device.type) if name == "fp16" else NoScaler()
    return Precision(name, lambda: torch.autocast(device.type, HALVES[name]), scaler)


def set_switches(
    device: torch.device,
    *,
    precision: str,
    deterministic: bool,
    num_threads: int | None = None,
    memory_fraction: float | None = None,
    cudnn_benchmark: bool = True,
) -> None:
    """Sets what torch keeps per process, each switch both ways, so that a run does not inherit the one before it."""
    if device.type == "cuda":
        # torch looks once a process, at its first product: a deterministic run after another would be refused (32 MiB)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    set_float32(is_tf32=precision == "tf32")
    if device.type == "cpu":
        torch.set_num_threads(num_threads or automatic_threads())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.deterministic = deterministic
        torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
        torch.cuda.set_per_process_memory_fraction(memory_fraction or 1.0, device)
        torch.cuda.reset_peak_memory_stats(device)
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # about_precision() says it, with what to write
    elif device.type == "mps":
        usual = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", MPS_MEMORY_FRACTION))
        torch.mps.set_per_process_memory_fraction(memory_fraction or usual)
    elif device.type != "cpu":
        torch.accelerator.set_device_index(device)
        _told(torch.accelerator.reset_peak_memory_stats, device)


def set_float32(*, is_tf32: bool) -> None:
    """Whether products of float32 may be TF32, of matrices, convolutions and recurrent layers alike, whatever was set before.

    torch has two interfaces, and reading one raises where the other alone has been used; Inductor and torch.export read the
    first one. So it is that one, by which torch sets both for each operation; and what the second one (from torch 2.9 on)
    has above the operations, and hands down to them, is taken back to nothing, as torch begins.
    """
    for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
        if hasattr(backend, "fp32_precision"):
            backend.fp32_precision = "none"  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32


def about_precision(device: torch.device, precision: str) -> str:
    """What a person is told of a precision on a device, with what to write; "" for nothing. Tensor cores take float32 as
    TF32, six times as fast on an H100 by NVIDIA's figures."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < AMPERE:
        return ""
    said = {
        "fp32": "fp32 leaves the tensor cores idle: train.precision=tf32 or train.precision=bf16 takes them",
        "tf32": "tf32 rounds what is multiplied to 10 bits, and takes the tensor cores: train.precision=fp32 keeps 23",
    }
    return said.get(precision, "")


def lay_out(model: nn.Module, *, device: torch.device, precision: str, settings: Mapping[str, Any]) -> str:
    """Puts a model's weights in the order that suits the device, and says which, where that is no matter of course; and has
    its linear layers multiply by the library that suits it.

    settings: of this kind of device, conf/base.yaml's backends. Raises: RunnerError for what can't be had here.
    """
    if device.type == "cpu":
        take_onednn(model, asked=settings.get("onednn"))
    asked = settings.get("channels_last")
    channels_last, why = takes_channels_last(model, device=device, precision=precision, asked=asked)
    if channels_last:
        for tensor in (*model.parameters(), *model.buffers()):  # the batches need not be changed
            if tensor.dim() == 4:  # Module.to() would want it of 5 dimensions too, which have no such order
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return f"channels {'last' if channels_last else 'first'} ({why})" if why else ""


def takes_channels_last(
    model: nn.Module, *, device: torch.device, precision: str, asked: bool | None
) -> tuple[bool, str]:
    """Whether a model's 2-d convolutions keep their channels last in memory, and why, where a person is told.

    asked: None for automatic. A step then takes 0.80 (2 layers, 8x8 pixels) to 0.88 (2 layers, 32x32) of the time on a
    CPU in float32, 0.84 of a ResNet-18's (1 thread, medians of 3, 2026-11). On CUDA it is tensor cores that want it, so
    not in plain float32; that is NVIDIA's word, and was not measured here. On MPS BatchNorm is wrong then (pytorch#175189).
    Raises: RunnerError where it would overwrite memory.
    """
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False, ""
    layer = overruns(model) if device.type == "cpu" else ""
    if asked and layer:
        problem = f"oneDNN overwrites memory in the backward pass of {layer} then: a 1x1 convolution with a stride and few inputs"
        fix = f"backends.cpu.channels_last=null; or {SAFE_INPUTS} inputs or more in that layer"
        raise RunnerError(Problem("backends.cpu.channels_last=true", f"{problem} (oneDNN's issue 6035)", fix))
    if asked is not None:
        return asked, "as asked" if asked else ""
    if layer:
        return False, f"auto: oneDNN overwrites memory in {layer} otherwise"
    on = device.type == "cpu" or (device.type == "cuda" and precision != "fp32")
    return on, "auto: it has 2-d convolutions" if on else ""


def overruns(model: nn.Module) -> str:
    """The first layer whose backward pass overwrites memory on a CPU where channels lie last; "" where none does.

    A 1x1 convolution with a stride and fewer inputs than a block of oneDNN's has (8 with AVX2, 16 with AVX-512): wrong
    gradients, "corrupted size vs. prev_size", a segmentation fault or a hang (uxlfoundation/oneDNN#6035, torch 2.13;
    with 2 to 7 inputs each of 55 cases ended so on AVX2, with 1 or 8 none of 112). Compiled, torch lays channels last itself.
    """
    for name, layer in model.named_modules():
        is_small = isinstance(layer, nn.Conv2d | nn.Conv3d) and 1 < layer.in_channels // layer.groups < SAFE_INPUTS
        if is_small and set(layer.kernel_size) == {1} and set(layer.stride) != {1}:
            return name or type(layer).__name__
    return ""


def automatic_threads(num_processes: int = 1) -> int:
    """Threads of a training on the CPU whose work nobody knows: all but one, which is left to the process that publishes;
    shared by its processes.

    A core that two share stalls every parallel kernel at its end: with both cores of a busy machine a small MLP took 68
    steps a second, with one of them over 1,000 (2 cores, 2026-11). OMP_NUM_THREADS, where it is set, is obeyed.
    """
    has_others = sys.platform == "darwin" and platform.machine() == "arm64"  # torch counts the fast cores alone there
    free = THREADS if has_others else THREADS - 1
    return THREADS if "OMP_NUM_THREADS" in os.environ else max(1, free // num_processes)


def limit_threads(most: int) -> None:
    """Says how many this process may take of the cores, where others compute beside it."""
    global THREADS
    THREADS = min(THREADS, most)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch on every device; weights and permutations draw from CPU generators only."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generator_states(device: torch.device) -> dict[str, Any]:
    """Returns the state of every generator, as tensors and plain values; does not wait for the device."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *(float(value) for value in rest)],
        "cpu": torch.get_rng_state(),
    }
    if (module := _module_with(device, "get_rng_state")) is not None:
        states["device"] = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restores every generator; that of another kind of device keeps its seed."""
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(states["cpu"])
    if "device" in states and (module := _module_with(device, "set_rng_state")) is not None:
        state = states["device"]
        module.set_rng_state(*((state,) if device.type == "mps" else (state, device)))


def peak_memory(device: torch.device) -> tuple[int, str]:
    """What the run took at most, in bytes, and whose number it is: MPS keeps no peak."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocator, at most"
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver, at the end"
    if device.type != "cpu" and (told := _told(torch.accelerator.max_memory_allocated, device)) is not None:
        return int(told), "allocator, at most"
    try:
        import resource  # POSIX only
    except ImportError:
        import psutil

        return int(psutil.Process().memory_info().rss), "process, at the end"
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if os.uname().sysname == "Darwin" else peak * 1024, "process, at most"  # bytes on macOS, KiB elsewhere


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's own error, or a RuntimeError of those who say it in words."""
    is_one = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return is_one or isinstance(error, torch.OutOfMemoryError)


def use_in_thread(device: torch.device) -> None:
    """The device is this thread's current one: another thread's is the first GPU, and an event asked there makes a context
    of some 500 MB on it."""
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device)


def empty_cache(device: torch.device) -> None:
    """Gives back what the allocator keeps, so that pieces of another size find room. Waits for the device."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type != "cpu":
        _told(lambda _: torch.accelerator.empty_cache(), device)


def free_memory_bytes(device: torch.device, *, memory_fraction: float | None = None) -> int | None:
    """Return the memory that this process can still use on the device; None if the device can't be asked.

    On CUDA that includes what torch's allocator holds in reserve.

    Args:
        memory_fraction: Maximum part of the GPU's memory for this process.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return min(host_memory.own_part(free), int(total * (memory_fraction or 1.0)))
    if device.type == "mps":
        import psutil

        recommended = int(torch.mps.recommended_max_memory() * (memory_fraction or 1.0))
        left = max(0, recommended - torch.mps.driver_allocated_memory())
        return min(left, int(psutil.virtual_memory().available))  # of the whole machine: others hold some of it
    if device.type != "cpu":
        told = _told(torch.accelerator.get_memory_info, device)
        return None if told is None else int(told[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _told(ask: Callable[[torch.device], Any], device: torch.device) -> Any:
    try:
        return ask(device)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def _module_with(device: torch.device, name: str) -> Any:
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, name) else None
