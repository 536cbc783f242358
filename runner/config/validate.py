"""Finds every error of a composed configuration, all at once, and what to type instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

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
from runner.config.packages import not_installed
from runner.config.schema import KINDS, Config, DataKeys, Key, keys, structured, subgroups
from runner.config.secrets import HIDDEN, uri_problems
from runner.errors import Problem, nearest

#: trackers of other packages: NAME = "module:Class"
TRACKERS = "runner.trackers"
#: the number of folds where `data.num_folds` is null
NUM_FOLDS = 5
UNSET = re.compile(r"Environment variable '(\w+)' not found")
PRINTED = "use a key that `--cfg job` prints"
BELOW = "the arguments of a part are below " + ", ".join(BUILT)
#: groups whose keys are checked for themselves: the data fills in `facts`, and arguments may replace keys of the others
UNCHECKED_GROUPS = ("facts", "model", "optimizer", "scheduler")


class Misfit(NamedTuple):
    """A value whose key the schema doesn't have, or whose type is wrong."""

    key: str
    value: Any
    kind: str | None  # the type of the key, as the schema writes it; None: the schema does not have it


def give_types(cfg: DictConfig) -> list[Misfit]:
    """Give the values of a composed configuration the types of the schema; remove and return those that do not fit."""
    with open_dict(cfg):
        misfits = list(_take_misfits(cfg, Config, ""))
        for name, schema in subgroups(Config).items():
            if name in cfg:
                cfg[name] = OmegaConf.merge(structured(schema), cfg[name])
    return [each for each in misfits if each.key not in REMOVED or each.value is not None]


def _take_misfits(node: DictConfig, schema: type, prefix: str) -> Iterator[Misfit]:
    for name in list(node):
        path, child = f"{prefix}{name!s}", cast(Any, node._get_node(name))
        key, inner = keys(schema).get(str(name)), subgroups(schema).get(str(name))
        if inner is not None and _is_written(child):
            yield from _take_misfits(child, inner, f"{path}.")
        elif path != "hydra" and (key is None or not _has_type(key, child)):
            kind = key.kind if key else inner.__name__ if inner else None
            yield Misfit(path, _plain(child), kind)
            del node[name]


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) and not node._is_none() else node._value()


def _has_type(key: Key, node: Any) -> bool:
    value = _plain(node)
    if key.kind == "Any" or node._is_interpolation() or node._is_missing():
        return True
    if key.kind.startswith("bool") and isinstance(value, int | float) and not isinstance(value, bool):
        return False  # OmegaConf takes numbers for true
    try:
        key.typed(value)
    except OmegaConfBaseException:
        return False
    return True


def problems(cfg: DictConfig) -> list[Problem]:
    """Return every error that can be found without building anything."""
    uri = value(cfg, "tracking.uri")
    stores = uri_problems(str(uri)) if uri is not None else []
    checks = (_trackers, _hidden, _folds, _early_stopping, _constant)
    return [*_below(cfg, "", Config), *stores, *(problem for check in checks for problem in check(cfg))]


def _trackers(cfg: DictConfig) -> Iterator[Problem]:
    """Yield the error of each tracker that is not installed."""
    if value(cfg, "tracking.tensorboard") is True and find_spec("tensorboard") is None:
        yield from not_installed("tracking.tensorboard=true", "TensorBoard is not installed", "tensorboard").problems
    names = value(cfg, "tracking.trackers")
    installed = entry_points(group=TRACKERS).names if names else set()
    for name in names if OmegaConf.is_list(names) else ():
        if name not in installed:
            ways = [f"tracking.trackers=[{near}]" for near in nearest(str(name), installed)]
            problem, fix = f"no installed package has the tracker `{name}`", "install its package, or leave it out"
            yield Problem.suggest(f"tracking.trackers=[{name}]", problem, ways, fix)


