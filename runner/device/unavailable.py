"""Finds why a machine lacks a device, or a device a precision, and the fix. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from runner.device.hardware import Driver, Gpu, Hardware
from runner.errors import RunnerError

#: macOS that torch 2.13's MPS needs; its headers gate features from 14 up
OLDEST_MACOS = 14
#: compute capability from which NVIDIA's GPUs have bf16 and tf32 arithmetic
AMPERE = (8, 0)
#: precisions to suggest for each, in order, if the device has them
NEAREST = {"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "tf32": ("fp32",), "fp64": ("fp32",)}
CUDA_WHEELS = "install torch's CUDA build (pytorch.org/get-started/locally)"

#: cause and help of cuInit's return codes (cuda.h)
CU_INIT = {
    34: ("libcuda is the CUDA toolkit's stub, not the driver's", "take the toolkit's stubs out of LD_LIBRARY_PATH"),
    46: ("the GPU is in exclusive mode and another process has it", "end that process, or run `sudo nvidia-smi -c 0`"),
    100: ("the driver finds no GPU", "see that the GPU is in its slot and on in the machine's firmware"),
    101: ("CUDA_VISIBLE_DEVICES names a GPU that is not there", "run `unset CUDA_VISIBLE_DEVICES`"),
    802: ("the GPUs' switch is not ready", "start nvidia-fabricmanager"),
    803: ("the driver's kernel module and its libraries have different versions", "reboot, or load the module again"),
    804: ("CUDA's compatibility libraries do not serve this GPU", "take cuda-compat out of LD_LIBRARY_PATH"),
    999: ("the driver fails with an unknown error", "run `sudo modprobe nvidia_uvm`, or reboot"),
}


@dataclass(frozen=True)
class Why:
    """The cause of a missing device, and the fix."""

    cause: str
    fix: str


def why_not(device: str, hardware: Hardware) -> Why | None:
    """Return why `device` (cpu, cuda[:N], mps, xpu[:N]) can't be used on this machine; None if it can."""
    kind, _, number = device.partition(":")
    check = {"cuda": _cuda, "mps": _mps, "xpu": _xpu}.get(kind)
    return check(int(number or 0), hardware) if check else None


