"""Makes the JSON schema of conf/, by which an editor underlines a wrong key, type or option before anything runs.

Keys, types and rules come from runner.config.schema, descriptions and options from the files of conf/. Arguments of a `_target_`
are checked by a run. Options and groups that are not ours may be the user's; `${...}` and ??? come later. Draft-07, as
yaml-language-server reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

import yaml

from runner.config.allowed import PARTS
from runner.config.compose import CONF
from runner.config.instantiate import BUILT
from runner.config.run_files import MAX_ALIASED_VALUES, yaml_refusal
from runner.config.schema import SHARED, Config, GridKeys, Key, SearchKeys, TrackingKeys, TrainKeys, keys, subgroups
from runner.errors import RunnerError, finite

Json = dict[str, Any]
Docs = Mapping[str, tuple[str, Any]]  # the comment and the value of each dotted key in conf/
FILE = "schema.json"  # in a directory conf/
#: the groups whose files have a `_target_`
GROUPS = (*BUILT, "hydra/launcher", "hydra/sweeper")
#: groups and targets whose keys are a dataclass
WHOLE: dict[str, type] = {"train": TrainKeys, "tracking": TrackingKeys}
SETTINGS: dict[str, type] = {"runner.sweep.Grid": GridKeys, "runner.sweep.Search": SearchKeys}
LOGGING = "hydra/job_logging"
#: a value that comes later, and a target that may be the user's or a library's
LATER = r"\$\{|^\?\?\?$"
ANOTHER = r"^(?!runner\.(data|models|tasks|training)\.)"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "array": "a list"}


class ConfFile(NamedTuple):
    """A file of conf/."""

    group: str
    name: str
    docs: Docs


def make(*own: Path) -> Json:
    """Return the schema of a whole configuration; line_for() names the part for a group's file.

    own: Further directories like conf/, whose options are described, too.
    """
    files = [file for folder in (CONF, *own) for file in conf_files(folder)]
    docs: dict[str, tuple[str, Any]] = {}
    for file in files[::-1]:  # of two files with one name, ours counts
        if file.group in ("", *WHOLE):
            docs |= {f"{file.group}.{key}".lstrip("."): each for key, each in file.docs.items()}
    parts = {"config": _of_schema(Config, docs), **_defaults(files), _name(LOGGING): {"type": "object", "allOf": [{}]}}
    for group, schema in WHOLE.items():
        parts[group] = _of_schema(schema, docs, f"{group}.", {"defaults": _ref("defaults")}) | {"allOf": [{}]}
    for group in GROUPS:
        parts[_name(group)] = _of_group(group, docs)
    hydra = {"type": "object", "properties": {each: _ref(f"hydra.{each}") for each in ("launcher", "sweeper")}}
    groups = {group: _ref(group) for group in (*WHOLE, *BUILT)}
    parts["config"]["properties"] |= {**groups, "defaults": _ref("defaults"), "hydra": hydra}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "written by `python -m runner schema`",
        "allOf": [_ref("config")],  # an editor would use this one for a part without its own
        "definitions": parts,
    }


def write(file: Path, *own: Path) -> dict[str, str]:
    """Write the schema. Returns the first line for the files of each group in ./conf. Raises: RunnerError."""
    whole = finite(make(*own))
    lines = [f"  {json.dumps(name)}: {json.dumps(part, default=str)}" for name, part in whole["definitions"].items()]
    head = json.dumps(whole | {"definitions": {}}).removesuffix("}}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(head + "\n" + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    except OSError as error:
        problem, fix = f"this file can't be written: {error.strerror}", "use `--output FILE` in a directory of yours"
        raise RunnerError.of(str(file), problem, fix, code="missing-file") from None
    return {group: line_for(group, file, Path("conf", group)) for group in ("experiment", *WHOLE, *GROUPS)}


def line_for(group: str, schema: Path, folder: Path) -> str:
    """Return the first line of a group's file, by which an editor finds the schema."""
    part = f"#/definitions/{_name(group)}" if group in (*GROUPS, *WHOLE, LOGGING) else ""
    return f"# yaml-language-server: $schema={Path(os.path.relpath(schema, folder)).as_posix()}{part}"


def _name(group: str) -> str:
    return group.replace("/", ".")


def _ref(name: str) -> Json:
    return {"$ref": f"#/definitions/{name}"}


def conf_files(folder: Path) -> Iterator[ConfFile]:
    """Yield the files of a directory like conf/ that can be read, with their comments."""
    for path in sorted(folder.rglob("*.yaml")):
        with suppress(OSError, UnicodeError, yaml.YAMLError):  # a run reports it
            text = path.read_text(encoding="utf-8")
            if not yaml_refusal(path, max_values=MAX_ALIASED_VALUES):
                docs = dict(_documented(text, yaml.compose(text), yaml.safe_load(text), ""))
                yield ConfFile(path.parent.relative_to(folder).as_posix().removeprefix("."), path.stem, docs)


