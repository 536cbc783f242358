"""The keys of a configuration: names, types, ranges and their words, as dataclasses. Defaults and comments are in conf/.

A rule is a part of JSON Schema: `fits()` checks values by it, and `runner.config.json_schema` writes it for editors.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING, OmegaConf

Rule = Mapping[str, Any]

PRECISIONS = ("fp32", "bf16", "fp16", "tf32", "fp64", "auto")
#: offered by an editor; runner.device.choose knows all forms
DEVICES = ["auto", "cpu", "cuda", "cuda:0", "mps", "xpu", "all"]
#: when a hook is called: before the first step, after each evaluation, and with the best weights after the test
MOMENTS = ("start", "epoch", "end")
#: the tags that runs and sweeps set in MLflow
OWN_TAGS = (
    "device|device_name|device_reason|git_commit|git_dirty|changed|reproduces|sweep"
    "|best_job|best_job_name|best_job_run_id|goals|max_seeds"
)
#: the names of custom tags; MLflow refuses others
TAG = rf"^(?!({OWN_TAGS})$|mlflow\.|runner|[./]|.*(//|/\.|/$))[\w.\-: /]{{1,250}}$"
TEXT: Rule = {"type": "string"}
PATTERNS: Rule = {"type": ["string", "array", "null"], "items": TEXT}
COUNT: Rule = {"type": "integer", "minimum": 1}
WEIGHT: Rule = {"type": "number", "minimum": 0}
ZERO: Rule = {"enum": [0]}


def _one_or_more(kind: Rule) -> Rule:
    return {"anyOf": [kind, {"type": "array", "items": kind, "minItems": 1}]}


HOOK_KEYS = {"_target_": TEXT, "at": _one_or_more({"enum": [*MOMENTS]})}
HOOK: Rule = {"type": ["string", "object"], "required": ["_target_"], "properties": HOOK_KEYS}
HOOKS: Rule = {"type": "array", "items": HOOK}
TURN: Rule = {"type": "object", "properties": {"params": _one_or_more(TEXT), "every": COUNT}, "required": ["params"]}
TURNS: Rule = {"type": "object", "propertyNames": {"pattern": r"^[^\W\d]\w*$"}, "additionalProperties": TURN}
GROUP: Rule = {"type": "object", "properties": {"match": TEXT}, "required": ["match"]}
KEPT: Rule = {"type": "string", "pattern": "^(every_epoch|(last|best):[1-9][0-9]*)$"}
ADDRESS: Rule = {"type": "string", "pattern": "^https?://.+"}
LORA: Rule = {
    "type": ["object", "null"],
    "required": ["match"],
    "propertyNames": {"enum": ["match", "rank", "alpha", "train"]},
    "properties": {
        "match": _one_or_more(TEXT),
        "rank": COUNT,
        "alpha": {"type": "number", "exclusiveMinimum": 0},
        "train": _one_or_more(TEXT),
    },
}
FOLD: Rule = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+(/[0-9]+)?$"}]}
SAMPLERS: list[Rule] = [
    {"enum": ["balanced"]},
    {"type": "array", "items": WEIGHT, "not": {"items": ZERO}},
    {"type": "object", "additionalProperties": WEIGHT, "not": {"additionalProperties": ZERO}},
]
COMPARISON: Rule = {"type": "string", "pattern": r"^[<>]=? *[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$"}
COMPARISONS: Rule = {"type": "object", "additionalProperties": COMPARISON}
TAG_TEXT: Rule = {"type": ["string", "number", "boolean"], "maxLength": 5000}
TAGS: list[Rule] = [
    {"type": "object", "propertyNames": {"pattern": TAG}, "additionalProperties": TAG_TEXT},
    {"type": "array", "items": {"type": "string", "pattern": TAG}},
]
ZIP: list[Rule] = [{"type": "object"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]


def _is_kind(value: Any, kinds: str | list[str]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    is_of = {
        "null": value is None,
        "boolean": isinstance(value, bool),
        "integer": is_number and isinstance(value, int),
        "number": is_number,
        "string": isinstance(value, str),
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
    }
    return any(is_of[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds))


#: the keywords of JSON Schema that rules use; those of lists and mappings hold for any other value
KEYWORDS: dict[str, Callable[[Any, Any], bool]] = {
    "type": _is_kind,
    "enum": lambda value, choices: value in choices,
    "anyOf": lambda value, rules: any(fits(value, rule) for rule in rules),
    "not": lambda value, rule: not fits(value, rule),
    "minimum": lambda value, limit: value >= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "pattern": lambda value, pattern: re.fullmatch(pattern, str(value)) is not None,
    "maxLength": lambda value, limit: len(str(value)) <= limit,
    "minItems": lambda value, limit: len(value) >= limit,
    "items": lambda value, rule: not isinstance(value, list) or all(fits(each, rule) for each in value),
    "required": lambda value, names: not isinstance(value, dict) or all(name in value for name in names),
    "properties": lambda value, rules: (
        not isinstance(value, dict) or all(fits(value[name], rule) for name, rule in rules.items() if name in value)
    ),
    "additionalProperties": lambda value, rule: (
        not isinstance(value, dict) or all(fits(each, rule) for each in value.values())
    ),
    "propertyNames": lambda value, rule: all(fits(name, rule) for name in value),
}


def fits(value: Any, rule: Rule) -> bool:
    """Return whether a plain value (of lists, mappings and single values) keeps a rule."""
    return all(KEYWORDS[keyword](value, limit) for keyword, limit in rule.items())


def _value(valid: str, example: Any, *, default: Any = MISSING, **rule: Any) -> Any:
    """A field whose values keep a rule: a sentence part that says it, a valid value as it is typed, and its JSON Schema.

    The default is the value of a run that is older than the key; the default of new runs is in conf/.
    """
    return field(default=default, metadata={"valid": valid, "example": str(example), "rule": rule})


def _one_of(*choices: str) -> Any:
    return _value("one of " + ", ".join(choices), choices[0], enum=choices)


def _at_least(least: int, **otherwise: Any) -> Any:
    return _value(f"{least} or more", max(least, 1), minimum=least, **otherwise)


def _count_or(*choices: str, least: int = 1) -> Any:
    rule = [{"enum": [*choices]}, {"type": "integer", "minimum": least}]
    return _value(f"{', '.join(choices)} or a whole number, {least} or more", choices[0], anyOf=rule)


def _more_than_zero() -> Any:
    return _value("more than 0", 1, exclusiveMinimum=0)


def _fraction(*, one: bool = False) -> Any:
    if one:
        return _value("more than 0 and at most 1", 0.5, exclusiveMinimum=0, maximum=1)
    return _value("0 or more and less than 1", 0.1, minimum=0, exclusiveMaximum=1)


@dataclass
class DataKeys:
    """The keys of every data set; the other keys of `data` are the arguments of its `_target_`."""

    name: str | None = MISSING
    val_fraction: float = _fraction()
    test_fraction: float | None = _fraction()
    limit: int | None = _at_least(1)
    fold: Any = _value("null, a fold's number from 0, or K/N for fold K of N", "0", **FOLD)
    num_folds: int | None = _at_least(2)
    sampler: Any = _value(
        "null, balanced, or weights of 0 or more, not all of them 0: [1,3] by class, or {NAME: 3}",
        "balanced",
        anyOf=SAMPLERS,
    )
    residency: str = _one_of("auto", "device", "stream")
    num_workers: int | None = _at_least(0)


@dataclass
class ModelKeys:
    """The keys of every model; the other keys of `model` are the arguments of its `_target_`."""

    weights: str | None = MISSING
    strict: bool = MISSING
    freeze: Any = _value("a pattern of names, or a list of them", "[encoder]", **PATTERNS)
    head_only: bool = MISSING
    lora: Any = _value(
        "null or {match: PATTERN, rank: N, alpha: NUMBER, train: PATTERN}", "{match: blocks, rank: 8}", **LORA
    )


@dataclass
class OptimizerKeys:
    """The keys of every optimizer; the other keys of `optimizer` are the arguments of its `_target_`."""

    groups: Any = _value(
        "a list of {match: PATTERN, SETTING: ...}", "[{match: encoder, lr: 0.0001}]", type="array", items=GROUP
    )
    no_decay: str | None = _one_of("norms_and_biases")
    turns: Any = _value(
        "{NAME: {params: PATTERN, every: N, SETTING: ...}}",
        "{critic: {params: critic}, generator: {params: generator, lr: 0.0001}}",
        **TURNS,
    )


@dataclass
class SchedulerKeys:
    """The keys of every schedule; the other keys of `scheduler` are the arguments of its `_target_`."""

    interval: str | None = _one_of("step", "epoch")


@dataclass
class EarlyStoppingKeys:
    metric: str | None = MISSING
    mode: str | None = _one_of("min", "max")
    patience: int | None = _at_least(1)


@dataclass
class TrainKeys:
    check: bool = False  # older runs don't have it
    num_epochs: int = _at_least(1)
    num_steps: int | None = _at_least(1)
    batch_size: int = _at_least(1)
    eval_batch_size: int | None = _at_least(1)
    precision: str = _one_of(*PRECISIONS)
    compile: bool = MISSING
    cuda_graph: bool = MISSING
    accumulate_steps: int = _at_least(1)
    clip_grad_norm: float | None = _more_than_zero()
    ema_decay: float | None = _value("more than 0 and less than 1", 0.999, exclusiveMinimum=0, exclusiveMaximum=1)
    early_stopping: EarlyStoppingKeys = field(default_factory=EarlyStoppingKeys)
    stop_when: Any = _value(
        "{METRIC: COMPARISON}, with a comparison such as <0.1, <=0.1, >0.9 or >=0.9",
        "{val/loss: '<1e-3'}",
        default=None,
        **COMPARISONS,
    )
    max_seconds: float | None = _more_than_zero()
    grace_seconds: float = _more_than_zero()
    on_oom: str = _one_of("fail", "split")
    on_nonfinite: str = _value("one of fail, skip, rollback", "skip", default="fail", enum=["fail", "skip", "rollback"])
    deterministic: bool = MISSING
    checkpoint_every_seconds: float | None = _more_than_zero()
    checkpoint_every_steps: int | None = _at_least(1)
    evaluate_every_steps: int | None = _at_least(1)
    keep_checkpoints: Any = _value("every_epoch, last:K or best:K, with K from 1 on", "last:3", anyOf=[KEPT])
    profile: int | None = _at_least(1)
    clocked_steps: int | None = _at_least(1, default=50)
    hooks: Any = _value(
        f"a list of functions, each by its name or as {{_target_: NAME, at: {', '.join(MOMENTS[:-1])} or {MOMENTS[-1]}}}",
        "[my_hooks.norms]",
        **HOOKS,
    )
    recompute: Any = _value("a pattern of module paths, or a list of them", "[layers.*]", default=None, **PATTERNS)
    num_processes: Any = _count_or("auto")
    max_restarts: int = _at_least(0)


@dataclass
class MetricsKeys:
    every: int = _at_least(1)
    pull_every: int = _at_least(1)


@dataclass
class PlacementKeys:
    init: str = _one_of("host", "device")
    guard: str = _one_of("first_step", "always", "off")
    strategy: str = _one_of("ddp", "fsdp")
    unused_parameters: bool = MISSING


@dataclass
class TrackingKeys:
    uri: str = MISSING
    experiment: str | None = MISSING
    enabled: bool = MISSING
    log_model: Any = _value("true, false or all", "true", enum=[True, False, "all"])
    system_metrics: bool = MISSING
    points: Any = _count_or("all", least=100)
    grace_seconds: float = _at_least(0)
    tags: Any = _value(
        "{NAME: TEXT} or a list of names, without the names that a run sets itself; a text has at most 5000 characters",
        "{team: vision}",
        default=None,
        anyOf=TAGS,
    )
    description: str | None = _value("a text of at most 3000 characters", "'a first try'", default=None, maxLength=3000)
    git_diff: bool = True
    tensorboard: bool = False
    trackers: Any = _value("a list of names of trackers", "[]", default=None, type="array", items=TEXT)


@dataclass
class NotifyKeys:
    url: Any = _value("an address that begins with http:// or https://", "http://127.0.0.1:8000", anyOf=[ADDRESS])


@dataclass
class CpuKeys:
    num_threads: int | None = _at_least(1)
    channels_last: bool | None = MISSING
    onednn: bool | None = MISSING


@dataclass
class CudaKeys:
    memory_fraction: float | None = _fraction(one=True)
    cudnn_benchmark: bool = MISSING
    cudnn_tf32: bool = False  # of runs that are older than the key
    channels_last: bool | None = MISSING


@dataclass
class MpsKeys:
    memory_fraction: float | None = _fraction(one=True)


@dataclass
class BackendsKeys:
    cpu: CpuKeys = field(default_factory=CpuKeys)
    cuda: CudaKeys = field(default_factory=CudaKeys)
    mps: MpsKeys = field(default_factory=MpsKeys)


@dataclass
class FactsKeys:
    """Facts about the data, which the run fills in after reading it and before building the model."""

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
class SlotsKeys:
    """How many jobs of a sweep run at a time on one device of each kind."""

    cpu: int = _at_least(1)
    cuda: int = _at_least(1)
    mps: int = _at_least(1)
    xpu: int = _at_least(1)


@dataclass
class SweepKeys:
    strict: bool = MISSING
    resume: str | None = MISSING
    retry: bool = MISSING
    grace_seconds: float = _at_least(0)
    slots: SlotsKeys = field(default_factory=SlotsKeys)
    batch: Any = _count_or("auto", "off")
    until: str | None = _one_of("decided")
    max_seeds: int = _at_least(1)
    max_seconds: float | None = _more_than_zero()
    zip: Any = _value("lists of values by key, or several such mappings in a list", "null", anyOf=ZIP)


@dataclass
class PlanKeys:
    """What `python -m runner plan` assumes about the device; runs ignore it."""

    device_memory: Any = MISSING
    device_name: str | None = MISSING
    folder: str = MISSING


@dataclass
class GridKeys:
    """The settings of hydra/sweeper=grid."""

    params: dict[str, Any] | None = MISSING


@dataclass
class SearchKeys:
    """The settings of hydra/sweeper=optuna."""

    n_trials: int = _at_least(1)
    metric: Any = _value("a metric's name, or a list of names", "val/loss", **_one_or_more(TEXT))
    direction: Any = _value(
        "minimize or maximize, or a list of them", "minimize", **_one_or_more({"enum": ["minimize", "maximize"]})
    )
    sampler: str = _one_of("tpe", "random", "grid", "cmaes", "nsga2")
    seed: int = _value("0 or more, below 2**31", 0, minimum=0, exclusiveMaximum=2**31)
    pruner: str | None = _one_of("auto", "median", "none")
    warmup_epochs: int = _at_least(0)
    startup_trials: int = _at_least(0)
    batch: int = _at_least(1)
    params: dict[str, Any] | None = MISSING


#: the keys that all files of an open group share
SHARED = {"data": DataKeys, "model": ModelKeys, "optimizer": OptimizerKeys, "scheduler": SchedulerKeys}


@dataclass
class Config:
    """The top-level keys; data, model, task, optimizer and scheduler also carry their `_target_`'s arguments."""

    device: Any = field(default=MISSING, metadata={"rule": {"type": ["string", "array"], "examples": DEVICES}})
    seed: int = _value("0 or more, below 2**63", 0, minimum=0, exclusiveMaximum=2**63)
    name: str | None = _value("at most 250 characters", "baseline", maxLength=250)
    data: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    task: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING
    scheduler: dict[str, Any] = MISSING
    train: TrainKeys = field(default_factory=TrainKeys)
    metrics: MetricsKeys = field(default_factory=MetricsKeys)
    placement: PlacementKeys = field(default_factory=PlacementKeys)
    tracking: TrackingKeys = field(default_factory=TrackingKeys)
    backends: BackendsKeys = field(default_factory=BackendsKeys)
    facts: FactsKeys = field(default_factory=FactsKeys)
    sweep: SweepKeys = field(default_factory=SweepKeys)
    notify: NotifyKeys = field(default_factory=NotifyKeys)
    plan: PlanKeys = field(default_factory=PlanKeys)