def _below(node: Any, path: str, schema: type | None) -> Iterator[Problem]:
    """Yield every error of the values in a node. schema: Of its keys (None: arguments of a part, which are checked elsewhere)."""
    if schema is not None and path and not any(_has(node, name) for name in (*keys(schema), *subgroups(schema))):
        fix = f"leave it out, or use `{path}=default`"
        yield Problem(f"~{path}", f"`{path}` is needed and has no values", fix, code="missing-value")
        return
    for name in (*keys(schema), *subgroups(schema)) if schema else ():
        if not _has(node, name):
            yield _needed(_joined(path, name))
    is_list, is_part = OmegaConf.is_list(node), path.partition(".")[0].partition("[")[0] in BUILT
    if is_part and not is_list:
        yield from _no_target(node, path)
    names: Iterable[Any] = range(len(node)) if is_list else list(node)
    for name in names:
        key_path, child = f"{path}[{name}]" if is_list else _joined(path, str(name)), node._get_node(name)
        if key_path == "hydra":
            continue
        key, inner = (keys(schema).get(name), subgroups(schema).get(name)) if schema else (None, None)
        if OmegaConf.is_missing(node, name):
            if is_part and name != "_target_" and key is None:
                yield _needed(key_path, f"set `{path}=[...]` with a value for each" if is_list else "")
            continue
        is_group = inner is not None or key_path in BUILT
        errors = [*_reference(node, name, key_path, is_group)] if OmegaConf.is_interpolation(node, name) else []
        yield from errors
        if key is not None and not errors:
            yield from _bad_value(node, key, key_path)
        if _is_written(child) or _is_written(child, ListConfig):
            yield from _below(
                child, key_path, DataKeys if key_path == "data" else None if key_path in UNCHECKED_GROUPS else inner
            )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def setting_problems(node: DictConfig, schema: type, key: str) -> list[Problem]:
    """Return every error in the names and values of settings that are not part of `Config`."""
    errors = []
    for name in map(str, node):
        if name not in keys(schema) and name != "_target_":
            ways = [f"{key}.{hit}={node[name]}" for hit in nearest(name, keys(schema))]
            otherwise = f"use one of {', '.join(keys(schema))}"
            errors.append(unknown_key(f"{key}.{name}={node[name]}", f"{key}.{name}", otherwise, ways))
    for name, each in keys(schema).items():
        path = f"{key}.{name}"
        errors += _bad_value(node, each, path) if _has(node, name) else [_needed(path)]
    return errors


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
    values = {name: key.typed(cfg.data[name]) for name, key in keys(DataKeys).items()}
    return {key: OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for key, each in values.items()}


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


def target_node(cfg: DictConfig, key: str, *, resolve: bool = False) -> dict[str, Any]:
    """Return a top-level key's node for `build()` as plain values; with `resolve` its `${...}` are resolved."""
    node: dict[str, Any] = OmegaConf.to_container(cfg[key], resolve=resolve)  # type: ignore[assignment]
    if key in PARTIAL and node.get("_target_") and not node.get("_partial_"):
        node["_partial_"] = True
    return {name: value for name, value in node.items() if key != "data" or name not in keys(DataKeys)}


