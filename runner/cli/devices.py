"""Prints the table of `python -m runner devices`, or gives the same as plain values; measures, if asked."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from runner.device import Gpu, Hardware, choose, diagnose, precisions, probe
from runner.device.hardware import GIB
from runner.device.unavailable import why_not
from runner.experiment.terminal import Terminal


def show(*, measured: bool = False) -> dict[str, Any]:
    """Prints what this machine has, what it lacks and why, and what `auto` takes. Asks the driver, about 0.1 s.

    measured: and how fast each device is, some 10 s each. Returns describe()'s values, and those in `bench`.
    """
    hardware = diagnose(probe())
    facts = describe(hardware)
    _print(facts)
    if measured:
        from runner.device.benchmark.measure import bench, print_bench  # torch, as soon as it is imported

        facts["bench"] = bench(hardware)
        print_bench(facts["bench"], Terminal(soft_wrap=False))
    return facts


def describe(hardware: Hardware) -> dict[str, Any]:
    """The machine as plain values: devices, missing, auto, torch, platform."""
    devices = [_device(name, gpu, hardware) for name, gpu in hardware.devices().items()]
    there = {item["device"].partition(":")[0] for item in devices}
    whys = {kind: why_not(kind, hardware) for kind in ("cuda", "mps", "xpu") if kind not in there}
    auto = choose("auto", hardware)
    return {
        "devices": devices,
        "missing": [{"device": kind, "cause": why.cause, "mend": why.mend} for kind, why in whys.items() if why],
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
        "why_not": f"{why.cause}; {why.mend}" if why else None,
        "total_bytes": gpu.total_bytes,
        "free_bytes": gpu.free_bytes,
        "capability": ".".join(map(str, gpu.capability)) if gpu.capability else None,
        "precisions": [precision for precision, no in precisions(name, hardware).items() if not no],
    }


def _print(facts: dict[str, Any]) -> None:
    console = Terminal(soft_wrap=False)
    console.print(_table(facts["devices"]))
    for item in facts["devices"]:
        if not item["usable"]:
            console.print(f"[bold]{item['device']} is not usable[/]: {item['why_not']}", soft_wrap=True)
    for missing in facts["missing"]:
        console.print(
            f"[bold]no {missing['device']}[/]: {missing['cause']}; to have it: {missing['mend']}", soft_wrap=True
        )
    auto = facts["auto"]
    console.print(f"\ndevice=auto takes [bold]{auto['device']}[/] ({auto['reason']})", soft_wrap=True)
    console.print(f"torch {facts['torch']}, {facts['platform']}", soft_wrap=True)


def _table(devices: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("device", "name", "free", "of", "precisions"):
        table.add_column(heading, justify="right" if heading in ("free", "of") else "left", overflow="fold")
    for item in devices:
        free, total = _gib(item["free_bytes"]), _gib(item["total_bytes"])
        table.add_row(item["device"], item["name"], free, total, " ".join(item["precisions"]))
    return table


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / GIB:.1f} GiB"
