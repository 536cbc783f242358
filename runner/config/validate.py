"""Finds every fault in the composed configuration, all at once."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from runner.config import other_names
from runner.config import schema as types
from runner.config.schema import Config, Data
from runner.errors import Problem, nearest
from runner.errors import without_password as without_password  # others take it from here

#: the keys whose nodes are built from their `_target_`
BUILT = ("data", "model", "task", "optimizer", "scheduler")
#: those that are built of the model's parameters, or of what was built of them
PARTIAL = ("optimizer", "scheduler")
#: of data.num_folds=null
NUM_FOLDS = 5
#: where a stored URI had a secret
HIDDEN = re.compile(r"(?<=[:/])\*\*\*(?=@)|(?<==)\*\*\*(?=&|$)")
#: the groups that a dataclass describes
DESCRIBED: tuple[tuple[str, type], ...] = (
    ("train", types.Train),
    ("train.early_stopping", types.EarlyStopping),
    ("metrics", types.Metrics),
    ("placement", types.Placement),
    ("tracking", types.Tracking),
    ("backends.cpu", types.Cpu),
    ("backends.cuda", types.Cuda),
    ("backends.mps", types.Mps),
    ("data", types.Data),
    ("sweep", types.Sweep),
    ("sweep.slots", types.Slots),
    ("plan", types.Plan),
)
#: what is no value of its own: a reference brings single values, and what a group holds is written out
GROUPS = (*BUILT, "backends", "facts", *(key for key, _ in DESCRIBED))
#: a value of each type that the schema writes
EXAMPLES = {"int": "10", "float": "0.5", "bool": "true", "str": "name"}
UNSET = re.compile(r"Environment variable '(\w+)' not found")
STORES = ("sqlite:", "http://", "https://", "postgresql", "mysql", "mssql", "databricks")


def problems(cfg: DictConfig) -> list[Problem]:
    """Everything in `cfg` that can be told to be wrong without building anything; empty when it is sound."""
    found = [*_unknown_keys(cfg), *_interpolations(cfg, "")]
    found += [problem for key, node, schema in _typed_nodes(cfg) for problem in _bad_values(node, schema, key)]
    found += [problem for key in BUILT for problem in _missing(cfg._get_node(key), key)]
    found += _uri(cfg) + _hidden(cfg) + _folds(cfg) + _early_stopping(cfg) + _made_at_once(cfg)
    return found


def setting_problems(node: DictConfig, schema: type, key: str) -> list[Problem]:
    """What is wrong with a node of settings that stands outside of `Config`: names and values, by their dotted keys."""
    known = [item.name for item in fields(schema)]
    found = []
    for name in map(str, node):
        if name not in known and name != "_target_":
            fix = " or ".join(f"{key}.{hit}=..." for hit in nearest(name, known)) or f"one of {', '.join(known)}"
            found.append(
                Problem(f"{key}.{name}={node[name]}", f"there is no key {key}.{name}", fix, code="unknown-key")
            )
    return [*found, *_bad_values(node, schema, f"{key}.")]


def value(cfg: DictConfig, key: str) -> Any:
    """What a dotted key holds; None where its ${...} comes to nothing, which faults() tells."""
    try:
        return OmegaConf.select(cfg, key)
    except (OmegaConfBaseException, AttributeError):  # below a group that has no values
        return None


def shared_data_settings(cfg: DictConfig) -> dict[str, Any]:
    """The part of `cfg.data` that every data set has, each of its type: data is an open group, and keeps '1' as a text."""
    found = {item.name: _as(Data, item.name, cfg.data[item.name]) for item in fields(Data)}
    return {key: OmegaConf.to_container(each) if OmegaConf.is_config(each) else each for key, each in found.items()}


def how_to_cut(cfg: DictConfig) -> dict[str, Any]:
    """What runner.data.split.split() takes of the configuration, beside the seed."""
    shared = shared_data_settings(cfg)
    cut = {key: shared[key] for key in ("val_fraction", "test_fraction", "limit")}
    return {**cut, "fold": fold_of(shared["fold"], shared["num_folds"])}


def fold_of(fold: Any, num_folds: int | None) -> tuple[int, int] | None:
    """data.fold with data.num_folds as (K, N), fold K of N; None: no folds."""
    if fold is None:
        return None
    which, _, of = str(fold).partition("/")
    return int(which), int(of or num_folds or NUM_FOLDS)


def of_all_folds(fold: Any) -> str:
    """data.fold for all of its folds: K for 3, K/5 for 3/5; null as it is."""
    return re.sub(r"^\d+", "K", str(fold))


def _as(schema: type, name: str, value: Any) -> Any:
    if schema.__annotations__[name] == "Any":  # a group that ${model} brings would be its type from then on
        return value
    typed = _typed(schema)
    typed[name] = value
    return typed[name]


@functools.cache
def _typed(schema: type) -> Any:
    return OmegaConf.structured(schema)


def target_node(cfg: DictConfig, key: str, *, resolve: bool = False) -> dict[str, Any]:
    """What `build()` gets of a top-level key, as plain values. resolve: with its ${...} filled in."""
    node: dict[str, Any] = OmegaConf.to_container(cfg[key], resolve=resolve)  # type: ignore[assignment]
    shared = {item.name for item in fields(Data)} if key == "data" else set()
    if key in PARTIAL and node.get("_target_") and not node.get("_partial_"):
        node["_partial_"] = True  # the parameters come later
    return {name: value for name, value in node.items() if name not in shared}


def all_keys(cfg: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a configuration, inner nodes too."""
    for key in cfg if _is_written(cfg) else ():
        yield f"{prefix}{key}"
        yield from all_keys(cfg._get_node(key), f"{prefix}{key}.")


