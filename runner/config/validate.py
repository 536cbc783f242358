"""Finds every error of a composed configuration, all at once, and what to type instead."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, NamedTuple

from omegaconf import Container, DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from runner.config import other_names
from runner.config.identity import REMOVED, leaves
from runner.config.instantiate import BUILT as BUILT
from runner.config.instantiate import PARTIAL, options_with
from runner.config.schema import Config, Data, fits
from runner.config.secrets import HIDDEN, uri_problems
from runner.errors import Problem, nearest
from runner.errors import without_password as without_password  # for other modules

#: the number of folds where `data.num_folds` is null
NUM_FOLDS = 5
#: an example for each type of the schema
EXAMPLES = {"int": "10", "float": "0.5", "bool": "true", "str": "name"}
UNSET = re.compile(r"Environment variable '(\w+)' not found")
PRINTED = "use a key that `--cfg job` prints"
BELOW = "the arguments of a part are below " + ", ".join(BUILT)


def groups(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every group of the schema by its dotted key, the whole configuration first. The data fills in `facts`."""
    yield prefix, schema
    for item in fields(schema):
        inner = Data if (schema, item.name) == (Config, "data") else item.default_factory
        if isinstance(inner, type) and is_dataclass(inner) and item.name != "facts":
            yield from groups(inner, f"{prefix}.{item.name}".lstrip("."))


class Misfit(NamedTuple):
    """A value that the schema has no place for, or another type."""

    key: str
    value: Any
    kind: str | None  # the type of the key, as the schema writes it; None: the schema does not have it


def give_types(cfg: DictConfig) -> list[Misfit]:
    """Give the values of a composed configuration the types of the schema; remove and return those that do not fit."""
    with open_dict(cfg):
        found = list(_take_misfits(cfg, Config, ""))
        for item in fields(Config):
            if item.name in cfg and is_dataclass(item.default_factory):
                cfg[item.name] = OmegaConf.merge(_structured(item.default_factory), cfg[item.name])
    return [each for each in found if each.key not in REMOVED or each.value is not None]


def _take_misfits(node: DictConfig, schema: type, prefix: str) -> Iterator[Misfit]:
    items = {item.name: item for item in fields(schema)}
    for name in list(node):
        key, child = f"{prefix}{name!s}", node._get_node(name)
        item = items.get(str(name))
        kind = None if item is None else str(item.type)
        if item is not None and is_dataclass(inner := item.default_factory) and _is_written(child):
            yield from _take_misfits(child, inner, f"{key}.")
        elif key != "hydra" and not (item is not None and _has_type(schema, item, child)):
            yield Misfit(key, _plain(child), kind)
            del node[name]


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) and not node._is_none() else node._value()


def _has_type(schema: type, item: Field[Any], node: Any) -> bool:
    if is_dataclass(item.default_factory):
        return False  # a value in place of a group
    if item.type == "Any" or node._is_interpolation():
        return True
    value = _plain(node)
    if str(item.type).startswith("bool") and isinstance(value, int | float) and not isinstance(value, bool):
        return False  # OmegaConf takes numbers for true
    try:
        _typed(schema)[item.name] = value
    except OmegaConfBaseException:
        return False
    return True


def problems(cfg: DictConfig) -> list[Problem]:
    """Return every error that can be found without building anything."""
    found = [*_interpolations(cfg, "")]
    for key, schema in groups():
        node = _group(cfg, key)
        found += _bad_values(node, schema, key) if node is not None else []
    for key in BUILT:
        found += _missing(cfg._get_node(key), key)
    return [
        *found,
        *_uri(cfg),
        *_hidden(cfg),
        *_folds(cfg),
        *_early_stopping(cfg),
        *_constant(cfg),
    ]


def setting_problems(node: DictConfig, schema: type, key: str) -> list[Problem]:
    """Return every error in the names and values of settings that are not part of `Config`."""
    known = [item.name for item in fields(schema)]
    found = []
    for name in map(str, node):
        if name not in known and name != "_target_":
            ways = [f"{key}.{hit}={node[name]}" for hit in nearest(name, known)]
            otherwise = f"use one of {', '.join(known)}"
            found.append(unknown_key(f"{key}.{name}={node[name]}", f"{key}.{name}", otherwise, ways))
    return [*found, *_bad_values(node, schema, key)]


