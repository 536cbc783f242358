"""Judges what was found on the simulated device: a verdict and its reasons, as plan.json has them. Pure.

Called by command.py; request() is what worker.py is asked.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.device import parse, precisions
from runner.device.host_memory import size_in_words
from runner.inspection.findings import CERTAIN, ESTIMATE, Finding
from runner.plan import device_catalogue
from runner.plan.planned_device import Target
from runner.tasks.metric_names import asked_metrics

#: of a device's memory: a context, the libraries' workspaces and fragmentation take the rest
USABLE = 0.9
RUNS, RUNS_NOT, UNKNOWN = "would run", "would not run", "can't be told"
LIMITS = {
    "arithmetic": "compute_seconds",
    "memory bandwidth": "memory_seconds",
    "copies to the device": "copy_seconds",
    "launches": "launch_seconds",
}


def request(cfg: DictConfig, target: Target, *, seconds: float) -> dict[str, Any]:
    """What the child has to know. seconds: for the largest batch sizes; with none it takes two steps, and does not evaluate."""
    kind = target.device.partition(":")[0]
    total = target.memory_bytes or 2**40
    gpu = target.hardware.devices()[target.device]
    num = num_processes(cfg, target)
    own = copy.deepcopy(cfg)  # of a batch, one process's rows
    own.train.batch_size = -(-cfg.train.batch_size // num)
    if num > 1:
        evaluated = cfg.train.eval_batch_size or cfg.train.batch_size
        own.train.eval_batch_size = -(-evaluated // num) if _shares_evaluation(cfg, num) else evaluated
    return {
        "yaml": OmegaConf.to_yaml(own),
        "processes": {"num_processes": num, "in_parts": cfg.placement.strategy == "fsdp"},
        "device": target.device,
        "machine": {
            "name": gpu.name,
            "total_bytes": total,
            "used_bytes": 0,
            "capability": target.capability or (8, 0),
            "num_devices": max(1, len(target.hardware.cuda)),
        },
        "speeds": {
            "flops_per_second": target.flops_per_second,
            "memory_bytes_per_second": target.memory_bytes_per_second,
            "copy_bytes_per_second": target.copy_bytes_per_second,
            "launch_seconds": target.launch_seconds,
        },
        "precisions": [name for name, no in precisions(target.device, target.hardware).items() if not no],
        "usable_bytes": usable_bytes(cfg, target, kind),
        "seconds": seconds,
        "is_brief": not seconds,
    }


def num_processes(cfg: DictConfig, target: Target) -> int:
    """That would train together, whether their devices are here or not."""
    count = OmegaConf.select(cfg, "train.num_processes", default=1)
    if count != "auto":
        return int(count)
    kind = target.device.partition(":")[0]
    if kind == "cpu" or parse(cfg.device) != ("all",):
        return 1
    return sum(name.partition(":")[0] == kind for name in target.hardware.devices())


def _shares_evaluation(cfg: DictConfig, num: int) -> bool:
    return num > 1 and not asked_metrics(cfg.task)


def usable_bytes(cfg: DictConfig, target: Target, kind: str) -> int | None:
    """What a step may take; None where the memory is not known."""
    if target.memory_bytes is None:
        return None
    fraction = OmegaConf.select(cfg, f"backends.{kind}.memory_fraction")
    return int(target.memory_bytes * min(USABLE, fraction or 1.0))


def report(
    name: str, cfg: DictConfig, target: Target, answer: dict[str, Any], *, fallback: str, seconds: float
) -> dict[str, Any]:
    """One plan, as plan.json has it."""
    kind = target.device.partition(":")[0]
    findings = [Finding(**found) for found in answer["findings"]]
    memory, step, num = answer.get("memory"), answer.get("step"), num_processes(cfg, target)
    sizes = {name: size and size * num for name, size in answer.get("largest_batch_size", {}).items()}
    evaluated = (answer.get("largest_eval_batch_size") or 0) * (num if _shares_evaluation(cfg, num) else 1)
    usable, loaders = usable_bytes(cfg, target, kind), answer.get("own_loaders", [])
    fits = None
    if memory is not None and answer["is_whole"]:
        memory["usable_bytes"] = usable
        fits = None if usable is None else memory["peak_bytes"] <= usable
        memory["fits_on"] = device_catalogue.fits(memory["peak_bytes"], kind=kind, share=USABLE)
        if fits is False:
            if memory["step_bytes"] > (usable or 0):
                own = step["batch_size"] if step and "train" in loaders else None
                more = {"recompute": answer.get("recompute"), "own_batch_size": own}
                findings.append(_too_big(memory, usable or 0, cfg, sizes, num, **more))
            if (memory["evaluation_bytes"] or 0) > (usable or 0):
                is_own = bool({"val", "test"} & set(loaders))
                findings.append(_evaluation_too_big(memory, usable or 0, evaluated, is_own=is_own))
    if step is not None:
        step |= _time(step, target)
    verdict = _verdict(findings, fits=fits, unknown=answer["unknown"])
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
            "flops_per_second": target.flops_per_second,
            "memory_bytes_per_second": target.memory_bytes_per_second,
        },
        "findings": [asdict(finding) for finding in findings],
        "placement": answer.get("placement", []),
        "memory": memory,
        "largest_batch_size": sizes,
        "largest_eval_batch_size": evaluated or None,
        "step": step,
        "host_reads": answer.get("host_reads", []),
        "num_parameters": answer.get("num_parameters"),
        "unfollowed": answer.get("unfollowed", []),
        "residency": _residency(answer, target),
        "precision": cfg.train.precision,
        "batch_size": step["batch_size"] if step and (num == 1 or "train" in loaders) else cfg.train.batch_size,
        "num_processes": num,
        "fallback": fallback or None,
        "seconds": seconds,
    }


def _residency(answer: dict[str, Any], target: Target) -> str | None:
    found: str | None = answer.get("residency")
    return found.partition(" (")[0] if found and target.memory_bytes is None else found


def _verdict(findings: list[Finding], *, fits: bool | None, unknown: str) -> str:
    if fits is False or any(finding.grade == CERTAIN for finding in findings):
        return RUNS_NOT
    return UNKNOWN if unknown else RUNS


def _too_big(
    memory: dict[str, Any],
    usable: int,
    cfg: DictConfig,
    sizes: dict[str, int | None],
    num_processes: int,
    *,
    recompute: str | None,
    own_batch_size: int | None,
) -> Finding:
    asked = cfg.train.batch_size if own_batch_size is None else own_batch_size
    words = "train.batch_size={}" if own_batch_size is None else "batch_size={} in your DataLoader"
    own = cfg.train.precision
    writes = [f"train.recompute=[{recompute}] (the same numbers, a longer backward pass)"] if recompute else []
    if sizes.get(own):
        writes.append(words.format(sizes[own]))
    writes += [
        f"train.precision={name} {words.format(min(size, asked))}"
        for name, size in sizes.items()
        if name in ("bf16", "fp16") and size and size > (sizes.get(own) or 0)
    ][:1]
    if memory["parts"].get("data set", 0) > usable / 4:
        writes.append("data.residency=stream")
    if num_processes > 1 and cfg.placement.strategy == "ddp":
        writes.append("placement.strategy=fsdp")
    what = f"a step takes {size_in_words(memory['step_bytes'])}, and {size_in_words(usable)} are there to be used"
    return Finding(ESTIMATE, "memory", what, write=" or ".join(writes) or "a smaller model, or another device")


def _evaluation_too_big(memory: dict[str, Any], usable: int, size: int, *, is_own: bool) -> Finding:
    taken = size_in_words(memory["evaluation_bytes"])
    what = f"an evaluation takes {taken}, and {size_in_words(usable)} are there to be used"
    name, where = ("batch_size", " in your DataLoader") if is_own else ("train.eval_batch_size", "")
    return Finding(ESTIMATE, "memory", what, write=f"{name}={size}{where}" if size else f"a smaller {name}{where}")


def _time(step: dict[str, Any], target: Target) -> dict[str, Any]:
    if not target.flops_per_second or not target.memory_bytes_per_second:
        return {"copy_seconds": None, "launch_seconds": None, "least_seconds": None, "limited_by": None}
    copy, launch = target.copy_bytes_per_second, target.launch_seconds
    step |= {
        "copy_seconds": step["bytes_moved_to_device"] / copy if copy else None,
        "launch_seconds": step["num_kernels"] * launch if launch else None,
    }
    sides = {side: step[key] for side, key in LIMITS.items() if step[key] is not None}
    least = max(step["roofline_seconds"], step["copy_seconds"] or 0.0, step["launch_seconds"] or 0.0)
    return {"least_seconds": least, "limited_by": max(sides, key=lambda side: sides[side])}
