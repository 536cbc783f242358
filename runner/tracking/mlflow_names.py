"""Names that MLflow takes: the nearest one to a name as the configuration has it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping

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
    names = Names()
    return {names.key(name): cut(str(value), most=most) for name, value in values.items()}


class Names:
    """Spells names so that no two fall together: `p>0.5` becomes `p_0.5`, and `p<0.5` behind it `p_0.5_` and its digest.

    names: in the order in which they have come; of a run's metrics that of its journal, so that whoever asks hears the same.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._keys: dict[str, str] = {}
        self._taken: set[str] = set()
        for name in names:
            self.key(name)

    def key(self, name: str) -> str:
        """What MLflow knows it by; one that was not there yet comes behind all others."""
        key = self._keys.get(name)
        if key is None:
            key = valid_name(name)
            if key in self._taken:
                key = _with_digest(key, name)
            self._keys[name] = key
            self._taken.add(key)
        return key


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
