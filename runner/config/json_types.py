"""Says in JSON Schema what YAML may hold: for a type, an argument, a dataclass of runner.config.schema.

A value that comes later, ${...} or ???, may stand anywhere.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

Json = dict[str, Any]
Told = Mapping[str, tuple[str, Any]]  # by dotted key, what its comment in conf/ says, and its value there
LATER = r"\$\{|^\?\?\?$"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}
NAMED = {"bool": bool, "int": int, "float": float, "str": str, "None": NoneType}
WORDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number", "array": "a list"}
ABSENT = inspect.Parameter.empty


def of_arguments(arguments: Sequence[inspect.Parameter], told: Told, beside: Json) -> Json:
    """A mapping with a function's arguments, and with nothing that it does not take. beside: what else may stand there."""
    named = [each for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    properties = beside | {each.name: _of_argument(each, *told.get(each.name, ("", ABSENT))) for each in named}
    takes_more = any(each.kind is each.VAR_KEYWORD for each in arguments)
    return {"type": "object", "properties": properties, "additionalProperties": takes_more}


def of_dataclass(schema: type, told: Told, prefix: str = "", beside: Json | None = None) -> Json:
    """A mapping with the keys of a dataclass, and with no other. beside: what else may stand there."""
    hints, properties = get_type_hints(schema), dict(beside or {})
    for item in fields(schema):
        key = prefix + item.name
        doc, value = told.get(key, ("", None))
        if is_dataclass(item.default_factory):
            properties[item.name] = of_dataclass(item.default_factory, told, f"{key}.")
            continue
        rule = item.metadata
        kind = {"enum": [*rule["choices"]]} if "choices" in rule else _of_type(hints[item.name])
        kind = {**(kind or {}), **rule["limits"]} if "limits" in rule else kind
        if kind is not None and str in (hints[item.name], *get_args(hints[item.name])) and "type" in kind:
            kind["type"] = [*kind["type"], "number"]  # OmegaConf makes a text of it
        valid = rule.get("valid", "") if "choices" not in rule or not doc else ""
        said = "; ".join(filter(None, (valid, _usual(value))))
        is_nullable = value is None or NoneType in get_args(hints[item.name])
        properties[item.name] = value_of(kind, doc, said, is_nullable=is_nullable)
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return described(made, told.get(prefix.rstrip("."), ("",))[0])


def _of_argument(argument: inspect.Parameter, doc: str, value: Any) -> Json:
    kind, default = _of_type(argument.annotation), argument.default
    words = _words(doc) if kind is not None and "string" in kind.get("type", ()) else []
    for each in (default, value) if words else ():
        words += [] if each in (ABSENT, None, *words) else [each]
    kind = {"enum": words} if words else kind
    said = _usual(value, "for example") if default is ABSENT else _usual(default)
    return value_of(kind, doc, said, is_nullable=default is None or value is None)


def _words(doc: str) -> list[Any]:
    parts = [part.partition(":")[0].strip() for part in re.sub(r"\([^)]*\)", "", doc).split(" | ")]
    is_list = len(parts) > 1 and all(re.fullmatch(r"[a-z][a-z0-9_]*", part) for part in parts)
    return [yaml.safe_load(part) for part in parts] if is_list else []


def _of_type(hint: Any) -> Json | None:
    if isinstance(hint, str):  # not resolved
        hint = Union[tuple(NAMED.get(part.strip(), object) for part in hint.split("|"))]  # noqa: UP007
    origin, inside = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        numbers = float in inside  # and one stands for a tensor
        kinds = [_of_type(each) for each in inside if not (numbers and getattr(each, "__name__", "") == "Tensor")]
        if None in kinds or any("enum" in (kind or {}) for kind in kinds):
            return None
        found = [kind for kind in kinds if kind is not None]
        items = {key: value for kind in found for key, value in kind.items()}
        return items | {"type": [name for kind in found for name in kind["type"]]}
    if origin is Literal:
        return {"enum": [*inside]}
    if not inspect.isclass(origin):
        return None
    if origin in TYPES:
        return {"type": [TYPES[origin]]}
    if origin.__module__ not in ("builtins", "collections.abc"):
        return None
    if issubclass(origin, Mapping):
        return {"type": ["object"]}
    if issubclass(origin, Iterable):
        each = {*inside} - {Ellipsis}
        return {"type": ["array"], "items": value_of(_of_type(each.pop())) if len(each) == 1 else {}}
    return None


def value_of(kind: Json | None, doc: str = "", said: str = "", *, is_nullable: bool = False) -> Json:
    """A value of a kind, or one that comes later. said: what it must be, in words."""
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
    """A value, told: were it a `default` of JSON Schema's, an editor that completes a group would write those of all its keys."""
    is_plain = isinstance(value, bool | int | float | str | list | tuple | None) and value != "???"
    return f"{word} {json.dumps(value, default=str)}" if is_plain else ""


def described(made: Json, doc: str) -> Json:
    return {"description": doc, **made} if doc else made