def suggest_keys(wanted: str, known: list[str]) -> list[str]:
    """Return the keys that `wanted` certainly means: other frameworks' names for them, or misspellings of them."""
    if hits := [key for key in other_names.keys_for(wanted) if key in known]:
        return hits
    parent, _, leaf = wanted.rpartition(".")
    if parent:
        siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
        longer = [name for name in siblings if len(leaf) > 2 and name.startswith(leaf)]
        if hits := nearest(leaf, siblings) or longer:
            return [siblings[hit] for hit in hits]
    else:
        same = [key for key in known if key.rpartition(".")[2] == wanted]
        if hits := same or nearest(wanted, [key for key in known if "." not in key]):
            return hits[:3]
    below = [key for key in known if "." in key or not parent]
    hits = [key for key in below if key.rpartition(".")[2] == leaf]
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(below)}
    hits = [] if parent and leaf == "name" else hits or [by_leaf[hit] for hit in nearest(leaf, by_leaf)[:1]]
    hits = hits or [key for key in other_names.keys_like(wanted) if key in known]
    return hits if len(hits) == 1 or not parent else [hit for hit in hits if nearest(parent, [hit.rpartition(".")[0]])]


def with_value(cfg: DictConfig, key: str, texts: list[str]) -> str | None:
    """Return KEY=VALUE for a shell: with what was typed if it fits the key, else with a valid value; None without one.

    texts: the values, as they were typed; a sweep has several.
    """
    texts = [other_names.value_for(key, text) for text in texts]
    if isinstance(example := _example(cfg, key), str) and example.startswith("["):
        texts = [f"[{text}]" if text.isdecimal() else text for text in texts]
    if not all(text and _fits(cfg, key, text) for text in texts):
        texts = [example] if example else []
    return shlex.quote(f"{key}={','.join(texts)}") if texts else None


