"""The composed configuration goes in; every fault in it comes out, all at once. Values and defaults stand in conf/."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from runner.errors import Fault, nearest

#: the keys whose nodes are built from their `_target_`
BUILT = ("data", "model", "task", "optimizer", "scheduler")
PRECISIONS = ("fp32", "bf16", "fp16", "tf32")
STORES = ("sqlite:", "http://", "https://", "postgresql", "mysql", "mssql", "databricks")


def _value(valid: str, check: Callable[[Any], bool], example: Any) -> Any:
    """A field whose value must pass `check`; `valid` says in words what does. Its default stands in conf/."""
    return field(default=MISSING, metadata={"valid": valid, "check": check, "example": example})


def _one_of(*choices: str) -> Any:
    return field(default=MISSING, metadata={"valid": "one of " + ", ".join(choices), "choices": choices})


def _at_least(least: int) -> Any:
    return _value(f"{least} or more", lambda value: value >= least, max(least, 1))


def _auto_or_count() -> Any:
    text = "auto or a whole number, 1 or more"
    return _value(text, lambda value: value == "auto" or (type(value) is int and value >= 1), "auto")


def _more_than_zero() -> Any:
    return _value("more than 0", lambda value: value > 0, 1)


def _fraction(*, one: bool = False) -> Any:
    if one:
        return _value("more than 0 and at most 1", lambda value: 0 < value <= 1, 0.5)
    return _value("0 or more and less than 1", lambda value: 0 <= value < 1, 0.1)


@dataclass
class Data:
    """What every data set has; the other keys of `data` are the arguments of its `_target_`."""

    name: str | None = MISSING
    val_fraction: float = _fraction()
    test_fraction: float = _fraction()
    limit: int | None = _at_least(1)
    residency: str = _one_of("auto", "device", "stream")
    num_workers: int | None = _at_least(0)


@dataclass
class EarlyStopping:
    metric: str | None = MISSING
    mode: str | None = _one_of("min", "max")
    patience: int | None = _at_least(1)


@dataclass
class Train:
    num_epochs: int = _at_least(1)
    num_steps: int | None = _at_least(1)
    batch_size: int = _at_least(1)
    eval_batch_size: int | None = _at_least(1)
    precision: str = _one_of(*PRECISIONS)
    compile: bool = MISSING
    cuda_graph: bool = MISSING
    accumulate_steps: int = _at_least(1)
    clip_grad_norm: float | None = _more_than_zero()
    ema_decay: float | None = _value("more than 0 and less than 1", lambda value: 0 < value < 1, 0.999)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    max_seconds: float | None = _more_than_zero()
    deterministic: bool = MISSING
    checkpoint_every_seconds: float | None = _more_than_zero()
    checkpoint_every_steps: int | None = _at_least(1)
    num_processes: Any = _auto_or_count()


@dataclass
class Metrics:
    every: int = _at_least(1)
    pull_every: int = _at_least(1)


@dataclass
class Placement:
    init: str = _one_of("host", "device")
    guard: str = _one_of("first_step", "always", "off")


@dataclass
class Tracking:
    uri: str = MISSING
    experiment: str | None = MISSING
    enabled: bool = MISSING
    log_model: bool = MISSING
    system_metrics: bool = MISSING
    grace_seconds: float = _at_least(0)


@dataclass
class Cpu:
    num_threads: int | None = _at_least(1)


@dataclass
class Cuda:
    memory_fraction: float | None = _fraction(one=True)
    cudnn_benchmark: bool = MISSING


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
    num_steps: int = MISSING


@dataclass
class Config:
    """The top-level keys; data, model, task, optimizer and scheduler also carry their `_target_`'s arguments."""

    device: Any = MISSING
    seed: int = _value("0 or more, below 2**63", lambda value: 0 <= value < 2**63, 0)
    name: str | None = MISSING
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


def register() -> None:
    """Gives Hydra the schema that conf/config.yaml and rerun.yaml name first in their defaults."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config, provider="runner")


def faults(cfg: DictConfig) -> list[Fault]:
    """Everything in `cfg` that can be told to be wrong without building anything; empty when it is sound."""
    found = [*_unknown_keys(cfg), *_interpolations(cfg, "")]
    found += [fault for key, node, schema in _typed_nodes(cfg) for fault in _bad_values(node, schema, key)]
    found += [fault for key in BUILT for fault in _missing(cfg._get_node(key), key)]
    found += _uri(cfg) + _early_stopping(cfg)
    return found


def shared_data_settings(cfg: DictConfig) -> dict[str, Any]:
    """The part of `cfg.data` that every data set has."""
    return {item.name: cfg.data[item.name] for item in fields(Data)}


def target_node(cfg: DictConfig, key: str, *, resolve: bool = False) -> dict[str, Any]:
    """What `build()` gets of a top-level key, as plain values. resolve: with its ${...} filled in."""
    node: dict[str, Any] = OmegaConf.to_container(cfg[key], resolve=resolve)  # type: ignore[assignment]
    shared = {item.name for item in fields(Data)} if key == "data" else set()
    return {name: value for name, value in node.items() if name not in shared}


def without_password(uri: str) -> str:
    """The URI as it may be printed, logged and tracked."""
    return re.sub(r"(://[^:/@]*):.*@", r"\1:***@", uri)  # to the last @: a password may hold one


def all_keys(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, inner nodes too."""
    for key in cfg if OmegaConf.is_dict(cfg) else ():
        yield f"{prefix}{key}"
        yield from all_keys(cfg._get_node(key), f"{prefix}{key}.")


