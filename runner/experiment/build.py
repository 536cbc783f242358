"""Builds and places a run's parts from its checked configuration: data, model, task, optimizer. Fills cfg.facts on the way.

For runs (processes.py, sweep/jobs/run_together.py), `plan`, `lr-find` and `evaluate`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from runner.config import secrets, validate
from runner.config.instantiate import PREPARED, build, locate
from runner.config.nodes import fill_facts, leave_out_unknown_facts, resolved, split_settings
from runner.config.schema import HOOKS, fits
from runner.data.conversion import Conversion
from runner.data.loading.batches import FirstAndLast
from runner.data.loading.loaders import Batches
from runner.data.loading.own_loader import OwnLoader
from runner.data.sampler import class_counts
from runner.data.source import Preprocessing, Source
from runner.data.tables.table import SCALED
from runner.device import backends, layers
from runner.device.host_memory import keep_what_is_freed
from runner.device.placement import place
from runner.device.precision import default_type, make_precision
from runner.errors import RunnerError
from runner.experiment import rules
from runner.experiment.build_data import (
    PreparedData,
    check_last_batch,
    conversion_of,
    prepare_data,
    with_larger_evaluation,
)
from runner.experiment.build_optimizer import optimizer_of, schedule_of
from runner.models.card import Card
from runner.models.preprocessing import Prepared
from runner.models.weights import exists, load_weights
from runner.models.whole import check_module, check_trains, has_lazy, know_shapes
from runner.tasks.checks import check_turns, shares_tensors, trains_nothing
from runner.tasks.metric_names import is_rising
from runner.tasks.regression import Regression
from runner.training import lora
from runner.training.carried_state import CarriedState
from runner.training.cpu_threads import flops_a_product, threads_worth
from runner.training.loop import Best
from runner.training.optimizer import AveragedWeights, Turns, below_the_head, freeze, wants_closure
from runner.training.parts import Hook, Parts
from runner.training.recompute import recompute
from runner.training.schedule import Schedule
from runner.training.stopping import Limits

if TYPE_CHECKING:
    from runner.distributed.sharding import Shards

    Divide = Callable[[Sequence[nn.Module]], Shards]  # places models in parts

#: steps that train.check takes: on the first batch and the last one, if that is smaller
CHECKED_STEPS = 2
#: facts that most data lacks
OPTIONAL_FACTS = {
    "vocab_size": None,
    "context_length": None,
    "padding_token": None,
    "bytes_per_token": None,
    "class_counts": None,
    "is_multilabel": False,
}


def prepare(
    cfg: DictConfig,
    device: torch.device,
    *,
    is_resumed: bool = False,
    num_processes: int = 1,
    divide: Divide | None = None,
    read: PreparedData | None = None,
    num_ranks: int = 1,
) -> Parts:
    """Build the data, the model, the task and the optimizer, place them on the device, and fill in `cfg.facts`.

    Args:
        cfg: The checked configuration.
        device: Where everything is placed.
        is_resumed: Whether a checkpoint follows; the file of initial weights may be gone then.
        num_processes: Processes that train on this machine and share its cores.
        divide: Splits models across processes (None: they stay whole).
        read: The data of a run with the same rows, which is not read again.
        num_ranks: Processes that train, on all machines, and share each batch.

    Raises:
        RunnerError: The data, the model or the optimizer can't be built as the configuration says.
    """
    data = prepare_data(cfg, device, num_processes, read=read)
    parts = prepare_training(cfg, device, data, is_resumed=is_resumed, divide=divide, num_ranks=num_ranks)
    return replace(parts, threads=_choose_threads(cfg, parts) if num_processes == 1 else "")


def prepare_training(
    cfg: DictConfig,
    device: torch.device,
    data: PreparedData,
    *,
    is_resumed: bool = False,
    divide: Divide | None = None,
    num_ranks: int = 1,
) -> Parts:
    """Build and place the model, the task, the optimizer and what they need, for data that is prepared."""
    keep_what_is_freed()
    source, train, best = data.source, data.loaders["train"], best_of(cfg)
    rules.check(cfg, rules.Situation(is_on_device=train.indexed() is not None))  # before a large model is loaded
    steps_per_epoch = math.ceil(train.num_batches / cfg.train.accumulate_steps)
    num_steps = cfg.train.num_steps or cfg.train.num_epochs * steps_per_epoch
    facts = {**OPTIONAL_FACTS, **source.facts, "num_steps": num_steps}
    if (labels := data.splits.labels) is not None and source.classes and "class_counts" not in source.facts:
        # as the sampler draws them, so that a balanced sampler and class weights don't both balance
        facts["class_counts"] = class_counts(validate.shared_data_settings(cfg)["sampler"], labels, source)
    fill_facts(cfg, facts)
    leave_out_unknown_facts(cfg, "task")
    around = _preprocessing(cfg, data)
    model, task, weights = _build_model(cfg, around, device, train, is_resumed=is_resumed)
    card = _card(cfg, model, source, around)
    check_last_batch(model, task, train, device, num_ranks)
    model, average, shards, layout = _place_model(cfg, model, device, divide)
    optimizer = optimizer_of(cfg, model, device=device, prefix=_inner(model)[1])
    schedule = schedule_of(cfg, optimizer, best=best, steps_per_epoch=steps_per_epoch)
    trains_nothing(task)
    check_turns(task, [*optimizer.each] if isinstance(optimizer, Turns) else [])
    if check := getattr(task, "check_model", None):
        check(model, keeps_inputs=around.keeps_inputs, data=source.name)
    rules.check(cfg, _situation(cfg, data, task, optimizer, schedule, num_ranks))
    task = place(task, device) if isinstance(task, nn.Module) else task
    precision = make_precision(cfg.train.precision, device=device, skips=cfg.train.on_nonfinite == "skip")
    if divide is None and num_ranks == 1:
        data = with_larger_evaluation(cfg, data, model, task, precision, device)
    is_checked = cfg.train.check and not isinstance(data.splits.train, OwnLoader)
    return Parts(
        device=device,
        source=source,
        splits=data.splits,
        residency=data.residency,
        train=FirstAndLast(train) if is_checked else train,
        val=data.loaders.get("val"),
        test=data.loaders.get("test"),
        model=model,
        weights=weights,
        layout=layout,
        task=task,
        card=card,
        optimizer=optimizer,
        schedule=schedule,
        average=average,
        precision=precision,
        limits=_limits(cfg, num_steps, steps_per_epoch),
        best=best,
        carried=CarriedState(model, task, device=device),
        hooks=hooks_of(cfg),
        shards=shards,
    )


def _preprocessing(cfg: DictConfig, data: PreparedData) -> Preprocessing:
    """Return what the data needs around the model; of several outputs, `task.output` is scaled."""
    around = data.source.around(data.splits.train) if data.source.around is not None else Preprocessing()
    if _is_scaled(around.after) and isinstance(output := cfg.task.get("output"), int | str):
        around = replace(around, after={**around.after, "output": output})
    return around


def _build_model(
    cfg: DictConfig, around: Preprocessing, device: torch.device, batches: Batches, *, is_resumed: bool
) -> tuple[nn.Module, Any, str]:
    """Return the model on the host, the task, and which weights it starts from."""
    backends.seed_everything(cfg.seed)  # weights depend only on the seed, not on what was drawn before
    with device if cfg.placement.init == "device" else nullcontext():
        node, shared = split_settings(resolved(cfg, "model"), "model")
        model = build(node, key="model")
    check_module(model, source=(source := f"model._target_={node['_target_']}"))
    numbers = conversion_of(cfg)
    if numbers.dtype == torch.float64:
        model.double()
    with default_type(numbers.dtype):  # of the layers' constants
        model = in_layers(model, around)
    task = _build_task(cfg, around, numbers)
    inner, prefix = _inner(model)
    if has_lazy(model):
        know_shapes(model, task, lambda: next(iter(batches.epoch(0))))
    check_trains(inner, source=source)
    path, weights = shared.get("weights"), ""
    if path is not None and (not is_resumed or exists(Path(str(path)))):
        weights = load_weights(inner, str(path), strict=shared.get("strict", True))
    if shared.get("lora"):
        lora.add_lora(inner, **shared["lora"])
    freeze(inner, _patterns(shared.get("freeze")) + (below_the_head(inner) if shared.get("head_only") else []))
    if cfg.train.recompute:
        recompute(model, _patterns(cfg.train.recompute), device=device, prefix=prefix)
    return model, task, weights


def _build_task(cfg: DictConfig, around: Preprocessing, numbers: Conversion) -> Any:
    # the constants of the runner's tasks have the run's precision; a custom task may draw numbers
    with default_type(numbers.dtype) if numbers.has_columns else nullcontext():
        task = build(resolved(cfg, "task"), key="task")
        if isinstance(task, Regression) and _is_scaled(around.after):
            task.learn_scaled(around.after["spreads"])
    if numbers.dtype == torch.float64 and isinstance(task, nn.Module):
        task.double()
    return task


def _inner(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the user's model, and what precedes the names that the user knows."""
    return (model.model, "model.") if isinstance(model, Prepared) else (model, "")