def unknown_key(source: str, key: str, otherwise: str, ways: Iterable[str] = ()) -> Problem:
    """Return the error of an unknown key; its help is `ways`, which can be typed, or `otherwise`."""
    return Problem.suggest(source, f"there is no key `{key}`", ways, otherwise, code="unknown-key")


def value(cfg: DictConfig, key: str) -> Any:
    """Return the value of a dotted key; None without one, or where its `${...}` can't be resolved, which problems() reports."""
    try:
        return OmegaConf.select(cfg, key)
    except (OmegaConfBaseException, AttributeError):  # below a group without values
        return None


def shared_data_settings(cfg: DictConfig) -> dict[str, Any]:
    """Return the settings that every data set has, converted to their types, which the open group `data` does not do."""
    found = {item.name: converted(Data, item.name, cfg.data[item.name]) for item in fields(Data)}
    return {key: OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for key, each in found.items()}


def how_to_cut(cfg: DictConfig) -> dict[str, Any]:
    """Return the arguments of runner.data.split.split() without the seed."""
    shared = shared_data_settings(cfg)
    cut = {key: shared[key] for key in ("val_fraction", "test_fraction", "limit")}
    return {**cut, "fold": fold_of(shared["fold"], shared["num_folds"])}


def fold_of(fold: Any, num_folds: int | None) -> tuple[int, int] | None:
    """Return `data.fold` and `data.num_folds` as (K, N) for fold K of N, or None without folds."""
    if fold is None:
        return None
    which, _, of = str(fold).partition("/")
    return int(which), int(of or num_folds or NUM_FOLDS)


def of_all_folds(fold: Any) -> str:
    """Return a name for all folds: K for 3, K/5 for 3/5."""
    return re.sub(r"^\d+", "K", str(fold))


def converted(schema: type, name: str, value: Any) -> Any:
    if schema.__annotations__[name] == "Any":  # it would keep the type of its first value
        return value
    typed = _typed(schema)
    typed[name] = value
    return typed[name]


@functools.cache
def _typed(schema: type) -> Any:
    """Return an object of the schema to set values of."""
    return OmegaConf.structured(schema)


@functools.cache
def _structured(schema: type) -> Any:
    return OmegaConf.structured(schema)


def target_node(cfg: DictConfig, key: str, *, resolve: bool = False) -> dict[str, Any]:
    """Return a top-level key's node for `build()` as plain values; with `resolve` its `${...}` are resolved."""
    node: dict[str, Any] = OmegaConf.to_container(cfg[key], resolve=resolve)  # type: ignore[assignment]
    shared = {item.name for item in fields(Data)} if key == "data" else set()
    if key in PARTIAL and node.get("_target_") and not node.get("_partial_"):
        node["_partial_"] = True
    return {name: value for name, value in node.items() if name not in shared}


