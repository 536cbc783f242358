"""Builds the data of a run: source, splits, and batches on the device. The first half of build.prepare()."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import Dataset

from runner.config import validate
from runner.config.instantiate import build, locate
from runner.config.nodes import resolved
from runner.data.conversion import Conversion
from runner.data.loading.batches import BatchTransform, FirstAndLast
from runner.data.loading.loaders import Batches, Loading, load
from runner.data.loading.order import ClassSampler
from runner.data.loading.own_loader import OwnLoader
from runner.data.sampler import sampler_of
from runner.data.source import Source, as_source
from runner.data.split import Splits, split
from runner.device import backends, layers
from runner.device.placement import in_batches, place
from runner.device.precision import Precision, number_type
from runner.errors import CODE_ERRORS, Problem, RunnerError
from runner.experiment import rules
from runner.inspection.costs import Costs
from runner.inspection.operations import observe
from runner.tasks.task import Task
from runner.training.carried_state import evaluating, restored

#: examples that an accelerator evaluates at a time, and the part of its free memory that they may take
MAX_EVAL_BATCH, EVAL_MEMORY_SHARE = 2048, 0.25


@dataclass(frozen=True)
class PreparedData:
    """A run's data, ready for the loop."""

    source: Source
    splits: Splits
    residency: str
    loaders: dict[str, Batches]  # by split


def prepare_data(
    cfg: DictConfig, device: torch.device, num_processes: int = 1, *, read: PreparedData | None = None
) -> PreparedData:
    """Read, split and place the data: the first half of build.prepare()."""
    set_switches(cfg, device, num_processes)
    if read is None:
        shared, node = validate.shared_data_settings(cfg), in_precision(resolved(cfg, "data"), cfg)
        whole = as_source(build(node, key="data"), name=shared["name"] or "data", conversion=conversion_of(cfg))
        source = _of_known_length(whole, cfg)
        splits = split(source, seed=cfg.seed, **validate.how_to_cut(cfg))
    else:
        source, splits = read.source, read.splits
    loaders, residency = _loaders(cfg, source, splits, device, num_processes)
    return PreparedData(source, splits, residency, loaders)


def set_switches(cfg: DictConfig, device: torch.device, num_processes: int = 1) -> None:
    """Set torch's switches and seeds before the data is read, since a custom data set may draw random numbers."""
    settings = {
        name: value for name, value in cfg.backends.get(device.type, {}).items() if name not in layers.LAYOUT_SETTINGS
    }
    if device.type == "cpu":
        settings["num_threads"] = settings.get("num_threads") or backends.automatic_threads(num_processes)
    backends.set_switches(device, precision=cfg.train.precision, deterministic=cfg.train.deterministic, **settings)
    backends.seed_everything(cfg.seed)


def conversion_of(cfg: DictConfig) -> Conversion:
    """Return how user-defined data is converted for the run's task; a custom task gets its tensors unchanged."""
    task = locate(str(cfg.task._target_))
    return Conversion(number_type(cfg.train.precision), has_columns=getattr(task, "converts_data", False))


def in_precision(node: dict[str, Any], cfg: DictConfig) -> dict[str, Any]:
    """Return the data's node; with fp64 the runner's file readers return float64."""
    target = str(node["_target_"])
    is_reader = target.startswith("runner.data.") and "dtype" in inspect.signature(locate(target)).parameters
    return {**node, "dtype": "float64"} if is_reader and cfg.train.precision == "fp64" else node


def _of_known_length(source: Source, cfg: DictConfig) -> Source:
    """Give a stream without a length the length of the run, which must be set."""
    rows, num_steps = source.rows, cfg.train.num_steps
    if not isinstance(rows, OwnLoader) or rows.has_length:
        return source
    if num_steps is None:
        raise RunnerError(rows.no_length(f"data={source.name}", or_steps=True))
    rows.lasts(num_steps * cfg.train.accumulate_steps, batch_size=cfg.train.batch_size)
    note = f"{type(rows.dataset).__name__} has no length: the run is one epoch, and the data starts over when it ends"
    return replace(source, notes=(*source.notes, note))


def _loaders(
    cfg: DictConfig, source: Source, splits: Splits, device: torch.device, num_processes: int
) -> tuple[dict[str, Batches], str]:
    sampler = sampler_of(validate.shared_data_settings(cfg)["sampler"], splits.labels, source)
    loaders: dict[str, Batches] = {}
    reason = ""
    for name in ("train", "val", "test"):
        rows = getattr(splits, name)
        if rows is None:
            continue
        more: dict[str, Any] = {"is_training": True, "sampler": sampler} if name == "train" else {}
        loaders[name], why = batches_of(rows, source, cfg, device, num_processes=num_processes, **more)
        reason = reason or why
        if cfg.train.check and name != "train":
            loaders[name] = FirstAndLast(loaders[name])
    return loaders, reason