def _fits(cfg: DictConfig, key: str, text: str) -> bool:
    """Whether a value, as it was typed, has its key's type and range; a key without a schema is judged by its present value."""
    if key == "device":
        return re.fullmatch(r"auto|cpu|mps|all|(cuda|xpu)(:\d+)?|\[.*\]", text) is not None
    try:
        typed = OmegaConf.from_dotlist([f"x={text}"]).x
        if (found := _field(key)) is not None:
            typed = _as(found[0], found[1].name, typed)
            return typed is None or not list(_bad_value(key, typed, found[1].metadata))
    except Exception:
        return False
    present = value(cfg, key)
    if OmegaConf.is_dict(present):
        return False
    if isinstance(present, int | float) and not isinstance(present, bool):
        return isinstance(typed, int | float) and not isinstance(typed, bool) and typed >= 0
    same = bool if isinstance(present, bool) else str if isinstance(present, str) else None
    return isinstance(typed, same) if same else OmegaConf.is_list(typed) or not OmegaConf.is_list(present)


def _example(cfg: DictConfig, key: str) -> str | None:
    present = value(cfg, key)
    if isinstance(present, bool | int | float | str):
        return str(present).lower() if isinstance(present, bool) else str(present)
    if OmegaConf.is_config(present):
        return f"[{','.join(map(str, present))}]" if present and OmegaConf.is_list(present) else None
    return _schema_example(key)


def _schema_example(key: str) -> str | None:
    if (found := _field(key)) is None:
        return "0.001" if key == "optimizer.lr" else None
    rule = found[1].metadata
    return str(rule.get("example") or rule.get("choices", [EXAMPLES.get(str(found[1].type).split(" ")[0], "null")])[0])


def _unknown_keys(cfg: DictConfig) -> list[Problem]:
    unknown = list(_unknown(cfg, Config, ""))
    known = [
        key
        for key in all_keys(cfg)
        if not any(key == name or key.startswith(f"{name}.") for name in [*unknown, "hydra"])
    ]
    found = []
    for name in unknown:
        typed = str(value(cfg, name))
        ways: list[str | None] = [*other_names.overrides_for(name, typed)]
        ways = ways or [with_value(cfg, hit, [typed]) for hit in suggest_keys(name, known)]
        asked, otherwise = f"{name}={typed}", "use a key that `--cfg job` prints"
        found.append(
            Problem.suggest(asked, f"there is no key `{name}`", filter(None, ways), otherwise, code="unknown-key")
        )
    return found


def _unknown(node: DictConfig, schema: type, prefix: str) -> Iterator[str]:
    """The keys that the schema does not have. Below data, model, ... their targets' arguments decide (runner.config.instantiate)."""
    inner = {item.name: item.default_factory for item in fields(schema)}
    for key in map(str, node):
        child = node._get_node(key)
        if key not in inner and (prefix or key != "hydra"):
            yield prefix + key
        elif key in inner and is_dataclass(inner[key]) and _is_written(child):
            yield from _unknown(child, inner[key], f"{prefix}{key}.")  # type: ignore[arg-type]


def _typed_nodes(cfg: DictConfig) -> Iterator[tuple[str, Any, type]]:
    yield "", cfg, Config
    for key, schema in DESCRIBED:
        node = _group(cfg, key)
        if node is not None:
            yield f"{key}.", node, schema


def _group(cfg: DictConfig, key: str) -> DictConfig | None:
    node: Any = cfg
    for word in key.split("."):
        node = node._get_node(word, validate_access=False) if _is_written(node) else None  # ~sweep takes it away
    return node if _is_written(node) else None


def _has(node: DictConfig, name: str) -> bool:
    return node._get_node(name, validate_access=False) is not None and not OmegaConf.is_missing(node, name)


def written(node: DictConfig, name: str) -> str:
    """A value as its file or the command line has it, its ${...} not followed."""
    child: Any = node._get_node(name)
    return str(child._value())


def _is_written(node: Any) -> bool:
    return OmegaConf.is_dict(node) and not (node._is_none() or node._is_missing() or node._is_interpolation())


