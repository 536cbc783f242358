"""Prints plans for a person: verdict, memory, step, placement, findings. Called by command.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from runner.device.host_memory import size_in_words
from runner.experiment.terminal import Terminal
from runner.inspection.findings import Finding
from runner.plan.report import RUNS

MOST_PLACES = 8  # of tensors that lie elsewhere
STYLES = {"certain": "bold red", "likely": "yellow", "estimate": "cyan"}


def show(plans: Sequence[dict[str, Any]], written: Sequence[Path]) -> None:
    """Prints each plan, and where they are written."""
    console = Terminal()
    for plan in plans:
        if len(plans) > 1:
            console.print(Text(f"\n{plan['name']}", style="bold"))
        for label, text in lines(plan):
            console.print(Text.assemble((f"{label:<10}", "dim" if label else ""), text))
        for found in plan["findings"]:
            finding = Finding(**found)
            console.print(Text.assemble((f"{finding.grade:<10}", STYLES[finding.grade]), str(finding)))
    console.print(Text(f"{'written':<10}{', '.join(map(str, written))}"))


def lines(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said of a plan, but for its findings: a label and a text each."""
    assumed = plan["assumed"]
    found = [("device", f"{plan['device']} ({plan['device_reason']})")]
    if plan["num_processes"] > 1:
        rows = -(-plan["batch_size"] // plan["num_processes"])
        found.append(("", f"one of {plan['num_processes']} processes, with {rows:,} rows of each batch"))
    memory = size_in_words(assumed["memory_bytes"]) if assumed["memory_bytes"] else "memory"
    found.append(("assumed", f"{memory}: {assumed['memory_from']}; speed: {assumed['speeds_from']}"))
    if plan["fallback"]:
        found.append(("but", plan["fallback"]))
    reason = f": {plan['unknown']}" if plan["unknown"] else ""
    found.append(("verdict", plan["verdict"] + (reason if plan["verdict"] != RUNS else "")))
    if plan["unfollowed"] and plan["verdict"] == RUNS:
        found.append(("but", f"values are read at {', '.join(plan['unfollowed'])}: what they decide is not known here"))
    if plan["memory"] is not None:
        found += _memory(plan)
    if plan["step"] is not None:
        found += _step(plan)
    if plan["placement"]:
        found += _placement(plan)
    return found


def memory_lines(plan: dict[str, Any]) -> list[str]:
    """Of a plan, what it takes and what would fit."""
    found = _memory(plan) if plan["memory"] is not None else []
    return [f"{label:<8}{text}" for label, text in found if label in ("memory", "", "batch")]


def _memory(plan: dict[str, Any]) -> list[tuple[str, str]]:
    memory = plan["memory"]
    share = ""
    if memory.get("usable_bytes"):
        share = f" of {size_in_words(memory['usable_bytes'])} to be used ({memory['peak_bytes'] / memory['usable_bytes']:.0%})"
    found = [
        ("memory", f"{size_in_words(memory['peak_bytes'])} at most{share}, in {memory['peak_phase']}"),
        ("", _named(memory["parts"])),
    ]
    if plan["fits"] is None and memory.get("fits_on"):
        found.append(("fits on", ", ".join(memory["fits_on"][:4])))
    sizes = plan["largest_batch_size"]
    if sizes:
        texts = [f"{_size(size)} ({name})" for name, size in sizes.items()]
        found.append(
            ("batch", f"{plan['batch_size']:,} in {plan['precision']}; the largest that fits: {', '.join(texts)}")
        )
    if plan["largest_eval_batch_size"]:
        found.append(("batch", f"the largest that can be evaluated: {plan['largest_eval_batch_size']:,}"))
    if plan["residency"]:
        found.append(("data", plan["residency"]))
    return found


def _named(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size_in_words(count)}" for name, count in parts.items())


def _size(size: int | None) -> str:
    if size is None:
        return "not found in time"
    return f"{size:,}" if size else "none"


def _step(plan: dict[str, Any]) -> list[tuple[str, str]]:
    step = plan["step"]
    moved = step["bytes_moved_to_device"]
    work = (
        f"{_short(step['flops'])}FLOP in {step['num_kernels']:,} kernels, {size_in_words(step['touched_bytes'])} read and written: "
        f"{step['arithmetic_intensity']:.1f} FLOP a byte; {size_in_words(moved) if moved else 'nothing'} moved to the device"
    )
    found = [("step", work)]
    if step["least_seconds"] is not None:
        found.append(("time", f"{step['least_seconds'] * 1e3:.3g} ms at least; limited by {step['limited_by']}"))
    reads = len(plan["host_reads"])
    found.append(("reads", "the step reads nothing of the device" if not reads else f"{reads} of the device, below"))
    return found


def _placement(plan: dict[str, Any]) -> list[tuple[str, str]]:
    device = plan["device"] if plan["device"] != "mps" else "mps:0"
    kinds: dict[str, Counter[str]] = {}
    for item in plan["placement"]:
        kinds.setdefault(item["device"], Counter())[KINDS.get(item["kind"], item["kind"])] += 1
    texts = []
    for where, counts in kinds.items():
        several = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.items()]
        texts.append(f"on {where}: {', '.join(several)}")
    found = [("tensors", "; ".join(texts))]
    elsewhere = [item for item in plan["placement"] if item["device"] != device and not plan["fallback"]]
    for item in elsewhere[:MOST_PLACES]:
        found.append(("", f"{item['name']} {tuple(item['shape'])} on {item['device']}"))
    if len(elsewhere) > MOST_PLACES:
        found.append(("", f"and {len(elsewhere) - MOST_PLACES:,} more, in plan.json"))
    return found


KINDS = {
    "attribute": "plain attribute",
    "list": "tensor of hidden module",
    "batch": "batch field",
}


def _short(count: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.3g} "