#: each type as the schema writes it: how a message names it, and a value
KINDS = {
    "int": ("a whole number", "10"),
    "float": ("a number", "0.5"),
    "bool": ("true or false", "true"),
    "str": ("a text", "name"),
}


@dataclass(frozen=True)
class Key:
    """A key with a value: its type and its rule. `valid` says the rule, and `example` is a value as it is typed."""

    schema: type
    name: str
    kind: str  # as the schema writes it: int | None
    rule: Rule
    valid: str
    example: str

    def typed(self, value: Any) -> Any:
        """Return a value with the type of the key. Raises: OmegaConfBaseException."""
        if self.kind == "Any":  # it would keep the type of its first value
            return value
        node = _scratch(self.schema)
        node[self.name] = value
        return node[self.name]

    def allows(self, value: Any) -> bool:
        """Return whether a value of the right type keeps the rule."""
        if value is None or not self.valid:
            return True
        return fits(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value, self.rule)


@functools.cache
def structured(schema: type) -> Any:
    """Return an object that gives its values the types of a schema."""
    return OmegaConf.structured(schema)


@functools.cache
def _scratch(schema: type) -> Any:
    return OmegaConf.structured(schema)


@functools.cache
def subgroups(schema: type) -> dict[str, type]:
    """Return the schemas of the groups right below a schema, by name."""
    factories: list[tuple[str, Any]] = [(item.name, item.default_factory) for item in fields(schema)]
    return {name: each for name, each in factories if isinstance(each, type) and is_dataclass(each)}