def batches_of(
    rows: Any,
    source: Source,
    cfg: DictConfig,
    device: torch.device,
    *,
    is_training: bool = False,
    sampler: ClassSampler | None = None,
    num_processes: int = 1,
) -> tuple[Batches, str]:
    """Return a split's batches on the device with the source's transforms, and why its examples are kept where they are.

    In training they are shuffled, or drawn by the sampler.
    """
    kind = "dataset" if isinstance(rows, Dataset) else "tensors"
    if isinstance(rows, OwnLoader):
        kind = "loader" if rows.is_loader else "iterable"
    rules.check(cfg, rules.Situation(rows=kind))
    shared, train = validate.shared_data_settings(cfg), cfg.train
    batch_size = train.batch_size if is_training else train.eval_batch_size or train.batch_size
    fraction = cfg.backends.cuda.memory_fraction if device.type == "cuda" else None
    free_bytes = backends.free_memory_bytes(device, memory_fraction=fraction)
    conversion = conversion_of(cfg)
    if not isinstance(rows, Dataset | OwnLoader):
        rows = conversion.cast(rows)
    loading = Loading(shared["residency"], free_bytes, shared["num_workers"], num_processes, conversion)
    batches, why = load(
        rows, loading, batch_size=batch_size, device=device, seed=cfg.seed, shuffle=is_training, sampler=sampler
    )
    if source.finish is not None:  # one copy per split: only that of train is in training mode
        finish = place(copy.deepcopy(source.finish), device)
        if conversion.dtype == torch.float64:
            finish.register_forward_hook(lambda module, batch, finished: conversion.cast(finished))
        if is_training and device.type == "cuda" and train.compile and not train.cuda_graph:  # else part of the step
            finish.compile(dynamic=False)
        batches.transform = BatchTransform(finish, device=device, seed=cfg.seed, is_training=is_training)
    return batches, why


def with_larger_evaluation(
    cfg: DictConfig, data: PreparedData, model: nn.Module, task: Any, precision: Precision, device: torch.device
) -> PreparedData:
    """Return the data with larger batches for evaluations on an accelerator, whose kernels are short in them.

    Takes one batch through the model to count its memory. `train.check` keeps the step's size, and so does
    `train.deterministic`, since free memory may differ when a run is resumed.
    """
    train, loaders = cfg.train, data.loaders
    others: dict[str, Any] = {name: loaders[name] for name in loaders if name != "train"}
    is_fixed = device.type == "cpu" or train.eval_batch_size or train.deterministic or train.check
    if is_fixed or not others or any(each.indexed() is None for each in others.values()):
        return data
    first = next(iter(others.values()))
    if first.num_rows <= train.batch_size:
        return data
    num_bytes = _evaluated_bytes(model, task, first, precision, device)
    if num_bytes is None:
        return data
    free = backends.free_memory_bytes(device, memory_fraction=cfg.backends.cuda.memory_fraction) or 0
    size, most = train.batch_size, min(MAX_EVAL_BATCH, int(free * EVAL_MEMORY_SHARE) // num_bytes * train.batch_size)
    while 2 * size <= most:
        size *= 2
    if size == train.batch_size:
        return data
    larger = {name: each.with_batch_size(size) for name, each in others.items()}
    residency = f"{data.residency}; evaluated in batches of {size:,} (auto: train.eval_batch_size=null)"
    return replace(data, residency=residency, loaders={**loaders, **larger})


def _evaluated_bytes(
    model: nn.Module, task: Any, batches: Batches, precision: Precision, device: torch.device
) -> int | None:
    """Return the peak memory of evaluating a batch; None if it fails, which the evaluation itself reports."""
    costs, draws = Costs(device), backends.generators_restored(device)
    try:
        enabled = torch.set_grad_enabled(getattr(task, "needs_grad", False))
        with enabled, draws, evaluating(model, task), restored(model, task), observe(costs), precision.autocast():
            task(model, next(iter(batches.epoch(0))))
    except Exception:  # of the user's model
        return None
    return max(1, costs.peak.num_bytes)


BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


def check_last_batch(model: nn.Module, task: Task, batches: Batches, device: torch.device, num_ranks: int = 1) -> None:
    """Refuse a last batch with less than two examples for a process if a layer normalizes over the batch."""
    rows, size = batches.num_rows, batches.batch_size
    is_synced = num_ranks > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    if _all_have_two(rows, size, num_ranks) or size == num_ranks == 1 or is_synced:  # a synced one waits for the others
        return
    if not any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return
    one = next(in_batches(next(iter(batches.epoch(0))), 1))
    try:
        with backends.generators_restored(device), torch.no_grad():
            probe_model, probe_task = copy.deepcopy((model, task))
            if isinstance(probe_task, nn.Module):
                probe_task = place(probe_task, device)
            probe_task(place(probe_model, device).train(), one)
    except CODE_ERRORS as error:  # other errors appear in the run, too; some models can't be copied
        if "more than 1 value per channel" in str(error):
            raise RunnerError(_last_batch_problem(rows, size, num_ranks)) from None


def _all_have_two(rows: int, size: int, num_ranks: int) -> bool:
    return (rows % size or size) >= 2 * num_ranks


def _last_batch_problem(rows: int, size: int, num_ranks: int) -> Problem:
    last = f"{rows % size or size} rows in the last batch of an epoch"
    problem = f"batch normalization needs two rows in each process, and {num_ranks} share {last}"
    sizes = sorted(range(2 * num_ranks, max(size, rows) + 1), key=lambda other: (other > size, abs(other - size)))
    ways = [f"train.batch_size={other}" for other in sizes if _all_have_two(rows, other, num_ranks)]
    return Problem.suggest(f"train.batch_size={size}", problem, ways[:1], "use data with more rows")
