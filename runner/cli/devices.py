"""`devices`: what this machine has, what it lacks and why, and what `auto` takes."""

from __future__ import annotations

from typing import Any

from runner.command import Arguments
from runner.device import Gpu, Hardware, choose, diagnose, precisions, probe
from runner.device.hardware import GIB
from runner.device.unavailable import why_not
from runner.experiment.terminal import Terminal, text_table

#: rows of the table of `--bench` by the keys of the figures; a figure of several kinds has a row for each
ROWS = {
    "matmul_tflops": "large product, {}, TFLOP/s",
    "memory_gb_per_s": "memory (y += a x), GB/s",
    "memcpy_gb_per_s": "memcpy, GB/s",
    "copy_to_device_gb_per_s": "copy to the device, {}, GB/s",
    "copy_from_device_gb_per_s": "copy from the device, {}, GB/s",
    "launch_us": "one launch, us",
    "host_read_us": "one launch and a host read, us",
}


def show(arguments: Arguments) -> tuple[int, dict[str, Any]]:
    """Print the devices and, with --bench, how fast each is, about 10 seconds each."""
    hardware = diagnose(probe())
    facts = describe(hardware)
    print_devices(facts)
    if not arguments["--bench"]:
        return 0, facts
    from runner.device.benchmark import bench  # torch, as soon as it is imported

    facts["bench"] = bench(hardware)
    print_bench(facts["bench"])
    return int(not facts["bench"]["devices"]), facts


def describe(hardware: Hardware) -> dict[str, Any]:
    """Return the machine as plain values: devices, missing, auto, torch, platform."""
    devices = [_device(name, gpu, hardware) for name, gpu in hardware.devices().items()]
    kinds = {item["device"].partition(":")[0] for item in devices}
    reasons = {kind: why_not(kind, hardware) for kind in ("cuda", "mps", "xpu") if kind not in kinds}
    auto = choose("auto", hardware)
    return {
        "devices": devices,
        "missing": [{"device": kind, "cause": why.cause, "mend": why.fix} for kind, why in reasons.items() if why],
        "auto": {"device": auto.device, "reason": auto.reason},
        "torch": hardware.torch_version,
        "platform": f"{hardware.system} {hardware.macos or hardware.machine}",
    }


def _device(name: str, gpu: Gpu, hardware: Hardware) -> dict[str, Any]:
    why = why_not(name, hardware)
    return {
        "device": name,
        "name": gpu.name,
        "usable": why is None,
        "why_not": f"{why.cause}; {why.fix}" if why else None,
        "total_bytes": gpu.total_bytes,
        "free_bytes": gpu.free_bytes,
        "capability": ".".join(map(str, gpu.capability)) if gpu.capability else None,
        "precisions": [precision for precision, no in precisions(name, hardware).items() if not no],
    }


def print_devices(facts: dict[str, Any]) -> None:
    console = Terminal(soft_wrap=False)
    rows = []
    for each in facts["devices"]:
        sizes = map(_gib, (each["free_bytes"], each["total_bytes"]))
        rows.append((each["device"], each["name"], *sizes, " ".join(each["precisions"])))
    console.print(text_table(("device", "name", "free", "of", "precisions"), rows, right=(2, 3)))
    unusable = [each for each in facts["devices"] if each["why_not"]]
    lines = [f"[bold]{each['device']} is not usable[/]: {each['why_not']}" for each in unusable]
    lines += [f"[bold]no {each['device']}[/]: {each['cause']}; to have it: {each['mend']}" for each in facts["missing"]]
    auto = facts["auto"]
    lines.append(f"\ndevice=auto takes [bold]{auto['device']}[/] ({auto['reason']})")
    lines.append(f"torch {facts['torch']}, {facts['platform']}")
    for line in lines:
        console.print(line, soft_wrap=True)


def print_bench(facts: dict[str, Any]) -> None:
    """Print a row for each figure of each device, then remarks."""
    rows = []
    for name, device in facts["devices"].items():
        for key, label in ROWS.items():
            values = device.get(key, {})
            kinds = values if isinstance(values, dict) else {"": values}
            rows += [(name, label.format(kind), figure(value)) for kind, value in kinds.items()]
    console = Terminal(soft_wrap=False)
    console.print("", text_table(("device", "measured", "median"), rows, right=(2,)), "", sep="\n")
    lines = [f"{name} was not measured: {why}" for name, why in facts["failed"].items()]
    if rows:
        threads = f"{facts['num_threads']} thread{'s' * (facts['num_threads'] != 1)}"
        lines.append(f"the CPU with {threads}, the maximum of a run")
    lines.append(f"not kept: {facts['not_kept']}" if facts["not_kept"] else f"kept     {facts['kept']}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def figure(value: float) -> str:
    """Write a number with three significant digits; large ones whole, without an exponent."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / GIB:.1f} GiB"
