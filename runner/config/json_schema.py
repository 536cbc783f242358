"""Makes the JSON schema of conf/, by which an editor underlines a wrong key, type or option before anything runs.

Keys, types and rules come from runner.config.schema, descriptions and options from the files of conf/, arguments from the
targets. Unknown targets, options and groups may be the user's; `${...}` and ??? come later. Draft-07, as yaml-language-server
reads it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from runner.config.allowed import is_part
from runner.config.compose import CONF
from runner.config.instantiate import HYDRA_KEYS, PARTIAL, locate
from runner.config.run_files import MAX_ALIASED_VALUES, yaml_refusal
from runner.config.schema import SHARED, Config, GridKeys, Key, SearchKeys, TrackingKeys, TrainKeys, keys, subgroups
from runner.errors import RunnerError, finite

Json = dict[str, Any]
Docs = Mapping[str, tuple[str, Any]]  # the comment and the value of each dotted key in conf/
LATER = r"\$\{|^\?\?\?$"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}
WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "array": "a list"}
ABSENT = inspect.Parameter.empty


def of_arguments(arguments: Sequence[inspect.Parameter], docs: Docs, shared: Json) -> Json:
    """Return a mapping with the arguments of a function and the keys of `shared`, and with no other."""
    named = [each for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    properties = shared | {each.name: _of_argument(each, *docs.get(each.name, ("", ABSENT))) for each in named}
    takes_more = any(each.kind is each.VAR_KEYWORD for each in arguments)
    return {"type": "object", "properties": properties, "additionalProperties": takes_more}


def of_schema(schema: type, docs: Docs, prefix: str = "", shared: Json | None = None) -> Json:
    """Return a mapping with the keys of a schema and those of `shared`, and with no other."""
    properties = dict(shared or {})
    for name, inner in subgroups(schema).items():
        properties[name] = of_schema(inner, docs, f"{prefix}{name}.")
    for name, key in keys(schema).items():
        properties[name] = _of_key(key, *docs.get(prefix + name, ("", None)))
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return described(made, docs.get(prefix.rstrip("."), ("",))[0])


def _of_key(key: Key, doc: str, value: Any) -> Json:
    hint, is_choice = get_type_hints(key.schema)[key.name], "enum" in key.rule
    hints = (hint, *get_args(hint))
    kind = {**(_of_type(hint) or {} if not is_choice else {}), **key.rule} or None
    if kind is not None and str in hints and "type" in kind:
        kind["type"] = [*kind["type"], "number"]  # OmegaConf makes a text of it
    said = "; ".join(filter(None, (key.valid if not (is_choice and doc) else "", _usual(value))))
    return value_of(kind, doc, said, is_nullable=value is None or NoneType in hints)


def _of_argument(argument: inspect.Parameter, doc: str, value: Any) -> Json:
    default = argument.default
    said = _usual(value, "for example") if default is ABSENT else _usual(default)
    return value_of(_of_type(argument.annotation), doc, said, is_nullable=default is None or value is None)


def _of_type(hint: Any) -> Json | None:
    """Return the types of plain values; None for lists and classes."""
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [each for each in (get_args(hint) if is_union else (hint,)) if getattr(each, "__name__", "") != "Tensor"]
    names = [TYPES.get(kind) if inspect.isclass(kind) else None for kind in kinds]  # a number stands for a tensor
    return None if None in names else {"type": names}


def value_of(kind: Json | None, doc: str = "", said: str = "", *, is_nullable: bool = False) -> Json:
    """Return a value of a kind, or a reference. said: A sentence part that says the rule."""
    made: Json = dict(kind or {})
    null = ["null"] if is_nullable else []
    if "type" in made:
        names = [made["type"]] if isinstance(made["type"], str) else made["type"]
        made["type"] = list(dict.fromkeys([*names, *null, "string"]))
        if "string" not in names:
            words = " or ".join(WORDS.get(name, "a mapping") for name in dict.fromkeys(names) if name != "null")
            made |= {"pattern": LATER, "patternErrorMessage": f"it is {words}{f', {said}' if said else ''}"}
    elif made:
        later = {"type": ["string", *null], "pattern": LATER}
        made = {"anyOf": [*made.get("anyOf", [made]), later]}
    return described(made, "\n\n".join(filter(None, (doc, said))))


def _usual(value: Any, word: str = "default") -> str:
    # as a `default`, an editor that completes a group would write the values of all its keys
    is_plain = isinstance(value, bool | int | float | str | list | tuple | None) and value != "???"
    return f"{word} {json.dumps(value, default=str)}" if is_plain else ""


def described(made: Json, doc: str) -> Json:
    return {"description": doc, **made} if doc else made


Takes = Mapping[str, Sequence[inspect.Parameter]]  # by target, its arguments
FILE = "schema.json"  # in a folder conf/
#: the groups whose files have a `_target_`: all of torch's two modules, and our parts in conf/
GROUPS = ("data", "model", "task", "optimizer", "scheduler", "hydra/launcher", "hydra/sweeper")
LOGGING = "hydra/job_logging"
MERGED = "tag:yaml.org,2002:merge"  # the key <<
MODULES = {"optimizer": "torch.optim", "scheduler": "torch.optim.lr_scheduler"}
ABSTRACT = ("Optimizer", "LRScheduler", "_LRScheduler")
#: another target, which may be the user's
ANOTHER = r"^(?!runner\.|torch\.optim\.(lr_scheduler\.)?\w+$)"
#: groups and targets whose keys are a dataclass
WHOLE: dict[str, type] = {"train": TrainKeys, "tracking": TrackingKeys}
SETTINGS: dict[str, type] = {"runner.sweep.Grid": GridKeys, "runner.sweep.Search": SearchKeys}
#: keys of every target
FLAGS: Json = {key: {} for key in HYDRA_KEYS} | {"_partial_": value_of({"type": "boolean"})}


@dataclass(frozen=True)
class ConfFile:
    """A file of conf/."""

    group: str
    name: str
    docs: Docs

    def value(self, key: str) -> Any:
        return self.docs.get(key, ("", None))[1]


def make(*own: Path) -> Json:
    """Return the schema of a whole configuration; line_for() names the part for a group's file. Imports torch.

    own: Further directories like conf/, whose targets and options are described, too.
    """
    options = [option for folder in (CONF, *own) for option in _options(folder)]
    docs: dict[str, tuple[str, Any]] = {}
    for option in options[::-1]:  # of two files with one name, ours counts
        if option.group in ("", *WHOLE):
            docs |= {f"{option.group}.{key}".lstrip("."): each for key, each in option.docs.items()}
    config = of_schema(Config, docs)
    keys, parts = config["properties"], {"config": config, **_defaults(options)}
    for group, schema in WHOLE.items():
        parts[group] = of_schema(schema, docs, f"{group}.", {"defaults": _ref("defaults")}) | {"allOf": [{}]}
        keys[group] = _ref(group)
    for group in GROUPS:
        files = [option for option in options if option.group == group]
        takes = {path: found for path in _targets(group, files) if (found := _takes(path, group)) is not None}
        parts |= _of_group(group, files, takes, docs)
        if group in keys:
            keys[group] = _ref(f"node.{group}")
    hydra = {name: _ref(f"node.hydra.{name}") for name in ("launcher", "sweeper")}
    keys |= {"defaults": _ref("defaults"), "hydra": {"type": "object", "properties": hydra}}
    parts[_name(LOGGING)] = {"type": "object", "allOf": [{}]}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": f"written by `python -m runner schema`, of torch {metadata.version('torch').partition('+')[0]}",
        "allOf": [_ref("config")],  # an editor would use this one for a part without its own
        "definitions": parts,
    }


def _of_group(group: str, files: Sequence[ConfFile], takes: Takes, docs: Docs) -> Json:
    shared, parts = f"shared.{group}", {}
    if group in SHARED:  # a target may have an argument of the same name, and then it is that
        parts[shared] = of_schema(SHARED[group], docs, f"{group}.") | {"additionalProperties": True}
    more_keys = {key: _ref(f"{shared}/properties/{key}") for key in parts.get(shared, {}).get("properties", ())}
    for path, arguments in takes.items():
        said = {key: each for file in files if file.value("_target_") == path for key, each in file.docs.items()}
        more = more_keys | FLAGS | {"defaults": _ref("defaults")}
        schema = SETTINGS.get(path)
        parts[path] = of_schema(schema, said, shared=more) if schema else of_arguments(arguments, said, more)
    node = _node(takes, more_keys, docs.get(group, ("",))[0])
    return parts | {f"node.{_name(group)}": node, _name(group): {"allOf": [_ref(f"node.{_name(group)}")]}}


def write(file: Path, *own: Path) -> dict[str, str]:
    """Write the schema. Returns the first line for the files of each group in ./conf. Raises: RunnerError."""
    whole = finite(make(*own))
    lines = [f"  {json.dumps(name)}: {json.dumps(part, default=str)}" for name, part in whole["definitions"].items()]
    head = json.dumps(whole | {"definitions": {}}).removesuffix("}}")
    text = head + "\n" + ",\n".join(lines) + "\n}}\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        problem, fix = f"this file can't be written: {error.strerror}", "use `--output FILE` in a directory of yours"
        raise RunnerError.of(str(file), problem, fix, code="missing-file") from None
    return {group: line_for(group, file, Path("conf", group)) for group in ("experiment", *WHOLE, *GROUPS)}


def line_for(group: str, schema: Path, folder: Path) -> str:
    """Return the first line of a group's file, by which an editor finds the schema."""
    place = os.path.relpath(schema, folder)
    part = f"#/definitions/{_name(group)}" if group in (*GROUPS, *WHOLE, LOGGING) else ""
    return f"# yaml-language-server: $schema={Path(place).as_posix()}{part}"


