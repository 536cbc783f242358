"""Names that MLflow takes: the nearest one to a name as the configuration has it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping

MOST_NAME = 250  # characters, in MLflow 3
MOST_PARAM = 6000
MOST_TAG = 8000

_NOT_OF_A_MODEL = re.compile(r"[^\w-]+")
_INDEX = re.compile(r"\[(\d+)\]")
_REFUSED = re.compile(r"[^/\w.\- ]" if os.name == "nt" else r"[^/\w.\- :]")


def valid_name(name: str) -> str:
    """`model.layers[0]` becomes `model.layers.0`; what MLflow refuses becomes `_`; a long name ends in its digest."""
    spelled = _REFUSED.sub("_", _INDEX.sub(r".\1", name))
    parts = [part if part.strip(".") else "_" * len(part) for part in spelled.split("/") if part]  # a//b, ./a, a/..
    spelled = "/".join(parts) or "_"
    if spelled.startswith(".."):
        spelled = "__" + spelled[2:]
    return spelled if len(spelled) <= MOST_NAME else _with_digest(spelled, name)


def valid_names(values: Mapping[str, object], *, most: int) -> dict[str, str]:
    """Spells the names and cuts the values to `most` characters; two names that would fall together stay apart."""
    spelled: dict[str, str] = {}
    for name, value in values.items():
        key = valid_name(name)
        if key in spelled:
            key = _with_digest(key, name)
        spelled[key] = cut(str(value), most=most)
    return spelled


def valid_model_name(name: str) -> str:
    """What MLflow takes as a logged model's, and a person can type in runs:/RUN/NAME: `cnn-my.csv` becomes `cnn-my-csv`."""
    return _NOT_OF_A_MODEL.sub("-", name).strip("-")[:MOST_NAME] or "model"


def cut(text: str, *, most: int) -> str:
    """The text, or its beginning and how long it was."""
    if len(text) <= most:
        return text
    note = f"... ({len(text)} characters)"
    return text[: most - len(note)] + note


def _with_digest(spelled: str, name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{spelled[: MOST_NAME - 9]}_{digest}"