def all_keys(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration, also those of groups."""
    for key in cfg if _is_written(cfg) else ():
        yield f"{prefix}{key}"
        yield from all_keys(cfg._get_node(key), f"{prefix}{key}.")


def example_of(key: str) -> str | None:
    """Return a valid value of a key of the schema, or of a learning rate."""
    if (found := field_of(key)) is None:
        return "0.001" if key == "optimizer.lr" else None
    rule = found[1].metadata
    return str(rule.get("example") or rule.get("choices", [EXAMPLES.get(str(found[1].type).split(" ")[0], "null")])[0])


def _group(cfg: DictConfig, key: str) -> DictConfig | None:
    node: Any = cfg
    for name in filter(None, key.split(".")):
        node = node._get_node(name, validate_access=False) if _is_written(node) else None  # None after ~sweep
    return node if _is_written(node) else None


def _has(node: DictConfig, name: str) -> bool:
    return node._get_node(name, validate_access=False) is not None and not OmegaConf.is_missing(node, name)


def written(node: DictConfig, name: str) -> str:
    """Return a value as its file or the command line has it, with its `${...}`."""
    child: Any = node._get_node(name)
    return str(child._value())


def _is_written(node: Any, kind: type[Container] = DictConfig) -> bool:
    return isinstance(node, kind) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def _bad_values(node: DictConfig, schema: type, group: str) -> Iterator[Problem]:
    settings = [item for item in fields(schema) if not is_dataclass(item.default_factory)]
    if group and settings and not any(_has(node, item.name) for item in settings):
        fix = f"leave it out, or use `{group}=default`"
        yield Problem(f"~{group}", f"`{group}` is needed and has no values", fix, code="missing-value")
        return
    for item in fields(schema):
        key = f"{group}.{item.name}".lstrip(".")
        if not _has(node, item.name):
            yield _needed(key)
        if not _has(node, item.name) or item not in settings:
            continue
        try:
            value = converted(schema, item.name, node[item.name])
            if not keeps_rule(value, item.metadata):
                yield _bad_value(key, value, item.metadata)
        except InterpolationToMissingValueError:
            text = written(node, item.name)
            problem = f"`{text}` is known when the data is there, and `{key}` is needed before"
            yield Problem(f"{key}={text}", problem, f"set `{key}=...` to the value itself", code="missing-value")
        except (InterpolationKeyError, InterpolationResolutionError, UnsupportedInterpolationType):
            pass  # _interpolations() reports it
        except OmegaConfBaseException:
            yield wrong_type(key, str(node._get_node(item.name)), str(item.type))


def _needed(key: str, fix: str = "") -> Problem:
    return Problem(f"no {key}", f"`{key}` is needed and has no value", fix or f"set `{key}=...`", code="missing-value")


def keeps_rule(value: Any, metadata: Any) -> bool:
    if value is None or "valid" not in metadata:
        return True
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return value in metadata["choices"] if "choices" in metadata else fits(plain, metadata["rule"])


def _bad_value(key: str, value: Any, metadata: Any) -> Problem:
    shown = str(value) if len(str(value)) <= 200 else f"{str(value)[:200]}..."
    ways = [str(metadata.get("example"))]
    if choices := metadata.get("choices"):
        ours = other_names.value_for(key, str(value))
        ways = [ours] if ours in choices else nearest(str(value), choices) or choices
    return Problem.suggest(f"{key}={shown}", f"`{key}` must be {metadata['valid']}", [f"{key}={way}" for way in ways])


def kind_of(key: str) -> str | None:
    """Return the type of a dotted key as the schema writes it; None for an argument of a `_target_`."""
    found = field_of(key)
    return None if found is None else str(found[1].type)


def field_of(key: str) -> tuple[type, Any] | None:
    group, _, leaf = key.rpartition(".")
    schema = dict(groups()).get(group)
    return next(((schema, item) for item in fields(schema) if item.name == leaf), None) if schema else None


def wrong_type(key: str, value: str, kind: str) -> Problem:
    """Return the error of a value of the wrong type. kind: as the schema writes it, e.g., "int | None"."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    parts = [words.get(part.strip(), "null" if part.strip() == "None" else "a group") for part in kind.split("|")]
    example = EXAMPLES.get(kind.split("|")[0].strip())
    kinds = " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    problem = f"`{key}` must be {kinds}, got `{value}`"
    return Problem.suggest(f"{key}={value}", problem, [f"{key}={example}"] if example else [], _below(key))


def _below(key: str) -> str:
    return f"set `{key}.KEY=VALUE` for the keys below it (`--cfg job` lists them)"


def _interpolations(node: Any, prefix: str) -> Iterator[Problem]:
    keys = node if _is_written(node) else range(len(node)) if OmegaConf.is_list(node) else ()
    for key in keys:
        if not prefix and key == "hydra":
            continue
        path, child = f"{prefix}{key}", node._get_node(key)
        if not OmegaConf.is_interpolation(node, key):
            yield from _interpolations(child, f"{path}.")
            continue
        text = str(child._value())
        if path in BUILT or path in ("backends", "facts") or path in dict(groups()):
            problem = f"`{path}` is a group of keys, and a reference brings single values"
            yield Problem(f"{path}={text}", problem, _below(path), code="bad-value")
            continue
        try:
            node[key]
        except UnsupportedInterpolationType:
            problem = f"no resolver has the name in `{text}`"
            fix = "refer to a key with `${GROUP.KEY}`, or to the environment with `${oc.env:NAME}`"
            yield Problem(f"{path}={text}", problem, fix, code="bad-value")
        except (InterpolationKeyError, InterpolationResolutionError) as error:
            if unset := UNSET.search(str(error)):
                yield _unset(path, text, unset[1])
            elif not re.search(r"\?\?\?|missing", str(error), re.IGNORECASE):  # the data fills in a missing fact
                wanted = text.strip("${} ")
                known = [name for name in all_keys(node._get_root()) if not name.startswith("hydra")]
                ways = [shlex.quote(f"{path}=${{{hit}}}") for hit in other_names.suggest_keys(wanted, known)]
                yield unknown_key(f"{path}={text}", wanted, PRINTED, ways)
        except OmegaConfBaseException:
            continue  # a fact, too


def _unset(key: str, text: str, name: str) -> Problem:
    fix = f"run `export {name}=...` before the command, or write `${{oc.env:{name},DEFAULT}}`"
    return Problem(f"{key}={text}", f"the environment variable `{name}` is not set", fix, code="missing-value")


def _missing(node: Any, key: str) -> Iterator[Problem]:
    """Every value of a part that is needed, also of parts, lists and mappings below it."""
    is_list = _is_written(node, ListConfig)
    target = node._get_node("_target_", validate_access=False) if _is_written(node) else None
    if _is_written(node) and (
        OmegaConf.is_missing(node, "_target_")
        or (key in BUILT and key != "scheduler" and (target is None or not target._value()))
    ):
        fix = f"use `{key}=OPTION` for a file in conf/{key}/ with a `_target_` line"
        problem = f"`{key}` has no `_target_`, which says what to build"
        yield Problem(f"{key}=...", problem, fix if key in BUILT else f"set `{key}._target_=...`", code="missing-value")
    for name in range(len(node)) if is_list else node if _is_written(node) else ():
        where = f"{key}[{name}]" if is_list else f"{key}.{name}"
        if not OmegaConf.is_missing(node, name):
            yield from _missing(node._get_node(name), where)
        elif name != "_target_":
            yield _needed(where, f"set `{key}=[...]` with a value for each" if is_list else "")


def _uri(cfg: DictConfig) -> list[Problem]:
    try:
        return uri_problems(str(cfg.tracking.uri))
    except (OmegaConfBaseException, AttributeError):
        return []


def _hidden(cfg: DictConfig) -> list[Problem]:
    found = []
    parts = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [key for key in BUILT if key in cfg]))
    for key, text in ((key, str(each)) for key, each in leaves(parts)):
        if "://" in text and HIDDEN.search(text):
            fix = f"use `{key}={HIDDEN.sub('PASSWORD', text)}`"
            found.append(Problem(f"{key}={text}", "a run directory stores no credentials", fix, code="secret"))
    return found