def suggest_keys(wanted: str, known: list[str]) -> list[str]:
    """The keys that `wanted` may have meant: the same last word elsewhere first, then what looks alike."""
    parent, _, leaf = wanted.rpartition(".")
    if parent:
        known = [key for key in known if "." in key]
        siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
        if hits := nearest(leaf, siblings):
            return [siblings[hit] for hit in hits]
    same_leaf = [key for key in known if key.rsplit(".", 1)[-1] == leaf]
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
    near_leaf = [by_leaf[hit] for hit in nearest(leaf, by_leaf)]
    return list(dict.fromkeys([*same_leaf, *nearest(wanted, known), *near_leaf]))[:3]


def _unknown_keys(cfg: DictConfig) -> list[Fault]:
    unknown = list(_unknown(cfg, Config, ""))
    known = [
        key
        for key in all_keys(cfg)
        if not any(key == name or key.startswith(f"{name}.") for name in [*unknown, "hydra"])
    ]
    found = []
    for name in unknown:
        write = " or ".join(f"{hit}=..." for hit in suggest_keys(name, known)) or "a key that --cfg job prints"
        found.append(Fault(f"{name}={OmegaConf.select(cfg, name)}", f"there is no key {name}", write))
    return found


def _unknown(node: DictConfig, schema: type, prefix: str) -> Iterator[str]:
    """The keys that the schema does not have. Below data, model, ... their targets' arguments decide (runner.targets)."""
    inner = {item.name: item.default_factory for item in fields(schema)}
    for key in map(str, node):
        child = node._get_node(key)
        if key not in inner and (prefix or key != "hydra"):
            yield prefix + key
        elif key in inner and is_dataclass(inner[key]) and OmegaConf.is_dict(child):
            yield from _unknown(child, inner[key], f"{prefix}{key}.")  # type: ignore[arg-type]


def _typed_nodes(cfg: DictConfig) -> Iterator[tuple[str, Any, type]]:
    """Each node with the dataclass that describes it; `data` is open, and its shared keys are checked apart."""
    yield "", cfg, Config
    described: tuple[tuple[str, type], ...] = (
        ("train", Train),
        ("train.early_stopping", EarlyStopping),
        ("metrics", Metrics),
        ("placement", Placement),
        ("tracking", Tracking),
        ("backends.cpu", Cpu),
        ("backends.cuda", Cuda),
        ("backends.mps", Mps),
        ("data", Data),
    )
    for key, schema in described:
        node = OmegaConf.select(cfg, key)
        if OmegaConf.is_dict(node):
            yield f"{key}.", node, schema


def _bad_values(node: DictConfig, schema: type, prefix: str) -> Iterator[Fault]:
    typed = OmegaConf.structured(schema)
    names = [item.name for item in fields(schema) if not is_dataclass(item.default_factory)]
    if prefix and not any(node._get_node(name) is not None and not OmegaConf.is_missing(node, name) for name in names):
        group = prefix.rstrip(".")
        yield Fault(f"~{group}", f"{group} is needed and has no values", f"{group}=default, or no word of it at all")
        return
    for item in fields(schema):
        if node._get_node(item.name) is None or OmegaConf.is_missing(node, item.name):
            yield Fault(
                f"no {prefix}{item.name}", f"{prefix}{item.name} is needed and has no value", f"{prefix}{item.name}=..."
            )
            continue
        try:
            value = node[item.name]
            typed[item.name] = value
            value = typed[item.name]
        except (InterpolationKeyError, InterpolationResolutionError):
            continue  # told by _interpolations
        except OmegaConfBaseException:
            yield wrong_type(f"{prefix}{item.name}", str(node._get_node(item.name)), str(item.type))
            continue
        if value is not None:
            yield from _bad_value(f"{prefix}{item.name}", value, item.metadata)