def _place_model(
    cfg: DictConfig, model: nn.Module, device: torch.device, divide: Divide | None
) -> tuple[nn.Module, AveragedWeights | None, Shards | None, str]:
    """Return the model on the device, its average, what divides it among processes, and the layout as text."""
    decay = cfg.train.ema_decay
    if divide is not None:
        mean = copy.deepcopy(model) if decay else None
        shards = divide([each for each in (model, mean) if each is not None])
        return model, AveragedWeights(model, decay=decay, mean=mean) if decay else None, shards, shards.summary
    model = place(model, device)
    settings = cfg.backends.get(device.type, {})
    layout = layers.lay_out(model, device=device, precision=cfg.train.precision, settings=settings)
    if cfg.placement.strategy == "fsdp":
        layout += f"{layout and ', '}whole, as one process has it (fsdp divides it among several)"
    return model, AveragedWeights(model, decay=decay) if decay else None, None, layout


def _situation(
    cfg: DictConfig, data: PreparedData, task: Any, optimizer: Optimizer, schedule: Schedule, num_ranks: int
) -> rules.Situation:
    return rules.Situation(
        num_processes=num_ranks,
        is_on_device=data.loaders["train"].indexed() is not None,
        has_validation="val" in data.loaders,
        has_hook_metric=bool(cfg.train.hooks) and cfg.train.early_stopping.metric is not None,
        metric_schedule=f"scheduler={type(schedule.scheduler).__name__}" if schedule.follows_metric else None,
        closure_optimizer=type(optimizer).__name__ if wants_closure(optimizer) else None,
        shares_tensors=shares_tensors(task),
    )


