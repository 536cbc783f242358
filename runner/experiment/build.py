"""Builds and places a run's parts from its checked configuration: data, model, task, optimizer. Fills cfg.facts on the way.

For runs (processes.py, together.py), `plan`, `lr-find` and `evaluate`.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import Dataset

from runner.config import secrets, validate
from runner.config.instantiate import PREPARED, build
from runner.config.nodes import fill_facts, leave_out_unknown_facts, resolved, split_settings
from runner.data.loading.batch_transform import TransformedBatches
from runner.data.loading.first_and_last import FirstAndLast
from runner.data.loading.loaders import Batches, Loading, load
from runner.data.loading.order import ClassSampler
from runner.data.own_loader import OwnLoader
from runner.data.sampler import class_counts, sampler_of
from runner.data.source import Preprocessing, Source, as_source
from runner.data.split import Splits, split
from runner.data.tables.statistics import SCALED
from runner.device import backends
from runner.device.host_memory import keep_what_is_freed
from runner.device.placement import place
from runner.errors import RunnerError
from runner.experiment import rules
from runner.experiment.best_metric import best_of
from runner.experiment.build_hooks import hooks_of
from runner.experiment.build_optimizer import optimizer_of, schedule_of
from runner.experiment.last_batch import check_last_batch
from runner.inspection.costs import Costs
from runner.inspection.host_reads import HostReads
from runner.models.card import Card
from runner.models.weights import exists, load_weights
from runner.models.whole import check_module, check_trains, has_lazy, know_shapes
from runner.models.with_preprocessing import Prepared
from runner.tasks.checks import check_turns, trains_nothing
from runner.tasks.regression import Regression
from runner.tasks.task import HasRequirements
from runner.training.cpu_threads import flops_a_product, threads_worth
from runner.training.optimizer import AveragedWeights, Turns, freeze
from runner.training.parts import Parts
from runner.training.recompute import recompute
from runner.training.schedule import Schedule
from runner.training.stopping import Limits

#: examples that an accelerator evaluates at a time, and the part of its free memory that they may take
MAX_EVAL_BATCH, FOR_EVALUATION = 2048, 0.25

if TYPE_CHECKING:
    from runner.distributed.sharding import Shards

#: steps that train.check takes: on the first batch and the last one, if that is smaller
CHECKED_STEPS = 2
#: facts that most data has no word of
OPTIONAL_FACTS = {
    "vocab_size": None,
    "context_length": None,
    "padding_token": None,
    "bytes_per_token": None,
    "class_counts": None,
    "is_multilabel": False,
}


@dataclass(frozen=True)
class Data:
    """The data as the loop takes it, before there is a model."""

    source: Source
    splits: Splits
    residency: str
    loaders: dict[str, Batches]  # by split


def prepare(
    cfg: DictConfig,
    device: torch.device,
    *,
    goes_on: bool = False,
    num_processes: int = 1,
    divide: Callable[[Sequence[nn.Module]], Shards] | None = None,
    read: Data | None = None,
    num_ranks: int = 1,
) -> Parts:
    """Builds and places everything, in the order of a batch's way; fills `cfg.facts` on it.

    goes_on: from a checkpoint, so that a file of weights to start from need not be there any more.
    num_processes: that train on this machine, and share its cores. divide: places models in parts (None: whole).
    read: of a run with the same rows, which are not read again. num_ranks: that train, on all machines, and share each batch.
    Raises: RunnerError for data or a model that can't be had as the configuration says.
    """
    data = prepare_data(cfg, device, num_processes, read=read)
    parts = prepare_training(cfg, device, data, goes_on=goes_on, divide=divide, num_ranks=num_ranks)
    return replace(parts, threads=_choose_threads(cfg, parts) if num_processes == 1 else "")


def prepare_data(cfg: DictConfig, device: torch.device, num_processes: int = 1, *, read: Data | None = None) -> Data:
    """The first half of prepare()."""
    set_switches(cfg, device, num_processes)
    if read is None:
        shared, node = validate.shared_data_settings(cfg), resolved(cfg, "data")
        source = _of_known_length(as_source(build(node, key="data"), name=shared["name"] or "data"), cfg)
        splits = split(source, seed=cfg.seed, **validate.how_to_cut(cfg))
    else:
        source, splits = read.source, read.splits
    loaders, residency = _loaders(cfg, source, splits, device, num_processes)
    return Data(source, splits, residency, loaders)


def _of_known_length(source: Source, cfg: DictConfig) -> Source:
    """A stream without a length lasts as long as the run. Raises: RunnerError where nobody says how long that is."""
    rows, num_steps = source.rows, cfg.train.num_steps
    if not isinstance(rows, OwnLoader) or rows.has_length:
        return source
    if num_steps is None:
        raise RunnerError(rows.no_length(f"data={source.name}", or_steps=True))
    rows.lasts(num_steps * cfg.train.accumulate_steps, batch_size=cfg.train.batch_size)
    note = f"{type(rows.dataset).__name__} has no length: the run is one epoch, in which it begins again where it ends"
    return replace(source, notes=(*source.notes, note))


def prepare_training(
    cfg: DictConfig,
    device: torch.device,
    data: Data,
    *,
    goes_on: bool = False,
    divide: Callable[[Sequence[nn.Module]], Shards] | None = None,
    num_ranks: int = 1,
) -> Parts:
    """The other half: model, task, optimizer and what they need."""
    keep_what_is_freed()
    source, loaders = data.source, data.loaders
    rules.check(cfg, rules.Situation(is_on_device=loaders["train"].indexed() is not None))
    steps_per_epoch = math.ceil(loaders["train"].num_batches / cfg.train.accumulate_steps)
    num_steps = cfg.train.num_steps or cfg.train.num_epochs * steps_per_epoch
    fill_facts(cfg, {**OPTIONAL_FACTS, **_counted(cfg, source, data.splits), **source.facts, "num_steps": num_steps})

    leave_out_unknown_facts(cfg, "task")
    around = source.around(data.splits.train) if source.around is not None else Preprocessing()
    around = _for_output(around, cfg.task.get("output"))
    backends.seed_everything(cfg.seed)  # the weights depend on the seed alone, not on what drew before
    with device if cfg.placement.init == "device" else contextlib.nullcontext():
        node, shared = split_settings(resolved(cfg, "model"), "model")
        model = build(with_preprocessing(node, around), key="model")
    inner, prefix = (model.model, "model.") if isinstance(model, Prepared) else (model, "")
    check_module(inner, asked=(asked := f"model._target_={node['_target_']}"))
    task = build(resolved(cfg, "task"), key="task")
    if isinstance(task, Regression) and _is_scaled(around.after):
        task.learn_scaled(around.after["spreads"])
    if has_lazy(model):
        know_shapes(model, task, lambda: next(iter(loaders["train"].epoch(0))))
    check_trains(inner, asked=asked)
    weights = _start(inner, shared, goes_on=goes_on)
    if cfg.train.recompute:
        recompute(model, _patterns(cfg.train.recompute), device=device, prefix=prefix)
    decay, mean, shards, layout = cfg.train.ema_decay, None, None, ""
    if divide is not None:
        check_last_batch(model, task, loaders["train"], device, num_ranks)
        mean = copy.deepcopy(model) if decay else None
        shards = divide([each for each in (model, mean) if each is not None])
        layout = shards.words
    else:
        model = place(model, device)
        settings = cfg.backends.get(device.type, {})
        layout = backends.lay_out(model, device=device, precision=cfg.train.precision, settings=settings)
        if cfg.placement.strategy == "fsdp":
            layout += f"{layout and ', '}whole, as one process has it (fsdp divides it among several)"
        check_last_batch(model, task, loaders["train"], device, num_ranks)
    optimizer = optimizer_of(cfg, model, device=device, prefix=prefix)
    trains_nothing(task)
    check_turns(task, [*optimizer.each] if isinstance(optimizer, Turns) else [])
    if isinstance(task, HasRequirements):
        task.check_model(model, keeps_inputs=around.keeps_inputs, data=source.name)
    best = best_of(cfg)
    residency = data.residency
    task = place(task, device) if isinstance(task, nn.Module) else task
    computes = backends.precision(cfg.train.precision, device=device)
    if divide is None and num_ranks == 1:
        size = eval_batch_size(cfg, model, task, computes, loaders, device)
        if size > (cfg.train.eval_batch_size or cfg.train.batch_size):
            larger: dict[str, Any] = {name: loaders[name] for name in loaders if name != "train"}
            loaders = {**loaders, **{name: each.with_batch_size(size) for name, each in larger.items()}}
            residency += f"; evaluated in batches of {size:,} (auto: train.eval_batch_size=null)"
    schedule = Schedule.of(schedule_of(cfg, optimizer, mode=best.mode), metric=best.metric)
    situation = rules.Situation(
        has_validation="val" in loaders,
        has_hook_metric=bool(cfg.train.hooks) and cfg.train.early_stopping.metric is not None,
        metric_schedule=f"scheduler={type(schedule.scheduler).__name__}" if schedule.follows_metric else None,
    )
    rules.check(cfg, situation)
    return Parts(
        device=device,
        source=source,
        splits=data.splits,
        residency=residency,
        train=_first_and_last(loaders["train"], data.splits) if cfg.train.check else loaders["train"],
        val=loaders.get("val"),
        test=loaders.get("test"),
        model=model,
        weights=weights,
        layout=layout,
        task=task,
        card=_card(cfg, inner, source, around),
        optimizer=optimizer,
        schedule=schedule,
        average=AveragedWeights(model, decay=decay, mean=mean) if decay else None,
        precision=computes,
        limits=Limits(
            num_epochs=math.ceil(num_steps / steps_per_epoch),
            num_steps=min(num_steps, CHECKED_STEPS) if cfg.train.check else num_steps,
            max_seconds=cfg.train.max_seconds,
            patience=cfg.train.early_stopping.patience,
            save_every_seconds=cfg.train.checkpoint_every_seconds,
            save_every_steps=cfg.train.checkpoint_every_steps,
            evaluate_every_steps=CHECKED_STEPS if cfg.train.check else cfg.train.evaluate_every_steps,
        ),
        best=best,
        hooks=hooks_of(cfg),
        shards=shards,
    )


def _rows_kind(rows: Any) -> str:
    if isinstance(rows, OwnLoader):
        return "loader" if rows.is_loader else "iterable"
    return "dataset" if isinstance(rows, Dataset) else "tensors"


def _first_and_last(batches: Batches, splits: Splits) -> Batches:
    return batches if isinstance(splits.train, OwnLoader) else FirstAndLast(batches)


def _choose_threads(cfg: DictConfig, parts: Parts) -> str:
    """Gives a CPU's steps as many threads as their work is worth, where nobody has said how many, and says why.

    A run that reads its rows beside the training keeps what set_switches() gave it. That MLflow's process starts on one
    of the cores is no reason to leave it: 120 steps of the CNN then reached the prompt in 13.6 s instead of 13.0, 2,400
    of them in 44 instead of 54 (1 and 2 threads, 2 cores, medians of 7 and of 3, 2026-11).
    """
    most, workers = backends.THREADS, validate.shared_data_settings(cfg)["num_workers"]
    reads = isinstance(parts.splits.train, Dataset) or (workers and parts.train.indexed() is None)
    if parts.device.type != "cpu" or cfg.backends.cpu.num_threads or most == 1 or reads:
        return ""
    batch = next(iter(parts.train.epoch(0)))
    states = backends.generator_states(parts.device)
    flops = flops_a_product(parts.task, parts.model, batch, autocast=parts.precision.autocast)
    backends.set_generator_states(states, parts.device)
    if flops is None:
        return ""
    threads = threads_worth(flops, most=most)
    torch.set_num_threads(threads)
    return f"{threads} of {most} threads (auto: {flops / 1e6:.3g} MFLOP a product)"


def eval_batch_size(
    cfg: DictConfig,
    model: nn.Module,
    task: Any,
    precision: backends.Precision,
    loaders: Mapping[str, Batches],
    device: torch.device,
) -> int:
    """Return how many examples to evaluate at a time: on an accelerator more than in a step, as its kernels are short then.

    Takes one batch through the model to count its memory. `train.deterministic` keeps the step's size, since free memory
    may differ when a run is resumed.
    """
    size, rows = int(cfg.train.eval_batch_size or cfg.train.batch_size), [*loaders.values()][1:]
    is_fixed = device.type == "cpu" or cfg.train.eval_batch_size or cfg.train.deterministic
    if is_fixed or not rows or any(each.indexed() is None for each in rows) or rows[0].num_rows <= size:
        return size
    costs, states = Costs(device), backends.generator_states(device)
    modules = [part for part in (model, task) if isinstance(part, nn.Module)]
    try:
        for module in modules:
            module.eval()
        with torch.no_grad(), HostReads(device, observers=(costs,)), precision.autocast():
            task(model, next(iter(rows[0].epoch(0))))
    except Exception:  # the evaluation itself reports it
        return size
    finally:
        for module in modules:
            module.train()
        backends.set_generator_states(states, device)
    free = backends.free_memory_bytes(device, memory_fraction=cfg.backends.cuda.memory_fraction) or 0
    most = min(MAX_EVAL_BATCH, int(free * FOR_EVALUATION) // max(1, costs.peak.num_bytes) * size)
    while 2 * size <= most:
        size *= 2
    return size


def set_switches(cfg: DictConfig, device: torch.device, num_processes: int = 1) -> None:
    """Torch's switches as the configuration says, and seeds: a person's function may draw its rows."""
    settings = {
        name: value for name, value in cfg.backends.get(device.type, {}).items() if name not in backends.OF_A_MODEL
    }
    if device.type == "cpu":
        settings["num_threads"] = settings.get("num_threads") or backends.automatic_threads(num_processes)
    backends.set_switches(device, precision=cfg.train.precision, deterministic=cfg.train.deterministic, **settings)
    backends.seed_everything(cfg.seed)


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
        given: dict[str, Any] = {"is_training": True, "sampler": sampler} if name == "train" else {}
        loaders[name], why = batches_of(rows, source, cfg, device, num_processes=num_processes, **given)
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
    """A split's batches on the device, finished as the source says, and why they lie where they lie; shuffled in training,
    or drawn by the sampler."""
    rules.check(cfg, rules.Situation(rows=_rows_kind(rows)))
    shared, train = validate.shared_data_settings(cfg), cfg.train
    batch_size = train.batch_size if is_training else train.eval_batch_size or train.batch_size
    fraction = cfg.backends.cuda.memory_fraction if device.type == "cuda" else None
    free_bytes = backends.free_memory_bytes(device, memory_fraction=fraction)
    loading = Loading(shared["residency"], free_bytes, shared["num_workers"], num_processes)
    batches, why = load(
        rows, loading, batch_size=batch_size, device=device, seed=cfg.seed, shuffle=is_training, sampler=sampler
    )
    if source.finish is not None:  # a copy each: one is in training mode, the others are not
        finish = place(copy.deepcopy(source.finish), device)
        if is_training and compiles_alone(device, is_compiled=train.compile, is_captured=train.cuda_graph):
            finish.compile(dynamic=False)
        batches = TransformedBatches(batches, finish, device=device, seed=cfg.seed, is_training=is_training)
    return batches, why


def compiles_alone(device: torch.device, *, is_compiled: bool, is_captured: bool) -> bool:
    """Whether what augments the batches is a compiled function of its own: some 35 kernels of a GPU are three then. In a
    step that reads its rows by itself it is a part of that: in a graph, and on a CPU (whose own is no faster)."""
    return device.type == "cuda" and is_compiled and not is_captured


def _start(model: nn.Module, shared: dict[str, Any], *, goes_on: bool) -> str:
    path, words = shared.get("weights"), ""
    if path is not None and (not goes_on or exists(Path(str(path)))):
        words = load_weights(model, str(path), strict=shared.get("strict", True))
    freeze(model, _patterns(shared.get("freeze")))
    return words


def _patterns(asked: Any) -> list[str]:
    return [asked] if isinstance(asked, str) else list(asked or [])


def _card(cfg: DictConfig, model: nn.Module, source: Source, around: Preprocessing) -> Card:
    shown = secrets.for_display(cfg)
    node = getattr(model, "made_anywhere", None)  # of a model that was fetched by name
    return Card(
        model=with_preprocessing(node or split_settings(shown["model"], "model")[0], around),
        task=shown["task"],
        reader=source.reader,
        classes=source.classes,
        targets=source.targets,
        data=source.name,
        facts={key: value for key, value in shown["facts"].items() if not OmegaConf.is_missing(cfg.facts, key)},
    )


def _counted(cfg: DictConfig, source: Source, splits: Splits) -> dict[str, Any]:
    """What is counted in the training split, as it is drawn: what is balanced already is not balanced twice."""
    if splits.labels is None or not source.classes:
        return {}
    return {"class_counts": class_counts(validate.shared_data_settings(cfg)["sampler"], splits.labels, source)}


def _for_output(around: Preprocessing, output: Any) -> Preprocessing:
    after = around.after
    if not _is_scaled(after) or not isinstance(output, int | str):
        return around
    return replace(around, after={**after, "output": output})


def _is_scaled(after: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return after is not None and after.get("_target_") == SCALED


def with_preprocessing(node: dict[str, Any], around: Preprocessing) -> dict[str, Any]:
    """The model's node, with what the data needs around it."""
    if around.before is None and around.after is None:
        return node
    parts = {"before": around.before, "model": node, "after": around.after}
    return {"_target_": PREPARED, **{name: part for name, part in parts.items() if part is not None}}
