"""Turn the result of a simulation into a verdict with reasons, for plan.json and as text.

request() is the input of worker.py.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.text import Text

from runner.device import parse, precisions
from runner.device.host_memory import size_in_words
from runner.experiment.terminal import Terminal
from runner.inspection.findings import CERTAIN, ESTIMATE, Finding
from runner.tasks.metric_names import named_in
from runner.tools.plan import device_catalogue
from runner.tools.plan.planned_device import PlannedDevice

#: usable part of a device's memory: the context, workspaces of libraries and fragmentation take the rest
USABLE = 0.9
RUNS, RUNS_NOT, UNKNOWN = "would run", "would not run", "can't be told"
LIMITS = {
    "arithmetic": "compute_seconds",
    "memory bandwidth": "memory_seconds",
    "copies to the device": "copy_seconds",
    "launches": "launch_seconds",
}
STYLES = {"certain": "bold red", "likely": "yellow", "estimate": "cyan"}
KINDS = {"attribute": "plain attribute", "list": "tensor of hidden module", "batch": "batch field"}


def request(cfg: DictConfig, target: PlannedDevice, *, seconds: float) -> dict[str, Any]:
    """Return the worker's input. seconds: To search for the largest batch sizes."""
    gpu = target.hardware.devices()[target.device]
    num = num_processes(cfg, target)
    own = copy.deepcopy(cfg)  # with one process's rows of a batch
    own.train.batch_size = -(-cfg.train.batch_size // num)
    if num > 1:
        evaluated = cfg.train.eval_batch_size or cfg.train.batch_size
        own.train.eval_batch_size = evaluated if named_in(cfg.task) else -(-evaluated // num)
    return {
        "yaml": OmegaConf.to_yaml(own),
        "processes": {"num_processes": num, "in_parts": cfg.placement.strategy == "fsdp"},
        "device": target.device,
        "machine": {
            "name": gpu.name,
            "total_bytes": target.memory_bytes or 2**40,
            "used_bytes": 0,
            "capability": target.capability or (8, 0),
            "num_devices": max(1, len(target.hardware.cuda)),
        },
        "speeds": asdict(target.speeds),
        "precisions": [name for name, no in precisions(target.device, target.hardware).items() if not no],
        "usable_bytes": usable_bytes(cfg, target),
        "seconds": seconds,
    }


def num_processes(cfg: DictConfig, target: PlannedDevice) -> int:
    """Return how many processes would train together, also on missing devices."""
    count = OmegaConf.select(cfg, "train.num_processes", default=1)
    if count != "auto":
        return int(count)
    kind = target.device.partition(":")[0]
    if kind == "cpu" or parse(cfg.device) != ("all",):
        return 1
    return sum(name.partition(":")[0] == kind for name in target.hardware.devices())


def usable_bytes(cfg: DictConfig, target: PlannedDevice) -> int | None:
    """Return the memory that a step may use; None: unknown."""
    if target.memory_bytes is None:
        return None
    kind = target.device.partition(":")[0]
    fraction = OmegaConf.select(cfg, f"backends.{kind}.memory_fraction")
    return int(target.memory_bytes * min(USABLE, fraction or 1.0))


def report(
    name: str, cfg: DictConfig, target: PlannedDevice, answer: dict[str, Any], *, seconds: float
) -> dict[str, Any]:
    """Return one plan in the form of plan.json."""
    kind = target.device.partition(":")[0]
    findings = [Finding(**found) for found in answer["findings"]]
    memory, step, num = answer.get("memory"), answer.get("step"), num_processes(cfg, target)
    sizes = {name: size and size * num for name, size in answer.get("largest_batch_size", {}).items()}
    usable, has_own_loader = usable_bytes(cfg, target), answer.get("has_own_loader", False)
    batch_size = step["batch_size"] if step and (num == 1 or has_own_loader) else cfg.train.batch_size
    fits = None
    if memory is not None and answer["is_whole"]:
        memory["usable_bytes"] = usable
        memory["fits_on"] = device_catalogue.fits(memory["peak_bytes"], kind=kind, share=USABLE)
        if usable is not None:
            fits = memory["peak_bytes"] <= usable
            if memory["step_bytes"] > usable:
                help_ = _what_fits(cfg, sizes, batch_size, has_own_loader=has_own_loader, num_processes=num)
                if recompute := answer.get("recompute"):
                    help_.insert(0, f"train.recompute=[{recompute}] (the same numbers, a longer backward pass)")
                if memory["parts"].get("data set", 0) > usable / 4:
                    help_.append("data.residency=stream")
                findings.append(_too_big("a step", memory["step_bytes"], usable, help_))
            if (memory["evaluation_bytes"] or 0) > usable:
                help_ = ["a smaller train.eval_batch_size"]
                findings.append(_too_big("an evaluation", memory["evaluation_bytes"], usable, help_))
    if step is not None:
        step |= _time(step, target)
    verdict = RUNS if not answer["unknown"] else UNKNOWN
    if fits is False or any(finding.grade == CERTAIN for finding in findings):
        verdict = RUNS_NOT
    residency = answer.get("residency")
    return {
        "name": name,
        "device": target.device,
        "device_reason": target.choice.reason,
        "verdict": verdict,
        "would_run": verdict == RUNS,
        "unknown": answer["unknown"] or None,
        "fits": fits,
        "recompute": answer.get("recompute"),
        "assumed": {
            "name": target.hardware.devices()[target.device].name,
            "memory_bytes": target.memory_bytes,
            "memory_from": target.memory_from,
            "usable_bytes": usable,
            "speeds_from": target.speeds_from,
            "flops_per_second": target.speeds.flops_per_second,
            "memory_bytes_per_second": target.speeds.memory_bytes_per_second,
        },
        "findings": [asdict(finding) for finding in findings],
        "placement": answer.get("placement", []),
        "memory": memory,
        "largest_batch_size": sizes,
        "step": step,
        "host_reads": answer.get("host_reads", []),
        "num_parameters": answer.get("num_parameters"),
        "unfollowed": answer.get("unfollowed", []),
        "residency": residency.partition(" (")[0] if residency and target.memory_bytes is None else residency,
        "precision": cfg.train.precision,
        "batch_size": batch_size,
        "num_processes": num,
        "seconds": seconds,
    }


def _what_fits(
    cfg: DictConfig, sizes: dict[str, int | None], batch_size: int, *, has_own_loader: bool, num_processes: int
) -> list[str]:
    text = "batch_size={} in your DataLoader" if has_own_loader else "train.batch_size={}"
    own = sizes.get(cfg.train.precision) or 0
    found = [text.format(own)] if own else []
    halves = [(name, sizes.get(name) or 0) for name in ("bf16", "fp16")]
    better = [f"train.precision={name} {text.format(min(size, batch_size))}" for name, size in halves if size > own]
    found += better[:1]
    if num_processes > 1 and cfg.placement.strategy == "ddp":
        found.append("placement.strategy=fsdp")
    return found


def _too_big(what: str, num_bytes: int, usable: int, help_: Sequence[str]) -> Finding:
    text = f"{what} takes {size_in_words(num_bytes)}, and {size_in_words(usable)} are there to be used"
    return Finding(ESTIMATE, "memory", text, write=" or ".join(help_) or "a smaller model, or another device")


def _time(step: dict[str, Any], target: PlannedDevice) -> dict[str, Any]:
    speeds = target.speeds
    if not speeds.flops_per_second or not speeds.memory_bytes_per_second:
        return {"copy_seconds": None, "launch_seconds": None, "least_seconds": None, "limited_by": None}
    copy_speed, launch = speeds.copy_bytes_per_second, speeds.launch_seconds
    step |= {
        "copy_seconds": step["bytes_moved_to_device"] / copy_speed if copy_speed else None,
        "launch_seconds": step["num_kernels"] * launch if launch else None,
    }
    sides = {side: step[key] for side, key in LIMITS.items() if step[key] is not None}
    least = max(step["roofline_seconds"], step["copy_seconds"] or 0.0, step["launch_seconds"] or 0.0)
    return {"least_seconds": least, "limited_by": max(sides, key=lambda side: sides[side])}


def show(plans: Sequence[dict[str, Any]], written: Path) -> None:
    """Print each plan, and the file."""
    console = Terminal()
    for plan in plans:
        if len(plans) > 1:
            console.print(Text(f"\n{plan['name']}", style="bold"))
        for label, text in _lines(plan):
            console.print(Text.assemble((f"{label:<10}", "dim"), text))
        for finding in (Finding(**found) for found in plan["findings"]):
            console.print(Text.assemble((f"{finding.grade:<10}", STYLES[finding.grade]), str(finding)))
    console.print(Text(f"{'written':<10}{written}"))


def memory_lines(plan: dict[str, Any]) -> list[str]:
    """Return the memory of a plan's step and the batch sizes that fit, as lines of text."""
    return [f"{label:<8}{text}" for label, text in _memory(plan) if label in ("memory", "", "batch")]


def _lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    assumed = plan["assumed"]
    lines = [("device", f"{plan['device']} ({plan['device_reason']})")]
    if plan["num_processes"] > 1:
        rows = -(-plan["batch_size"] // plan["num_processes"])
        lines.append(("", f"one of {plan['num_processes']} processes, with {rows:,} rows of each batch"))
    memory = size_in_words(assumed["memory_bytes"]) if assumed["memory_bytes"] else "memory"
    lines.append(("assumed", f"{memory}: {assumed['memory_from']}; speed: {assumed['speeds_from']}"))
    reason = f": {plan['unknown']}" if plan["unknown"] and plan["verdict"] != RUNS else ""
    lines.append(("verdict", plan["verdict"] + reason))
    if plan["unfollowed"] and plan["verdict"] == RUNS:
        lines.append(("but", f"values are read at {', '.join(plan['unfollowed'])}: what they decide is not known here"))
    lines += _memory(plan)
    if plan["step"] is not None:
        lines += _step(plan)
    if plan["placement"]:
        counts = Counter((item["device"], KINDS.get(item["kind"], item["kind"])) for item in plan["placement"])
        on_device: dict[str, list[str]] = {}
        for (device, kind), count in counts.items():
            on_device.setdefault(device, []).append(f"{count} {kind}{'s' if count > 1 else ''}")
        lines.append(("tensors", "; ".join(f"on {device}: {', '.join(kinds)}" for device, kinds in on_device.items())))
    return lines


def _memory(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory = plan["memory"]
    if memory is None:
        return []
    share = ""
    if usable := memory.get("usable_bytes"):
        share = f" of {size_in_words(usable)} to be used ({memory['peak_bytes'] / usable:.0%})"
    lines = [
        ("memory", f"{size_in_words(memory['peak_bytes'])} at most{share}, in {memory['peak_phase']}"),
        ("", ", ".join(f"{name} {size_in_words(count)}" for name, count in memory["parts"].items())),
    ]
    if plan["fits"] is None and memory.get("fits_on"):
        lines.append(("fits on", ", ".join(memory["fits_on"][:4])))
    if sizes := plan["largest_batch_size"]:
        texts = {None: "not found in time", 0: "none"}
        largest = ", ".join(f"{texts.get(size) or format(size, ',')} ({name})" for name, size in sizes.items())
        lines.append(("batch", f"{plan['batch_size']:,} in {plan['precision']}; the largest that fits: {largest}"))
    if plan["residency"]:
        lines.append(("data", plan["residency"]))
    return lines


def _step(plan: dict[str, Any]) -> list[tuple[str, str]]:
    step = plan["step"]
    moved = size_in_words(step["bytes_moved_to_device"]) if step["bytes_moved_to_device"] else "nothing"
    work = f"{_short(step['flops'])}FLOP in {step['num_kernels']:,} kernels"
    traffic = f"{size_in_words(step['touched_bytes'])} read and written: {step['arithmetic_intensity']:.1f} FLOP a byte"
    lines = [("step", f"{work}, {traffic}; {moved} moved to the device")]
    if step["least_seconds"] is not None:
        lines.append(("time", f"{step['least_seconds'] * 1e3:.3g} ms at least; limited by {step['limited_by']}"))
    reads = len(plan["host_reads"])
    lines.append(("reads", f"{reads} of the device, below" if reads else "the step reads nothing of the device"))
    return lines


def _short(count: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g} "