def _bad_values(node: DictConfig, schema: type, prefix: str) -> Iterator[Problem]:
    names = [item.name for item in fields(schema) if not is_dataclass(item.default_factory)]
    if prefix and not any(_has(node, name) for name in names):
        group = prefix.rstrip(".")
        yield Problem(
            f"~{group}",
            f"{group} is needed and has no values",
            f"{group}=default, or leave it out",
            code="missing-value",
        )
        return
    for item in fields(schema):
        if not _has(node, item.name):
            problem = f"{prefix}{item.name} is needed and has no value"
            yield Problem(f"no {prefix}{item.name}", problem, f"{prefix}{item.name}=...", code="missing-value")
            continue
        try:
            value = _as(schema, item.name, node[item.name])
        except InterpolationToMissingValueError:
            text = written(node, item.name)
            problem = f"{text} is known when the data is there, and {prefix}{item.name} is needed before"
            yield Problem(
                f"{prefix}{item.name}={text}",
                problem,
                f"{prefix}{item.name}=... with the value itself",
                code="missing-value",
            )
            continue
        except (InterpolationKeyError, InterpolationResolutionError, UnsupportedInterpolationType):
            continue  # told by _interpolations
        except OmegaConfBaseException:
            yield wrong_type(f"{prefix}{item.name}", str(node._get_node(item.name)), str(item.type))
            continue
        if value is not None:
            yield from _bad_value(f"{prefix}{item.name}", value, item.metadata)


def _bad_value(key: str, value: Any, rule: Any) -> Iterator[Problem]:
    if "choices" in rule and value not in rule["choices"]:
        ours = other_names.value_for(key, str(value))
        hits = [ours] if ours in rule["choices"] else nearest(str(value), rule["choices"]) or rule["choices"]
        yield Problem.suggest(
            f"{key}={value}", f"`{key}` must be {rule['valid']}", [f"{key}={hit}" for hit in hits], ""
        )
    elif "check" in rule and not rule["check"](value):
        shown = str(value) if len(str(value)) <= 200 else f"{str(value)[:200]}..."
        suggestions = (f"{key}={rule['example']}",)
        yield Problem(
            f"{key}={shown}", f"`{key}` must be {rule['valid']}", f"{suggestions[0]}", suggestions, code="bad-value"
        )


def kind_of(key: str) -> str | None:
    """The type that the schema gives a dotted key, as it is written there; None for a key below data, model, ..."""
    found = _field(key)
    return None if found is None else str(found[1].type)


def _field(key: str) -> tuple[type, Any] | None:
    schema: Any = Config
    *groups, leaf = key.split(".")
    for name in groups:
        inner = {item.name: item.default_factory for item in fields(schema)}.get(name)
        schema = Data if name == "data" and schema is Config else inner
        if not is_dataclass(schema):
            return None
    return next(((schema, item) for item in fields(schema) if item.name == leaf), None)


def wrong_type(key: str, value: str, kind: str) -> Problem:
    """Return the error of a value of the wrong type. kind: as the schema writes it, e.g., "int | None"."""
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    parts = [words.get(part.strip(), "null" if part.strip() == "None" else "a group") for part in kind.split("|")]
    example = EXAMPLES.get(kind.split("|")[0].strip())
    fix = f"{key}={example}" if example else f"{key}.KEY=VALUE for the keys below it (--cfg job lists them)"
    suggestions = (f"{key}={example}",) if example else ()
    return Problem(
        f"{key}={value}", f"`{key}` must be {' or '.join(parts)}, got `{value}`", fix, suggestions, code="bad-value"
    )