def _cuda(index: int, machine: Hardware) -> Why | None:
    if index < len(machine.cuda):
        return _architecture(machine.cuda[index], machine)
    if machine.cuda:
        return _index(machine)
    if machine.cuda_build is None and machine.hip_build is None:
        return _cpu_only(machine)
    if machine.visible is not None and machine.visible.strip() in ("", "-1", "NoDevFiles"):
        return Why(f"CUDA_VISIBLE_DEVICES={machine.visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if machine.hip_build is not None:
        return Why("torch's ROCm build finds no AMD GPU", "see that rocminfo lists it and that you may open /dev/kfd")
    return _driver(machine, machine.driver or Driver())


def _cpu_only(machine: Hardware) -> Why:
    cause = f"torch {machine.torch_version} is a CPU-only build"
    if machine.system == "darwin":
        return Why(f"{cause}, and a Mac has no CUDA", "`device=mps`")
    driver = machine.driver or Driver()
    if driver.gpu_on_bus or driver.kernel_module:
        return Why(f"{cause}, and there is an NVIDIA GPU in this machine", CUDA_WHEELS)
    return Why(f"{cause}, and this machine shows no NVIDIA GPU either", f"on a machine with one, {CUDA_WHEELS}")


def _driver(machine: Hardware, driver: Driver) -> Why:
    if driver.in_container and (machine.container_visible or "") in ("void", "none"):
        cause = f"the container was started with NVIDIA_VISIBLE_DEVICES={machine.container_visible}"
        return Why(cause, "run `docker run --gpus all`")
    if driver.library_error is not None:
        return _no_library(driver)
    built = (machine.cuda_build or "").split(".")[0]
    if built.isdigit() and driver.cuda is not None and driver.cuda < int(built) * 1000:
        serves = f"{driver.cuda // 1000}.{driver.cuda % 1000 // 10}"
        cause = f"the NVIDIA driver is too old: it serves CUDA up to {serves}, torch was built for {machine.cuda_build}"
        return Why(cause, f"update the driver, or install a torch built for CUDA {serves}")
    if driver.mig and driver.num_gpus == 0:
        fix = "set `CUDA_VISIBLE_DEVICES=MIG-...` with a name from nvidia-smi -L, or make one with nvidia-smi mig -cgi"
        return Why("the GPU is in MIG mode, and this process has no slice of it", fix)
    if driver.init_code and driver.init_code != 100:
        cause, fix = CU_INIT.get(driver.init_code, ("the driver does not start", "see cuda.h for the code, or reboot"))
        return Why(f"{cause} (cuInit gave {driver.init_code})", fix)
    if machine.visible:
        cause = f"CUDA_VISIBLE_DEVICES={machine.visible!r} names no GPU that is there"
        return Why(cause, "unset CUDA_VISIBLE_DEVICES, or take a number from nvidia-smi -L")
    return Why(*CU_INIT[100])


def _no_library(driver: Driver) -> Why:
    if driver.in_container:
        return Why("the NVIDIA driver is not in this container", "run `docker run --gpus all`")
    if driver.in_wsl:
        return Why("WSL has no NVIDIA driver", "install NVIDIA's driver in Windows, and nothing in WSL")
    if driver.kernel_module:
        cause = f"the NVIDIA driver's library does not load ({driver.library_error})"
        return Why(cause, "install the driver's libraries (libcuda.so.1) for its kernel module")
    if driver.gpu_on_bus:
        return Why("there is an NVIDIA GPU and no driver for it", "install NVIDIA's driver")
    cause = "no NVIDIA driver is installed, and no NVIDIA GPU shows"
    return Why(cause, "use a machine with an NVIDIA GPU and its driver")


def _index(machine: Hardware) -> Why:
    last = len(machine.cuda) - 1
    there = "cuda:0" if last == 0 else f"cuda:0 to cuda:{last}"
    has_slices = any("MIG" in gpu.name or gpu.uuid.startswith("MIG") for gpu in machine.cuda)
    if has_slices or (machine.driver and machine.driver.mig):
        fix = "`device=cuda:0`, with the slice in CUDA_VISIBLE_DEVICES"
        return Why("with MIG a process sees one slice, cuda:0", fix)
    if machine.visible:
        cause = f"CUDA_VISIBLE_DEVICES={machine.visible!r} shows {len(machine.cuda)} and numbers them from 0: {there}"
        return Why(cause, f"`device=cuda:{last}`, or add the GPU to CUDA_VISIBLE_DEVICES")
    cause = f"this machine has {len(machine.cuda)} CUDA device{'s' if last else ''}: {there}"
    return Why(cause, f"`device=cuda:{last}`")


def _architecture(gpu: Gpu, machine: Hardware) -> Why | None:
    if gpu.capability is None or not machine.arch_list or machine.hip_build is not None:
        return None
    major, minor = gpu.capability
    here = 10 * major + minor
    for name in machine.arch_list:
        kind, _, digits = name.partition("_")
        number = int(digits.rstrip("af") or 0) if digits.rstrip("af").isdigit() else 0
        if (kind == "sm" and number // 10 == major and number <= here) or (kind == "compute" and 0 < number <= here):
            return None
    kernels = f"torch {machine.torch_version} has kernels for {' '.join(machine.arch_list)}"
    cause = f"{gpu.name} has compute capability {major}.{minor}, and {kernels}"
    return Why(cause, "install a torch build that lists this capability")


def _mps(index: int, machine: Hardware) -> Why | None:
    if machine.mps is not None:
        return Why("a Mac has one GPU", "`device=mps`") if index else None
    if machine.system != "darwin":
        return Why(f"mps is Apple's GPU, and this machine runs {machine.system}", "use a Mac with Apple silicon")
    if machine.rosetta:
        cause = "this Python is an x86 one, under Rosetta on an Apple-silicon Mac"
        return Why(cause, "install an arm64 Python, and torch in it")
    if machine.machine != "arm64":
        return Why("this Mac has an Intel processor", "use a Mac with Apple silicon")
    if not machine.mps_built:
        fix = "install torch's wheel for macOS arm64: `pip install torch`"
        return Why(f"torch {machine.torch_version} was built without MPS", fix)
    if _is_too_old(machine.macos):
        return Why(f"macOS {machine.macos} is too old", f"update to macOS {OLDEST_MACOS} or newer")
    return Why("Metal offers no GPU here", "run outside of the virtual machine or sandbox")


def _is_too_old(macos: str) -> bool:
    version = macos.partition(".")[0]
    return version.isdigit() and int(version) < OLDEST_MACOS


def _xpu(index: int, machine: Hardware) -> Why | None:
    if index < len(machine.xpu):
        return None
    if machine.xpu:
        last = len(machine.xpu) - 1
        return Why(f"this machine has {last + 1} Intel GPU(s), from xpu:0", f"`device=xpu:{last}`")
    if not machine.xpu_built:
        fix = "install torch's XPU build (pytorch.org/get-started/locally)"
        return Why(f"torch {machine.torch_version} was built without Intel GPUs (XPU)", fix)
    return Why("torch finds no Intel GPU", "install Intel's GPU driver, and see that sycl-ls lists the GPU")


def precisions(device: str, hardware: Hardware) -> dict[str, str]:
    """Return each precision with "" if the device computes in it, else the reason why not."""
    kind, _, number = device.partition(":")
    reasons = dict.fromkeys(("fp32", "bf16", "fp16", "tf32"), "")
    if kind != "cuda":
        if kind == "mps" and _is_too_old(hardware.macos):  # torch turns autocast off, and warns
            reasons["bf16"] = f"bf16 on mps takes macOS {OLDEST_MACOS}, and this is {hardware.macos}"
        return {**reasons, "tf32": "tf32 is of NVIDIA GPUs, compute capability 8.0 and up"}
    capability = hardware.cuda[int(number or 0)].capability
    if hardware.hip_build is not None:
        return {**reasons, "tf32": "tf32 is NVIDIA's"}
    if capability is not None and capability < AMPERE:
        old = f"it takes compute capability 8.0, and {device} has {capability[0]}.{capability[1]}"
        return {**reasons, "bf16": old, "tf32": old}
    return reasons


def check_precision(precision: str, device: str, hardware: Hardware) -> str:
    """Return the precision; for `auto` tf32 on tensor cores that have it, else fp32.

    Raises:
        RunnerError: The device does not compute in it. The help has the nearest precision that it has.
    """
    reasons = precisions(device, hardware) | {"fp64": "Metal, and so MPS, has no float64" if device == "mps" else ""}
    if precision == "auto":
        return "fp32" if reasons["tf32"] else "tf32"
    if not reasons[precision]:
        return precision
    available = [name for name, reason in reasons.items() if not reason]
    nearest = next(name for name in NEAREST[precision] if name in available)
    problem = f"{reasons[precision]}; it does {', '.join(available)}"
    raise RunnerError.suggest(f"train.precision={precision} on {device}", problem, [f"train.precision={nearest}"])