def _limits(cfg: DictConfig, num_steps: int, steps_per_epoch: int) -> Limits:
    train = cfg.train
    return Limits(
        num_epochs=math.ceil(num_steps / steps_per_epoch),
        num_steps=min(num_steps, CHECKED_STEPS) if train.check else num_steps,
        max_seconds=train.max_seconds,
        patience=train.early_stopping.patience,
        stop_when=dict(train.stop_when or {}),
        save_every_seconds=train.checkpoint_every_seconds,
        save_every_steps=train.checkpoint_every_steps,
        evaluate_every_steps=CHECKED_STEPS if train.check else train.evaluate_every_steps,
    )


def _choose_threads(cfg: DictConfig, parts: Parts) -> str:
    """Choose the CPU threads by the work of a step, if their number is not set, and return the reason.

    A run whose examples are read by processes during the training keeps the number of set_switches().
    """
    most, is_read = backends.THREADS, isinstance(parts.splits.train, Dataset)
    if parts.device.type != "cpu" or cfg.backends.cpu.num_threads or most == 1 or is_read:
        return ""
    batch = next(iter(parts.train.epoch(0)))
    with backends.generators_restored(parts.device):
        flops = flops_a_product(parts.task, parts.model, batch, autocast=parts.precision.autocast)
    if flops is None:
        return ""
    threads = threads_worth(flops, most=most)
    torch.set_num_threads(threads)
    return f"{threads} of {most} threads (auto: {flops / 1e6:.3g} MFLOP a product)"