def _folds(cfg: DictConfig) -> list[Problem]:
    fold, num = value(cfg, "data.fold"), value(cfg, "data.num_folds")
    if fold is None:
        problem, fix = "`data.num_folds` is set, and `data.fold` is null", f"add `-m 'data.fold=range({num})'`"
        return [Problem(f"data.num_folds={num}", problem, fix, code="missing-value")] if num else []
    try:
        which, of = fold_of(fold, num) or (0, 0)
    except (TypeError, ValueError):
        return []
    source = f"data.fold={fold}"
    if num is not None and str(of) != str(num):
        problem = f"`data.fold` has {of} folds, and `data.num_folds` {num}"
        fix = f"use `{source}` without `data.num_folds`"
        return [Problem(f"{source} data.num_folds={num}", problem, fix, (source,), code="conflict")]
    if which < of > 1 or (of < 2 and num is not None):  # data.num_folds is reported
        return []
    total = of if of > 1 else NUM_FOLDS
    problem = f"a fold is one of 2 or more, counted from 0: the last of {total} is {total - 1}"
    ways = [f"data.fold={min(which, total - 1)}/{total}", f"-m 'data.fold=range({total})'"]
    return [Problem.suggest(source, problem, ways)]


def _early_stopping(cfg: DictConfig) -> list[Problem]:
    mode, metric, patience = (value(cfg, f"train.early_stopping.{name}") for name in ("mode", "metric", "patience"))
    if mode and not metric and not patience:
        source, problem = f"train.early_stopping.mode={mode}", "early stopping is off while its patience is null"
        return [Problem.suggest(source, problem, [f"{source} train.early_stopping.patience=5"], code="missing-value")]
    return []


def _constant(cfg: DictConfig) -> list[Problem]:
    node = _group(cfg, "scheduler")
    if node is None or "_target_" in node:
        return []
    problem, fix = "a constant learning rate has no arguments", "leave it out, or choose a schedule: `scheduler=cosine`"
    found = []
    for name in map(str, node):
        if not name.startswith("_") and value(cfg, f"scheduler.{name}") is not None:
            source = f"scheduler.{name}={written(node, name)}"
            ways = [f"{option} {source}" for option in options_with(name, "scheduler")]
            found.append(Problem.suggest(source, problem, ways, fix, code="bad-argument"))
    return found
