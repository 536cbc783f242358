"""Turns a table reader's columns, target and form into plain values that Hydra leaves as they are, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.data.tables.encoder import Columns, columns_of
from runner.data.tables.forms import Form, form_of
from runner.data.tables.target import Target

TARGET = "runner.data.TableReader"


def reader_node(columns: Columns, target: Target, form: Form | None = None) -> dict[str, Any]:
    """What build() makes a TableReader of."""
    written = _hidden(form.node()) if form is not None else {}
    return {
        "_target_": TARGET,
        "columns": [_hidden(item) for item in columns.node()],
        "target": _hidden(target.node()),
        "refuses_missing": columns.refuses_missing,
        **({"form": written} if written else {}),
    }


def arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader_node() gives to its TableReader."""
    return {key: value for key, value in node.items() if key != "_target_"}


def columns_in(node: Mapping[str, Any] | None) -> Columns | None:
    """Of a reader_node(); None for the reader of anything else. Imports no torch."""
    if node is None or node.get("_target_") != TARGET:
        return None
    return columns_of([visible(item) for item in node["columns"]], refuses_missing=node["refuses_missing"])


def form_in(node: Mapping[str, Any] | None) -> Form | None:
    """How files of a reader_node()'s kind are written; None for the reader of anything else. Imports no torch."""
    if node is None or node.get("_target_") != TARGET:
        return None
    return form_of(**visible(node.get("form") or {}))


def visible(value: Any) -> Any:
    """As it was before reader_node()."""
    return _mapped(value, lambda text: text.replace("$\0{", "${"))


def _hidden(value: Any) -> Any:
    """A text with ${ in it would be filled in by Hydra; no table holds a zero byte."""
    return _mapped(value, lambda text: text.replace("${", "$\0{"))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
