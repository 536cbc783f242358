"""What conf/ may hold: every key's name, type, unit and check, as dataclasses. Values and defaults stand in conf/."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

PRECISIONS = ("fp32", "bf16", "fp16", "tf32", "auto")
#: what an editor offers; runner.device.choose knows all forms
DEVICES = ["auto", "cpu", "cuda", "cuda:0", "mps", "xpu", "all"]
DIRECTIONS = ("minimize", "maximize")
KEPT = "every_epoch|(last|best):[1-9][0-9]*"
#: when a hook may be called: before the first step, after each measurement, and with the best weights after the test
MOMENTS = ("start", "epoch", "end")
#: the tags that runs and sweeps set in MLflow
OWN_TAGS = (
    *("device", "device_name", "device_reason", "git_commit", "git_dirty", "changed", "reproduces", "sweep"),
    *("best_job", "best_job_name", "best_job_run_id", "goals", "max_seeds"),
)
#: the names of a user's tags; MLflow refuses others
TAG = rf"(?!({'|'.join(OWN_TAGS)})$|mlflow\.|runner|[./]|.*(//|/\.|/$))[\w.\-: /]{{1,250}}"
WEIGHT = {"type": "number", "minimum": 0}


def _value(valid: str, check: Callable[[Any], bool], example: Any, default: Any = MISSING, **limits: Any) -> Any:
    """A field whose value must pass `check`; `valid` says in words what does. Its default stands in conf/.

    default: of a run from before the key. limits: the same for an editor, in the words of JSON Schema
    (runner.config.json_schema); of a type that is Any, all of it.
    """
    return field(default=default, metadata={"valid": valid, "check": check, "example": example, "limits": limits})


def _one_of(*choices: str) -> Any:
    return field(default=MISSING, metadata={"valid": "one of " + ", ".join(choices), "choices": choices})


def _secret(*, default: Any = MISSING) -> Any:
    """A text that is neither shown nor stored: not on the screen, in the run directory, in MLflow or in a report."""
    return field(default=default, metadata={"secret": True})


def _at_least(least: int, **otherwise: Any) -> Any:
    return _value(f"{least} or more", lambda value: value >= least, max(least, 1), minimum=least, **otherwise)


def _count_or(*words: str, least: int = 1) -> Any:
    def is_one(value: Any) -> bool:
        return value in words or (type(value) is int and value >= least)

    return _value(
        f"{', '.join(words)} or a whole number, {least} or more",
        is_one,
        words[0],
        anyOf=[{"enum": [*words]}, {"type": "integer", "minimum": least}],
    )


def _more_than_zero() -> Any:
    return _value("more than 0", lambda value: value > 0, 1, exclusiveMinimum=0)


def _fraction(*, one: bool = False) -> Any:
    if one:
        return _value("more than 0 and at most 1", lambda value: 0 < value <= 1, 0.5, exclusiveMinimum=0, maximum=1)
    return _value("0 or more and less than 1", lambda value: 0 <= value < 1, 0.1, minimum=0, exclusiveMaximum=1)


def _one_or_more(kind: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [kind, {"type": "array", "items": kind, "minItems": 1}]}


@dataclass
class Data:
    """What every data set has; the other keys of `data` are the arguments of its `_target_`."""

    name: str | None = MISSING
    val_fraction: float = _fraction()
    test_fraction: float = _fraction()
    limit: int | None = _at_least(1)
    fold: Any = _value(
        "null, a fold's number from 0, or K/N for fold K of N",
        lambda value: not isinstance(value, bool) and re.fullmatch(r"\d+(/\d+)?", str(value)) is not None,
        "0",
        anyOf=[
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^[0-9]+(/[0-9]+)?$"},
            {"type": "null"},
        ],
    )
    num_folds: int | None = _at_least(2)
    sampler: Any = _value(
        "null, balanced, or weights of 0 or more, not all of them 0: [1,3] by class, or {NAME: 3}",
        lambda value: value == "balanced" or _are_weights(value),
        "balanced",
        anyOf=[
            {"enum": ["balanced", None]},
            {"type": "array", "items": WEIGHT, "minItems": 1},
            {"type": "object", "additionalProperties": WEIGHT, "minProperties": 1},
        ],
    )
    residency: str = _one_of("auto", "device", "stream")
    num_workers: int | None = _at_least(0)


@dataclass
class Model:
    """What every model has; the other keys of `model` are the arguments of its `_target_`."""

    weights: str | None = MISSING
    strict: bool = MISSING
    freeze: Any = _value(
        "a pattern of names, or a list of them",
        lambda value: not value or _are(value, str),
        "[encoder]",
        type=["string", "array", "null"],
        items={"type": "string"},
    )


@dataclass
class Optimizer:
    """What every optimizer has, likewise."""

    groups: Any = _value(
        "a list of {match: PATTERN, SETTING: ...}",
        lambda value: _are_groups(value),
        "[{match: encoder, lr: 0.0001}]",
        type="array",
        items={"type": "object", "properties": {"match": {"type": "string"}}, "required": ["match"]},
    )
    no_decay: str | None = _one_of("norms_and_biases")
    turns: Any = _value(
        "{NAME: {params: PATTERN, every: N, SETTING: ...}}",
        lambda value: are_turns(value),
        "{critic: {params: critic}, generator: {params: generator, lr: 0.0001}}",
        type="object",
        additionalProperties={
            "type": "object",
            "properties": {"params": _one_or_more({"type": "string"}), "every": {"type": "integer", "minimum": 1}},
            "required": ["params"],
        },
    )


@dataclass
class EarlyStopping:
    metric: str | None = MISSING
    mode: str | None = _one_of("min", "max")
    patience: int | None = _at_least(1)


@dataclass
class Train:
    check: bool = False  # a run from before has no word of it
    num_epochs: int = _at_least(1)
    num_steps: int | None = _at_least(1)
    batch_size: int = _at_least(1)
    eval_batch_size: int | None = _at_least(1)
    precision: str = _one_of(*PRECISIONS)
    compile: bool = MISSING
    cuda_graph: bool = MISSING
    accumulate_steps: int = _at_least(1)
    clip_grad_norm: float | None = _more_than_zero()
    ema_decay: float | None = _value(
        "more than 0 and less than 1", lambda value: 0 < value < 1, 0.999, exclusiveMinimum=0, exclusiveMaximum=1
    )
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    max_seconds: float | None = _more_than_zero()
    grace_seconds: float = _more_than_zero()
    on_oom: str = _one_of("fail", "split")
    deterministic: bool = MISSING
    checkpoint_every_seconds: float | None = _more_than_zero()
    checkpoint_every_steps: int | None = _at_least(1)
    evaluate_every_steps: int | None = _at_least(1)
    keep_checkpoints: Any = _value(
        "every_epoch, last:K or best:K, with K from 1 on",
        lambda value: isinstance(value, str) and re.fullmatch(KEPT, value) is not None,
        "last:3",
        anyOf=[{"type": "string", "pattern": f"^({KEPT})$"}, {"type": "null"}],
    )
    profile: int | None = _at_least(1)
    clocked_steps: int | None = _at_least(1, default=50)
    hooks: Any = _value(
        "a list of functions, each by its name or as {_target_: NAME, ...}",
        lambda value: are_hooks(value),
        "[my_hooks.norms]",
        type="array",
        items={
            "type": ["string", "object"],
            "required": ["_target_"],
            "properties": {"_target_": {"type": "string"}, "at": _one_or_more({"enum": [*MOMENTS]})},
        },
    )
    recompute: Any = field(  # a run from before has no word of it
        default=None,
        metadata={
            "valid": "a pattern of module paths, or a list of them",
            "check": lambda value: value in (None, []) or _are(value, str),
            "example": "[layers.*]",
            "limits": {"type": ["string", "array", "null"], "items": {"type": "string"}},
        },
    )
    num_processes: Any = _count_or("auto")
    max_restarts: int = _at_least(0)


@dataclass
class Metrics:
    every: int = _at_least(1)
    pull_every: int = _at_least(1)


@dataclass
class Placement:
    init: str = _one_of("host", "device")
    guard: str = _one_of("first_step", "always", "off")
    strategy: str = _one_of("ddp", "fsdp")
    unused_parameters: bool = MISSING


@dataclass
class Tracking:
    uri: str = MISSING
    experiment: str | None = MISSING
    enabled: bool = MISSING
    log_model: Any = _value(
        "true, false or all", lambda value: value in (True, False, "all"), "true", enum=[True, False, "all"]
    )
    system_metrics: bool = MISSING
    points: Any = _count_or("all", least=100)
    grace_seconds: float = _at_least(0)
    tags: Any = _value(
        "{NAME: TEXT} or a list of names, without the names that a run sets itself; a text has at most 5000 characters",
        lambda value: are_tags(value),
        "{team: vision}",
        None,
        anyOf=[
            {
                "type": "object",
                "propertyNames": {"pattern": f"^{TAG}$"},
                "additionalProperties": {"type": ["string", "number", "boolean"], "maxLength": 5000},
            },
            {"type": "array", "items": {"type": "string", "pattern": f"^{TAG}$"}},
            {"type": "null"},
        ],
    )
    description: str | None = _value(
        "a text of at most 3000 characters", lambda value: len(value) <= 3000, "'a first try'", None, maxLength=3000
    )
    git_diff: bool = True


@dataclass
class Cpu:
    num_threads: int | None = _at_least(1)
    channels_last: bool | None = MISSING
    onednn: bool | None = MISSING


@dataclass
class Cuda:
    memory_fraction: float | None = _fraction(one=True)
    cudnn_benchmark: bool = MISSING
    channels_last: bool | None = MISSING


@dataclass
class Mps:
    memory_fraction: float | None = _fraction(one=True)


@dataclass
class Backends:
    cpu: Cpu = field(default_factory=Cpu)
    cuda: Cuda = field(default_factory=Cuda)
    mps: Mps = field(default_factory=Mps)


@dataclass
class Facts:
    """What only the data knows; the run fills it in after the data is there and before the model is built."""

    input_shape: list[int] = MISSING
    in_features: int = MISSING
    out_features: int = MISSING
    num_classes: int | None = MISSING
    class_counts: list[int] | None = MISSING
    is_multilabel: bool = MISSING
    vocab_size: int | None = MISSING
    context_length: int | None = MISSING
    padding_token: int | None = MISSING
    bytes_per_token: float | None = MISSING
    num_steps: int = MISSING


@dataclass
class Slots:
    """Jobs of a sweep at a time on one device of each kind."""

    cpu: int = _at_least(1)
    cuda: int = _at_least(1)
    mps: int = _at_least(1)
    xpu: int = _at_least(1)


@dataclass
class Sweep:
    strict: bool = MISSING
    resume: str | None = MISSING
    retry: bool = MISSING
    grace_seconds: float = _at_least(0)
    slots: Slots = field(default_factory=Slots)
    batch: Any = _count_or("auto", "off")
    until: str | None = _one_of("decided")
    max_seeds: int = _at_least(1)
    max_seconds: float | None = _more_than_zero()
    zip: Any = _value(
        "lists of values by key, or several such mappings in a list",
        lambda value: value is None or _are(value, Mapping),
        "null",
        anyOf=[{"type": ["object", "null"]}, {"type": "array", "items": {"type": "object"}, "minItems": 1}],
    )


@dataclass
class Plan:
    """What `python -m runner plan` assumes of the device; no run reads it."""

    device_memory: Any = MISSING
    device_name: str | None = MISSING
    folder: str = MISSING


@dataclass
class Grid:
    """The settings of hydra/sweeper=grid."""

    params: dict[str, Any] | None = MISSING


@dataclass
class Search:
    """The settings of hydra/sweeper=optuna."""

    n_trials: int = _at_least(1)
    metric: Any = _value(
        "a metric's name, or a list of names",
        lambda value: _are(value, str),
        "val/loss",
        **_one_or_more({"type": "string"}),
    )
    direction: Any = _value(
        "minimize or maximize, or a list of them",
        lambda value: _are(value, str, among=DIRECTIONS),
        "minimize",
        **_one_or_more({"enum": [*DIRECTIONS]}),
    )
    sampler: str = _one_of("tpe", "random", "grid", "cmaes", "nsga2")
    seed: int = _value("0 or more, below 2**31", lambda value: 0 <= value < 2**31, 0, minimum=0, exclusiveMaximum=2**31)
    pruner: str | None = _one_of("auto", "median", "hyperband", "halving", "none")
    warmup_epochs: int = _at_least(0)
    startup_trials: int = _at_least(0)
    batch: int = _at_least(1)
    params: dict[str, Any] | None = MISSING


def _are(value: Any, kind: type, *, among: tuple[str, ...] | None = None) -> bool:
    values = [value] if isinstance(value, kind) else list(value) if isinstance(value, Sequence) else []
    return bool(values) and all(isinstance(one, kind) and (among is None or one in among) for one in values)


def _are_weights(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return False
    weights = list(value.values()) if isinstance(value, Mapping) else list(value)
    are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in weights)
    return are_numbers and all(0 <= one < math.inf for one in weights) and any(one > 0 for one in weights)


def _are_groups(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(one, Mapping) and isinstance(one.get("match"), str) for one in value)


def are_hooks(value: Any) -> bool:
    """Whether it is a list, empty or not, of texts and of mappings with a `_target_`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    targets = [one.get("_target_") if isinstance(one, Mapping) else one for one in value]
    return all(isinstance(target, str) for target in targets)


