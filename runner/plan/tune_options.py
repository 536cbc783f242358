"""Lists the settings of a run that may make it faster and leave its numbers as they are, and says why some can't. For tune.py.

Every option is tried on top of what has won so far; what the plan shows to win nothing is not tried.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import Dataset

from runner.data.own_loader import OwnLoader
from runner.experiment import rules
from runner.training.parts import Parts

#: of activations, in bytes: a step that keeps less lies in the caches, and a smaller batch would only add calls
FEW_ACTIVATIONS = 8 * 2**20
#: bytes that a kernel reads and writes, on average: what is so little lies in the caches already
FEW_BYTES = 2**18
#: of the forward pass's operations: where recurrent layers have so many, compiling the rest wins nothing
MOSTLY_RECURRENT = 0.9
#: operations of a kernel, on average: with less no second thread is worth being woken (training/cpu_threads.py)
FEW_FLOPS = 2e5
DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout


@dataclass(frozen=True)
class Option:
    """One question. tries: its answers beside the one that holds, as settings by key; why_not: why there are none.

    goes_on: each goes further than the one before, so that after a slower one the rest is left out.
    """

    name: str
    tries: tuple[dict[str, Any], ...] = ()
    why_not: str = ""
    goes_on: bool = False


def options(cfg: DictConfig, parts: Parts, plan: dict[str, Any], *, precisions: Sequence[str] = ()) -> list[Option]:
    """In the order in which they are best tried: what changes the work of a step first, then how it is compiled.

    parts: of the run as it is. plan: its plan. precisions: those that a person allows beside the run's own.
    """
    kind = parts.device.type
    found = [_precision(precisions), _threads(cfg, parts, plan), _layout(cfg, parts), _residency(cfg, parts)]
    found += [_micro_batches(cfg, parts, plan), _compile(cfg, parts, plan)]
    if kind == "cuda":
        found.append(_graph(cfg, parts))
    return [each for each in found if each.tries or each.why_not]


def _precision(precisions: Sequence[str]) -> Option:
    tries = tuple({"train.precision": name} for name in precisions)
    return Option("train.precision", tries, "" if tries else "it changes the numbers: --precision asks for it")


def _threads(cfg: DictConfig, parts: Parts, plan: dict[str, Any]) -> Option:
    name, cores, now = "backends.cpu.num_threads", os.cpu_count() or 1, torch.get_num_threads()
    if parts.device.type != "cpu":
        return Option(name)
    counts = sorted({1, cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)} - {now})
    step = plan.get("step")
    if step and step["num_kernels"] and step["flops"] / step["num_kernels"] < FEW_FLOPS:
        fewer = [count for count in counts if count < now]
        why = (
            "" if fewer else f"a kernel has {step['flops'] / step['num_kernels']:,.0f} operations, too few for a second"
        )
        return Option(name, tuple({name: count} for count in fewer), why)
    return Option(name, tuple({name: count} for count in counts), "" if counts else "there is one core")


def _layout(cfg: DictConfig, parts: Parts) -> Option:
    name = f"backends.{parts.device.type}.channels_last"
    if "channels_last" not in cfg.backends.get(parts.device.type, {}):
        return Option(name)
    if not any(isinstance(module, nn.Conv2d) for module in parts.model.modules()):
        return Option(name, why_not="there are no 2-d convolutions")
    return Option(name, ({name: not parts.layout.startswith("channels last")},))


def _residency(cfg: DictConfig, parts: Parts) -> Option:
    if isinstance(parts.splits.train, OwnLoader):
        return Option("data.num_workers", why_not="your own stream has processes of its own, or none")
    if isinstance(parts.splits.train, Dataset):
        return _workers(cfg)
    if parts.train.indexed() is not None:
        return Option("data.residency", why_not="its rows lie on the device: nothing is read again")
    if cfg.data.residency == "stream":
        return Option("data.residency", ({"data.residency": "auto"},))
    return _workers(cfg)


def _workers(cfg: DictConfig) -> Option:
    cores, now = os.cpu_count() or 1, cfg.data.num_workers
    counts = [count for count in dict.fromkeys([0, 1, max(1, cores // 2), cores]) if count != now]
    return Option("data.num_workers", tuple({"data.num_workers": count} for count in counts))


def _micro_batches(cfg: DictConfig, parts: Parts, plan: dict[str, Any]) -> Option:
    name, size, num = "train.accumulate_steps", int(cfg.train.batch_size), int(cfg.train.accumulate_steps)
    parts_of = (plan.get("memory") or {}).get("parts", {})
    kept = parts_of.get("activations", 0) + parts_of.get("temporaries", 0)
    step = plan.get("step")
    touched = step["touched_bytes"] / step["num_kernels"] if step and step["num_kernels"] else FEW_BYTES
    why = ""
    if any(getattr(module, "running_mean", None) is not None for module in parts.model.modules()):
        why = "batch norm sees each part by itself: other numbers"
    elif _has_dropout(parts.model) or parts.source.finish is not None:
        why = "dropout, or augmentation, draws for each part: other numbers"
    elif isinstance(parts.splits.train, Dataset) and parts.train.batch_size != size:
        why = "its loader makes the batches"
    elif kept < FEW_ACTIVATIONS and plan.get("fits") is not False:
        why = f"a step keeps {kept / 2**20:.1f} MiB, which lies in the caches"
    elif touched < FEW_BYTES and plan.get("fits") is not False:
        why = f"a kernel reads and writes {touched / 2**10:.0f} KiB, which lies in the caches"
    smaller = [part for part in (2, 4) if size % part == 0] if not why else []
    tries = tuple({"train.batch_size": size // part, "train.accumulate_steps": num * part} for part in smaller)
    return Option(name, tries, why, goes_on=True)


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules())


def _compile(cfg: DictConfig, parts: Parts, plan: dict[str, Any]) -> Option:
    name = "train.compile"
    if cfg.train.compile:
        return Option(name, ({name: False},))
    if reason := rules.why_not(cfg, {name: True}):
        return Option(name, why_not=reason)
    if _has_dropout(parts.model):
        return Option(name, why_not="compiled, dropout draws other numbers")
    if (step := plan.get("step")) and (forward := step["flops_by_phase"].get("forward")):
        share = step["recurrent_flops"] / forward
        if share >= MOSTLY_RECURRENT:
            why = f"torch.compile leaves recurrent layers as they are, {share:.0%} of the forward pass"
            return Option(name, why_not=why)
    return Option(name, ({name: True},))


def _graph(cfg: DictConfig, parts: Parts) -> Option:
    name = "train.cuda_graph"
    if cfg.train.cuda_graph:
        return Option(name, ({name: False},))
    situation = rules.Situation(device=parts.device.type, is_on_device=parts.train.indexed() is not None)
    if reason := rules.why_not(cfg, {name: True}, situation):
        return Option(name, why_not=reason)
    return Option(name, ({name: True},))


def with_settings(cfg: DictConfig, settings: dict[str, Any]) -> DictConfig:
    """A copy of a configuration with other values by dotted key."""
    own = copy.deepcopy(cfg)
    for key, value in settings.items():
        OmegaConf.update(own, key, value)
    return own


def in_words(settings: dict[str, Any]) -> str:
    """As the command line has it."""

    def word(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f"[{','.join(value)}]" if isinstance(value, list) else str(value)

    return " ".join(f"{key}={word(value)}" for key, value in settings.items())