def _patterns(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _card(cfg: DictConfig, model: nn.Module, source: Source, around: Preprocessing) -> Card:
    shown = secrets.for_display(cfg)
    own, settings = split_settings(shown["model"], "model")
    node = getattr(_inner(model)[0], "made_anywhere", None) or own  # the first: of a model that was fetched by name
    if settings.get("lora"):
        node = {"_target_": lora.NODE, "model": node, **settings["lora"]}
    return Card(
        model=with_preprocessing(node, around),
        task=shown["task"],
        reader=source.reader,
        classes=source.classes,
        targets=source.targets,
        data=source.name,
        facts={key: value for key, value in shown["facts"].items() if not OmegaConf.is_missing(cfg.facts, key)},
    )


def _is_scaled(after: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return after is not None and after.get("_target_") == SCALED


def in_layers(model: nn.Module, around: Preprocessing) -> nn.Module:
    """Return the model in the layers that the data needs around it."""
    if around.before is None and around.after is None:
        return model
    before, after = (None if each is None else build(each, key="data") for each in (around.before, around.after))
    return Prepared(model, before=before, after=after)


def with_preprocessing(node: dict[str, Any], around: Preprocessing) -> dict[str, Any]:
    """Return the model's node together with the layers that the data needs around it."""
    if around.before is None and around.after is None:
        return node
    parts = {"before": around.before, "model": node, "after": around.after}
    return {"_target_": PREPARED, **{name: part for name, part in parts.items() if part is not None}}


def best_of(cfg: DictConfig) -> Best:
    """Return the metric that selects the best weights, and that early stopping and plateau schedules follow."""
    stopping = cfg.train.early_stopping
    metric = stopping.metric or "val/loss"
    return Best(metric, stopping.mode or ("max" if is_rising(metric) else "min"))


def hooks_of(cfg: DictConfig) -> tuple[Hook, ...]:
    """Return the hooks: functions are called with a View and their arguments, objects of classes with a View.

    Raises:
        RunnerError: A hook can't be built, or can't be called with a View.
    """
    hooks = []
    for number, (node, at) in enumerate(hook_nodes(cfg)):
        key, name = f"train.hooks[{number}]", str(node["_target_"])
        call = build(node, key=key)
        try:
            inspect.signature(call).bind(object())
        except TypeError as error:
            problem = f"a hook is called with a view of the training, which fails: {error}"
            raise RunnerError.of(
                f"{key}={name}", problem, f"define it as `def {name.rpartition('.')[2]}(view): ...`"
            ) from None
        except ValueError:  # a builtin without a signature
            pass
        hooks.append(Hook(name, call, at))
    return tuple(hooks)


def hook_nodes(cfg: DictConfig) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    try:
        written: Any = OmegaConf.to_container(cfg.train.hooks, resolve=True)
    except (OmegaConfBaseException, AttributeError, ValueError):
        return []
    if not fits(written, HOOKS):  # validate reports it
        return []
    nodes = []
    for one in written:
        node: dict[str, Any] = {"_target_": one} if isinstance(one, str) else dict(one)
        at = node.pop("at", Hook.at)
        with suppress(RunnerError):  # check.hook_problems() reports it
            node.setdefault("_partial_", not inspect.isclass(locate(str(node["_target_"]))))
        nodes.append((node, (at,) if isinstance(at, str) else tuple(at)))
    return nodes