def _documented(text: str, node: Any, values: Any, prefix: str) -> Iterator[tuple[str, tuple[str, Any]]]:
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        return
    for name, child in node.value:
        if not isinstance(name, yaml.ScalarNode) or name.value not in values:
            continue
        is_block = isinstance(child, yaml.CollectionNode) and not child.flow_style
        mark = name.end_mark if is_block else child.end_mark
        comment = text[mark.index :].partition("\n")[0].partition("# ")[2]
        yield f"{prefix}{name.value}", (comment, values[name.value])
        yield from _documented(text, child, values[name.value], f"{prefix}{name.value}.")


def _defaults(files: Sequence[ConfFile]) -> Json:
    parts: Json = {}
    offered: Json = {}
    for group in sorted({file.group for file in files} - {""}):
        names = list(dict.fromkeys(file.name for file in files if file.group == group))
        parts[f"option.{_name(group)}"] = {"anyOf": [{"enum": names}, {"type": ["string", "array", "null"]}]}
        offered |= dict.fromkeys((f"override /{group}", group), _ref(f"option.{_name(group)}"))
    return {**parts, "defaults": {"type": "array", "items": {"type": ["string", "object"], "properties": offered}}}


def _of_group(group: str, docs: Docs) -> Json:
    target = {"anyOf": [{"enum": list(PARTS)}, {"type": "string", "pattern": f"{ANOTHER}|{LATER}"}]}
    properties = {"_target_": target, "_partial_": _value({"type": "boolean"}), "defaults": _ref("defaults")}
    rules: list[Json] = []
    if group in SHARED:  # another target may have an argument of the same name, and then it is that
        is_ours = {"properties": {"_target_": {"pattern": r"^(runner|torch)\."}}}
        rules.append(
            {"if": is_ours, "then": {"properties": _of_schema(SHARED[group], docs, f"{group}.")["properties"]}}
        )
    for name, schema in SETTINGS.items() if group == "hydra/sweeper" else ():
        is_it = {"required": ["_target_"], "properties": {"_target_": {"const": name}}}
        rules.append({"if": is_it, "then": _of_schema(schema, {}, "", properties)})
    return _described({"type": "object", "properties": properties, "allOf": rules or [{}]}, docs.get(group, ("",))[0])


def _of_schema(schema: type, docs: Docs, prefix: str = "", shared: Mapping[str, Json] = {}) -> Json:
    properties = dict(shared)
    for name, inner in subgroups(schema).items():
        properties[name] = _of_schema(inner, docs, f"{prefix}{name}.")
    for name, key in keys(schema).items():
        properties[name] = _of_key(key, *docs.get(prefix + name, ("", None)))
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return _described(made, docs.get(prefix.rstrip("."), ("",))[0])


def _of_key(key: Key, doc: str, value: Any) -> Json:
    hint, is_choice = get_type_hints(key.schema)[key.name], "enum" in key.rule
    kind = {**({} if is_choice else _of_type(hint)), **key.rule}
    if str in (hint, *get_args(hint)) and "type" in kind:
        kind["type"] = [*kind["type"], "number"]  # OmegaConf makes a text of it
    is_plain = isinstance(value, bool | int | float | str | list | tuple | None) and value != "???"
    # as a `default`, an editor that completes a group would write the values of all its keys
    usual = f"default {json.dumps(value, default=str)}" if is_plain else ""
    rule_text = "; ".join(filter(None, (key.valid if not (is_choice and doc) else "", usual)))
    return _value(kind, doc, rule_text, is_nullable=value is None or NoneType in get_args(hint))


def _of_type(hint: Any) -> Json:
    """Return the types of plain values; {} for lists and mappings."""
    names = [TYPES.get(kind) for kind in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
    return {} if None in names else {"type": names}


def _value(kind: Json, doc: str = "", rule_text: str = "", *, is_nullable: bool = False) -> Json:
    """Return a value of a kind, or a reference. rule_text: A sentence part that says the rule."""
    made, null = dict(kind), ["null"] if is_nullable else []
    if "type" in made:
        names = [made["type"]] if isinstance(made["type"], str) else made["type"]
        made["type"] = list(dict.fromkeys([*names, *null, "string"]))
        if "string" not in names:
            words = " or ".join(WORDS.get(name, "a mapping") for name in dict.fromkeys(names) if name != "null")
            made |= {"pattern": LATER, "patternErrorMessage": f"it is {words}{f', {rule_text}' if rule_text else ''}"}
    elif made:
        made = {"anyOf": [*made.get("anyOf", [made]), {"type": ["string", *null], "pattern": LATER}]}
    return _described(made, "\n\n".join(filter(None, (doc, rule_text))))


def _described(made: Json, doc: str) -> Json:
    return {"description": doc, **made} if doc else made