def are_tags(value: Any) -> bool:
    """Whether MLflow accepts these tags and no run sets them itself."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return False
    texts = value.values() if isinstance(value, Mapping) else ()
    are_texts = all(isinstance(each, str | int | float) and len(str(each)) <= 5000 for each in texts)
    return are_texts and all(isinstance(name, str) and re.fullmatch(TAG, name) for name in value)


def are_turns(value: Any) -> bool:
    """Whether it is a mapping of plain names, empty or not, to mappings with `params` each; `every` is a count."""
    if not isinstance(value, Mapping):
        return False
    return all(
        str(name).isidentifier()
        and isinstance(one, Mapping)
        and _are(one.get("params"), str)
        and type(one.get("every", 1)) is int
        and one.get("every", 1) >= 1
        for name, one in value.items()
    )


#: what all files of an open group share
SHARED = {"data": Data, "model": Model, "optimizer": Optimizer}


@dataclass
class Config:
    """The top-level keys; data, model, task, optimizer and scheduler also carry their `_target_`'s arguments."""

    device: Any = field(default=MISSING, metadata={"limits": {"type": ["string", "array"], "examples": DEVICES}})
    seed: int = _value("0 or more, below 2**63", lambda value: 0 <= value < 2**63, 0, minimum=0, exclusiveMaximum=2**63)
    name: str | None = _value("at most 250 characters", lambda value: len(value) <= 250, "baseline", maxLength=250)
    data: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    scheduler: dict[str, Any] = MISSING
    train: Train = field(default_factory=Train)
    metrics: Metrics = field(default_factory=Metrics)
    placement: Placement = field(default_factory=Placement)
    tracking: Tracking = field(default_factory=Tracking)
    backends: Backends = field(default_factory=Backends)
    facts: Facts = field(default_factory=Facts)
    sweep: Sweep = field(default_factory=Sweep)
    plan: Plan = field(default_factory=Plan)


@functools.cache
def secret_keys() -> tuple[str, ...]:
    """The dotted keys of the fields that are declared with `secret=True`. Of `tracking.uri` only the credentials are secret."""

    def below(schema: type, prefix: str) -> Iterator[str]:
        for item in fields(schema):
            if is_dataclass(
                inner := SHARED.get(item.name, item.default_factory) if not prefix else item.default_factory
            ):
                yield from below(inner, f"{prefix}{item.name}.")
            elif item.metadata.get("secret"):
                yield f"{prefix}{item.name}"

    return tuple(below(Config, ""))


@functools.cache  # 20 ms, and a command composes more than once
def register() -> None:
    """Gives Hydra the schema that conf/config.yaml and rerun.yaml name first in their defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config, provider="runner")
