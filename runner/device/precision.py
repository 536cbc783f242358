"""Says which precisions a device of a machine computes in, and refuses one that it does not (train.precision). Pure."""

from __future__ import annotations

import re

from runner.device.hardware import Hardware
from runner.device.unavailable import OLDEST_MACOS
from runner.errors import Problem, RunnerError

#: what has bf16 and tf32 in its arithmetic units: NVIDIA's Ampere and later
AMPERE = (8, 0)
SCALED_ON_MPS = (2, 8)
#: what to write for each, in order, as far as the device does it
NEAREST = {"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "tf32": ("fp32",)}


def precisions(device: str, hardware: Hardware) -> dict[str, str]:
    """Each precision with "" if the device does it, else why it does not."""
    kind = device.partition(":")[0]
    answers = dict.fromkeys(("fp32", "bf16", "fp16", "tf32"), "")
    if kind == "cuda":
        capability = hardware.cuda[int(device.partition(":")[2] or 0)].capability
        if hardware.hip_build is not None:
            answers["tf32"] = "tf32 is NVIDIA's"
        elif capability is not None and capability < AMPERE:
            old = f"it takes compute capability 8.0, and {device} has {capability[0]}.{capability[1]}"
            answers |= {"bf16": old, "tf32": old}
    else:
        if kind == "mps" and (0,) < _version(hardware.macos) < (OLDEST_MACOS,):  # torch turns autocast off, and warns
            answers["bf16"] = f"bf16 on mps takes macOS {OLDEST_MACOS}, and this is {hardware.macos}"
        if kind == "mps" and _version(hardware.torch_version) < SCALED_ON_MPS:
            answers["fp16"] = "torch before 2.8 can't scale gradients on mps (pytorch#142397)"
        if kind == hardware.other_kind:
            untold = f"the package of {kind} has not told torch's autocast of it"
            answers |= {name: untold for name in ("bf16", "fp16") if name not in hardware.other_halves}
        answers["tf32"] = "tf32 is of NVIDIA GPUs, compute capability 8.0 and up"
    return answers


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def check_precision(precision: str, device: str, hardware: Hardware) -> str:
    """The same; and what `auto` is there: tf32 where tensor cores take float32 as that, with its range and 10 bits, else fp32.

    Raises: RunnerError where the device does not compute in it, with the nearest one that it does."""
    answers = precisions(device, hardware)
    if precision == "auto":
        return "fp32" if answers["tf32"] else "tf32"
    if why := answers[precision]:
        near = next(name for name in NEAREST[precision] if not answers[name])
        does = ", ".join(name for name, no in answers.items() if not no)
        fix = f"train.precision={near}"
        raise RunnerError(Problem(f"train.precision={precision} on {device}", f"{why}; it does {does}", fix))
    return precision