@functools.cache
def keys(schema: type) -> dict[str, Key]:
    """Return the keys right below a schema that have a value, by name."""
    result = {}
    for item in fields(schema):
        rule, kind = item.metadata, str(item.type)
        example = rule.get("example") or KINDS.get(kind.split(" ")[0], ("", "null"))[1]
        if item.name not in subgroups(schema):
            result[item.name] = Key(schema, item.name, kind, rule.get("rule", {}), rule.get("valid", ""), example)
    return result


def find_key(path: str) -> Key | None:
    """Return the key of a dotted path, also of `data`; None for an argument of a `_target_`."""
    *groups, name = path.split(".")
    schema: type | None = Config
    for group in groups:
        schema = DataKeys if (schema, group) == (Config, "data") else subgroups(schema).get(group) if schema else None
    return keys(schema).get(name) if schema else None


@functools.cache  # 20 ms, and a command composes more than once
def register() -> None:
    """Give Hydra the keys that conf/config.yaml and rerun.yaml name first in their defaults, without their types.

    `validate.give_types()` adds the types, and finds every value that does not fit; Hydra would stop at the first.
    """
    from hydra.core.config_store import ConfigStore

    keys = OmegaConf.to_container(OmegaConf.structured(Config))
    ConfigStore.instance().store(name="schema", node=keys, provider="runner")