def _name(group: str) -> str:
    return group.replace("/", ".")


def _ref(name: str) -> Json:
    return {"$ref": f"#/definitions/{name}"}


def _options(folder: Path) -> Iterator[ConfFile]:
    for file in sorted(folder.rglob("*.yaml")):
        group = file.parent.relative_to(folder).as_posix().removeprefix(".")
        try:
            text = file.read_text(encoding="utf-8")
            if yaml_refusal(file, max_values=MAX_ALIASED_VALUES):
                continue
            yield ConfFile(group, file.stem, dict(_documented(text, yaml.compose(text), yaml.safe_load(text), "")))
        except (OSError, UnicodeError, yaml.YAMLError):  # a run reports it
            continue


def _documented(text: str, node: Any, values: Any, prefix: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        return
    for name, child in node.value:
        if name.tag == MERGED:
            yield from _documented(text, child, values, prefix)
        if not isinstance(name, yaml.ScalarNode) or name.value not in values:
            continue
        value = values[name.value]
        is_block = isinstance(child, yaml.CollectionNode) and not child.flow_style
        mark = name.end_mark if is_block else child.end_mark
        comment = text[mark.index :].partition("\n")[0].partition("# ")[2]
        yield f"{prefix}{name.value}", (comment, value)
        yield from _documented(text, child, value, f"{prefix}{name.value}.")


def _targets(group: str, files: Sequence[ConfFile]) -> list[str]:
    module = MODULES.get(group)
    things = vars(importlib.import_module(module)).items() if module else ()
    kinds = [name for name, each in things if inspect.isclass(each) and is_part(each, each.__module__)]
    named = [str(file.value("_target_")) for file in files if file.value("_target_")]
    return list(dict.fromkeys([*(f"{module}.{name}" for name in sorted(kinds) if name not in ABSTRACT), *named]))


def _defaults(options: Sequence[ConfFile]) -> Json:
    offered: Json = {}
    parts: Json = {}
    for group in sorted({option.group for option in options} - {""}):
        names = dict.fromkeys(option.name for option in options if option.group == group)
        parts[f"option.{_name(group)}"] = {"anyOf": [{"enum": [*names]}, {"type": ["string", "array", "null"]}]}
        offered |= dict.fromkeys((f"override /{group}", group), _ref(f"option.{_name(group)}"))
    return parts | {"defaults": {"type": "array", "items": {"type": ["string", "object"], "properties": offered}}}


def _node(targets: Iterable[str], shared: Json, doc: str) -> Json:
    names = [*targets]
    target = {"anyOf": [{"enum": names}, {"type": "string", "pattern": f"{ANOTHER}|{LATER}"}]}
    rules = [{"if": _has("_target_", {"const": name}), "then": _ref(name)} for name in names]
    rules.append({"if": {"properties": {"_target_": {"not": {"enum": names}}}}, "then": {"properties": shared}})
    return described({"type": "object", "properties": {"_target_": target}, "allOf": rules}, doc)


def _has(key: str, value: Json) -> Json:
    return {"required": [key], "properties": {key: value}}


def _takes(path: str, group: str) -> Sequence[inspect.Parameter] | None:
    home, _, name = path.rpartition(".")
    for is_resolved in (True, False):  # a name in an annotation may exist for type checkers only
        with suppress(RunnerError, ImportError, AttributeError, NameError, TypeError, ValueError, SyntaxError):
            # a run reports it; locate() refuses the parts that Hydra builds
            thing = getattr(importlib.import_module(home), name) if home == "runner.sweep" else locate(path)
            return [*inspect.signature(thing, eval_str=is_resolved).parameters.values()][group in PARTIAL :]
    return None