def _bad_value(key: str, value: Any, rule: Any) -> Iterator[Fault]:
    if "choices" in rule and value not in rule["choices"]:
        hits = nearest(str(value), rule["choices"]) or rule["choices"]
        yield Fault(f"{key}={value}", f"{key} is {rule['valid']}", " or ".join(f"{key}={hit}" for hit in hits))
    elif "check" in rule and not rule["check"](value):
        yield Fault(f"{key}={value}", f"{key} must be {rule['valid']}", f"{key}={rule['example']}, say")


def kind_of(key: str) -> str | None:
    """The type that the schema gives a dotted key, as it is written there; None for a key below data, model, ..."""
    schema: Any = Config
    *groups, leaf = key.split(".")
    for name in groups:
        inner = {item.name: item.default_factory for item in fields(schema)}.get(name)
        schema = Data if name == "data" and schema is Config else inner
        if not is_dataclass(schema):
            return None
    return next((str(item.type) for item in fields(schema) if item.name == leaf), None)


def wrong_type(key: str, value: str, kind: str) -> Fault:
    """The fault of a value that its key's type does not take; `kind` as the schema writes it, e.g. "int | None"."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    parts = [
        words.get(part.strip(), "null" if part.strip() == "None" else "a group of keys") for part in kind.split("|")
    ]
    example = {"int": "10", "float": "0.5", "bool": "true", "str": "name"}.get(kind.split("|")[0].strip())
    write = f"{key}={example}, say" if example else f"{key}.KEY=VALUE for the keys below it (--cfg job lists them)"
    return Fault(f"{key}={value}", f"{key} is {' or '.join(parts)}, and {value!r} is not", write)


def _interpolations(node: Any, prefix: str) -> Iterator[Fault]:
    """Every ${...} that leads nowhere. One to a fact that is not known yet is sound."""
    keys = node if OmegaConf.is_dict(node) else range(len(node)) if OmegaConf.is_list(node) else ()
    for key in keys:
        if not prefix and key == "hydra":
            continue
        child = node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            try:
                node[key]
            except (InterpolationKeyError, InterpolationResolutionError) as error:
                if (
                    "???" in str(error)
                    or "MissingMandatoryValue" in str(error)
                    or "missing value" in str(error).lower()
                ):
                    continue
                text = str(child._value())
                wanted = text.strip("${} ")
                known = [name for name in all_keys(node._get_root()) if not name.startswith("hydra")]
                hits = suggest_keys(wanted, known)
                write = " or ".join(f"${{{hit}}}" for hit in hits) or "a key that --cfg job prints"
                yield Fault(f"{prefix}{key}={text}", f"{wanted} does not exist in this configuration", write)
            except OmegaConfBaseException:
                continue  # a fact that the data will fill in
        else:
            yield from _interpolations(child, f"{prefix}{key}.")


def _missing(node: Any, prefix: str) -> Iterator[Fault]:
    """Arguments that a file leaves to the person (`path: ???`)."""
    if not OmegaConf.is_dict(node) or node._is_missing() or node._is_none():
        return
    if OmegaConf.is_missing(node, "_target_") or (prefix != "scheduler" and not node.get("_target_")):
        so = f"{prefix} has no _target_: nothing says what to build"
        yield Fault(f"{prefix}=...", so, f"{prefix}=OPTION for a file in conf/{prefix}/, with its _target_ line")
    for key in map(str, node):
        if key != "_target_" and OmegaConf.is_missing(node, key):
            yield Fault(f"no {prefix}.{key}", f"{prefix}.{key} is needed and has no value", f"{prefix}.{key}=...")
        elif OmegaConf.is_dict(child := node._get_node(key)) and child.get("_target_"):
            yield from _missing(child, f"{prefix}.{key}")


def _uri(cfg: DictConfig) -> list[Fault]:
    try:
        uri = str(cfg.tracking.uri)
    except OmegaConfBaseException:
        return []
    asked = f"tracking.uri={without_password(uri)}"
    if uri.startswith(STORES):
        return []
    if "://" not in uri.replace("file://", "") or uri.startswith("file:"):
        so = "MLflow has retired its file store (folders such as mlruns); it keeps runs in a database or on a server"
    else:
        so = f"MLflow has no store for {uri.split(':')[0]}://"
    return [Fault(asked, so, "tracking.uri=sqlite:///mlflow.db or tracking.uri=http://127.0.0.1:5000")]


def _early_stopping(cfg: DictConfig) -> list[Fault]:
    stop = OmegaConf.select(cfg, "train.early_stopping")
    if OmegaConf.is_dict(stop) and stop.get("mode") and not stop.get("metric") and not stop.get("patience"):
        write = "train.early_stopping.patience=5"
        return [Fault(f"train.early_stopping.mode={stop.mode}", "early stopping is off while patience is null", write)]
    return []