def all_keys(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a configuration, also those of groups."""
    for key in cfg if _is_written(cfg) else ():
        yield f"{prefix}{key}"
        yield from all_keys(cfg._get_node(key), f"{prefix}{key}.")


def _has(node: DictConfig, name: str) -> bool:
    return node._get_node(name, validate_access=False) is not None and not OmegaConf.is_missing(node, name)


def written(node: DictConfig, name: str) -> str:
    """Return a value as its file or the command line has it, with its `${...}`."""
    child: Any = node._get_node(name)
    return str(child._value())


def _is_written(node: Any, kind: type[Container] = DictConfig) -> bool:
    return isinstance(node, kind) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def _needed(key: str, fix: str = "") -> Problem:
    return Problem(f"no {key}", f"`{key}` is needed and has no value", fix or f"set `{key}=...`", code="missing-value")


def _bad_value(node: DictConfig, key: Key, path: str) -> Iterator[Problem]:
    """The error of a value of another type, or that does not keep its rule."""
    try:
        value = key.typed(node[key.name])
        if key.allows(value):
            return
    except InterpolationToMissingValueError:
        text = written(node, key.name)
        problem = f"`{text}` is known when the data is there, and `{path}` is needed before"
        yield Problem(f"{path}={text}", problem, f"set `{path}=...` to the value itself", code="missing-value")
        return
    except (InterpolationKeyError, InterpolationResolutionError, UnsupportedInterpolationType):
        return  # _reference() reports it
    except OmegaConfBaseException:
        yield wrong_type(path, written(node, key.name), key.kind)
        return
    shown = str(value) if len(str(value)) <= 200 else f"{str(value)[:200]}..."
    ways = [key.example]
    if key.kind.startswith("str") and (choices := key.rule.get("enum")):
        ours = other_names.value_for(path, str(value))
        ways = [ours] if ours in choices else nearest(str(value), choices) or choices
    yield Problem.suggest(f"{path}={shown}", f"`{path}` must be {key.valid}", [f"{path}={way}" for way in ways])


def wrong_type(key: str, value: str, kind: str) -> Problem:
    """Return the error of a value of the wrong type. kind: as the schema writes it, e.g., "int | None"."""
    first, *others = kind.split(" | ")
    words, example = KINDS.get(first, ("a group", ""))
    problem = f"`{key}` must be {words}{' or null' if others else ''}, got `{value}`"
    return Problem.suggest(f"{key}={value}", problem, [f"{key}={example}"] if example else [], _keys_below(key))


def _keys_below(key: str) -> str:
    return f"set `{key}.KEY=VALUE` for the keys below it (`--cfg job` lists them)"


def _reference(node: Any, name: Any, path: str, is_group: bool) -> Iterator[Problem]:
    """The error of a `${...}` that can't be resolved."""
    text = written(node, name)
    if is_group:
        problem = f"`{path}` is a group of keys, and a reference brings single values"
        yield Problem(f"{path}={text}", problem, _keys_below(path), code="bad-value")
        return
    try:
        node[name]
    except UnsupportedInterpolationType:
        problem = f"no resolver has the name in `{text}`"
        fix = "refer to a key with `${GROUP.KEY}`, or to the environment with `${oc.env:NAME}`"
        yield Problem(f"{path}={text}", problem, fix, code="bad-value")
    except (InterpolationKeyError, InterpolationResolutionError) as error:
        if unset := UNSET.search(str(error)):
            fix = f"run `export {unset[1]}=...` before the command, or write `${{oc.env:{unset[1]},DEFAULT}}`"
            problem = f"the environment variable `{unset[1]}` is not set"
            yield Problem(f"{path}={text}", problem, fix, code="missing-value")
        elif not re.search(r"\?\?\?|missing", str(error), re.IGNORECASE):  # the data fills in a missing fact
            reference = text.strip("${} ")
            known = [name for name in all_keys(node._get_root()) if not name.startswith("hydra")]
            ways = [shlex.quote(f"{path}=${{{hit}}}") for hit in other_names.suggest_keys(reference, known)]
            yield unknown_key(f"{path}={text}", reference, PRINTED, ways)
    except OmegaConfBaseException:
        return  # a fact, too


def _no_target(node: Any, path: str) -> Iterator[Problem]:
    target = node._get_node("_target_", validate_access=False)
    is_empty = path in BUILT and path != "scheduler" and (target is None or not target._value())
    if is_empty or OmegaConf.is_missing(node, "_target_"):
        fix = f"use `{path}=OPTION` for a file in conf/{path}/ with a `_target_` line"
        problem = f"`{path}` has no `_target_`, which says what to build"
        fix = fix if path in BUILT else f"set `{path}._target_=...`"
        yield Problem(f"{path}=...", problem, fix, code="missing-value")


def _hidden(cfg: DictConfig) -> list[Problem]:
    errors = []
    parts = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [key for key in BUILT if key in cfg]))
    for key, text in ((key, str(each)) for key, each in leaves(parts)):
        if "://" in text and HIDDEN.search(text):
            fix = f"use `{key}={HIDDEN.sub('PASSWORD', text)}`"
            errors.append(Problem(f"{key}={text}", "a run directory stores no credentials", fix, code="secret"))
    return errors


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
    node: Any = cfg._get_node("scheduler", validate_access=False)
    if not _is_written(node) or "_target_" in node:
        return []
    problem, fix = "a constant learning rate has no arguments", "leave it out, or choose a schedule: `scheduler=cosine`"
    errors = []
    for name in map(str, node):
        if not name.startswith("_") and value(cfg, f"scheduler.{name}") is not None:
            source = f"scheduler.{name}={written(node, name)}"
            ways = [f"{option} {source}" for option in options_with(name, "scheduler")]
            errors.append(Problem.suggest(source, problem, ways, fix, code="bad-argument"))
    return errors