def _interpolations(node: Any, prefix: str) -> Iterator[Problem]:
    """Every ${...} that leads nowhere. One to a fact that is not known yet is sound."""
    keys = node if _is_written(node) else range(len(node)) if OmegaConf.is_list(node) else ()
    for key in keys:
        if not prefix and key == "hydra":
            continue
        child = node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            path, text = f"{prefix}{key}", str(child._value())
            if path in GROUPS:
                problem = f"{path} is a group of keys, and a reference brings single values"
                yield Problem(
                    f"{path}={text}", problem, f"{path}.KEY=VALUE for the keys below it (--cfg job lists them)"
                )
                continue
            try:
                node[key]
            except UnsupportedInterpolationType:
                problem = (
                    "there is no such resolver; a reference to a key is ${GROUP.KEY}, to the environment ${oc.env:NAME}"
                )
                yield Problem(f"{path}={text}", problem, f"{path}=... with another value")
            except (InterpolationKeyError, InterpolationResolutionError) as error:
                if (
                    "???" in str(error)
                    or "MissingMandatoryValue" in str(error)
                    or "missing value" in str(error).lower()
                ):
                    continue
                if unset := UNSET.search(str(error)):
                    yield _unset(path, text, unset[1])
                    continue
                wanted = text.strip("${} ")
                known = [name for name in all_keys(node._get_root()) if not name.startswith("hydra")]
                hits = suggest_keys(wanted, known)
                fix = " or ".join(f"${{{hit}}}" for hit in hits) or "use a key that `--cfg job` prints"
                yield Problem(f"{path}={text}", f"{wanted} does not exist in this configuration", fix)
            except OmegaConfBaseException:
                continue  # a fact that the data will fill in
        else:
            yield from _interpolations(child, f"{prefix}{key}.")


def _unset(key: str, text: str, name: str) -> Problem:
    problem = f"the environment variable {name} is not set"
    if (default := _schema_example(key)) is None:
        return Problem(f"{key}={text}", problem, f"export {name}=... before the command")
    ours = shlex.quote(f"{key}={text.replace(f'oc.env:{name}', f'oc.env:{name},{default}')}")
    return Problem(f"{key}={text}", problem, f"export {name}={default} before the command, or {ours}", (ours,))


def _missing(node: Any, prefix: str) -> Iterator[Problem]:
    if not _is_written(node):
        return
    target = node._get_node("_target_", validate_access=False)
    if OmegaConf.is_missing(node, "_target_") or (prefix != "scheduler" and (target is None or not target._value())):
        problem = f"{prefix} has no _target_: nothing says what to build"
        fix = f"{prefix}=OPTION for a file in conf/{prefix}/, with its _target_ line"
        yield Problem(f"{prefix}=...", problem, f"{prefix}._target_=..." if "." in prefix else fix)
    for key in map(str, node):
        if key != "_target_" and OmegaConf.is_missing(node, key):
            yield Problem(
                f"no {prefix}.{key}",
                f"{prefix}.{key} is needed and has no value",
                f"{prefix}.{key}=...",
                code="missing-value",
            )
        elif (
            _is_written(child := node._get_node(key)) and child._get_node("_target_", validate_access=False) is not None
        ):
            yield from _missing(child, f"{prefix}.{key}")
        else:
            yield from _missing_items(child, f"{prefix}.{key}")


def _missing_items(node: Any, key: str) -> Iterator[Problem]:
    is_list = OmegaConf.is_list(node) and not (node._is_none() or node._is_missing() or node._is_interpolation())
    for name in range(len(node)) if is_list else node if _is_written(node) else ():
        where = f"{key}[{name}]" if is_list else f"{key}.{name}"
        if OmegaConf.is_missing(node, name):
            problem = f"{where} is needed and has no value"
            yield Problem(
                f"no {where}",
                problem,
                f"{key}=[...] with a value for each" if is_list else f"{where}=...",
                code="missing-value",
            )
        else:
            yield from _missing_items(node._get_node(name), where)


def _uri(cfg: DictConfig) -> list[Problem]:
    try:
        return uri_problems(str(cfg.tracking.uri))
    except (OmegaConfBaseException, AttributeError):
        return []


def uri_problems(uri: str) -> list[Problem]:
    """What no store of MLflow's is called."""
    asked = f"tracking.uri={without_password(uri)}"
    if HIDDEN.search(uri):
        fix = HIDDEN.sub("PASSWORD", asked) + ", or export MLFLOW_TRACKING_URI with it"
        return [Problem(asked, "a run directory stores no credentials", fix, code="secret")]
    if uri.startswith("sqlite:") and not re.match("sqlite:///|sqlite://$", uri):
        problem = "a file's URI has three slashes before its path, and an absolute path begins with one more"
        return [Problem(asked, problem, f"tracking.uri={_sqlite(uri)}")]
    if uri.startswith(STORES):
        return []
    if "://" not in uri.replace("file://", "") or uri.startswith("file:"):
        problem = (
            "MLflow has retired its file store (folders such as mlruns); it keeps runs in a database or on a server"
        )
    else:
        problem = f"MLflow has no store for {uri.split(':')[0]}://"
    return [Problem(asked, problem, "tracking.uri=sqlite:///mlflow.db or tracking.uri=http://127.0.0.1:5000")]


def _sqlite(uri: str) -> str:
    scheme, _, place = uri.partition(":")
    slashes = len(place) - len(place.lstrip("/"))
    return f"{scheme}:///{'/' if slashes == 1 else ''}{place.lstrip('/')}"


def _hidden(cfg: DictConfig) -> list[Problem]:
    found = []
    for key, text in _texts(
        OmegaConf.to_container(OmegaConf.masked_copy(cfg, [key for key in BUILT if key in cfg])), ""
    ):
        if "://" in text and HIDDEN.search(text):
            fix = f"{key}={HIDDEN.sub('PASSWORD', text)}"
            found.append(Problem(f"{key}={text}", "a run directory stores no credentials", fix, code="secret"))
    for key in types.secret_keys():
        if value(cfg, key) == "***":
            found.append(Problem(f"{key}=***", "a run directory stores no secrets", f"{key}=... again", code="secret"))
    return found


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, str):
        yield key, node


def _folds(cfg: DictConfig) -> list[Problem]:
    fold, num = value(cfg, "data.fold"), value(cfg, "data.num_folds")
    if fold is None:
        problem = "it is how many folds there are, and data.fold names none"
        return [Problem(f"data.num_folds={num}", problem, f"-m 'data.fold=range({num})' beside it")] if num else []
    try:
        which, of = fold_of(fold, num) or (0, 0)
    except (TypeError, ValueError):
        return []
    asked = f"data.fold={fold}"
    if num is not None and str(of) != str(num):
        return [
            Problem(
                f"{asked} data.num_folds={num}", f"that is {of} folds, and {num}", f"{asked} without data.num_folds"
            )
        ]
    if of < 2 and num is None:
        return [Problem(asked, f"there are two folds or more, and that is {of}", f"data.fold={which}/{NUM_FOLDS}")]
    if which >= of:
        problem = f"folds are counted from 0: the last of {of} is {of - 1}"
        return [Problem(asked, problem, f"data.fold={of - 1}/{of}, or all of them: -m 'data.fold=range({of})'")]
    return []


def _early_stopping(cfg: DictConfig) -> list[Problem]:
    mode, metric, patience = (value(cfg, f"train.early_stopping.{name}") for name in ("mode", "metric", "patience"))
    if mode and not metric and not patience:
        fix = "train.early_stopping.patience=5"
        return [Problem(f"train.early_stopping.mode={mode}", "early stopping is off while patience is null", fix)]
    return []


def _made_at_once(cfg: DictConfig) -> list[Problem]:
    problem = "what it works on is there later, when the model is built"
    keys = [f"{key}._partial_" for key in PARTIAL]
    return [Problem(f"{key}=false", problem, f"{key}=true") for key in keys if value(cfg, key) is False]
