"""Names that MLflow accepts, made from names in the configuration, and limits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

MAX_NAME = 250  # characters, in MLflow 3
MAX_PARAM = 6000
MAX_TAG = 8000
TOO_LONG = "an answer of more than 32 MiB"  # deadline.MAX_BYTES

_NOT_OF_A_MODEL = re.compile(r"[^\w-]+")
_INDEX = re.compile(r"\[(\d+)\]")
_REFUSED = re.compile(r"[^/\w.\- :]")


def valid_name(name: str) -> str:
    """Return a valid name: `model.layers[0]` becomes `model.layers.0`, other characters `_`; a long name ends in its digest."""
    spelled = _REFUSED.sub("_", _INDEX.sub(r".\1", name))
    parts = [part if part.strip(".") else "_" * len(part) for part in spelled.split("/") if part]  # a//b, ./a, a/..
    spelled = "/".join(parts) or "_"
    if spelled.startswith(".."):
        spelled = "__" + spelled[2:]
    return spelled if len(spelled) <= MAX_NAME else _with_digest(spelled, name)


def valid_names(values: Mapping[str, object], *, most: int) -> dict[str, str]:
    """Return valid unique names, and values of at most `most` characters."""
    names = Names()
    return {names.key(name): cut(str(value), most=most) for name, value in values.items()}


class Names:
    """Makes valid names unique: `p>0.5` becomes `p_0.5`, and a later `p<0.5` becomes `p_0.5_` and its digest.

    names: In order; the metrics of a run in the order of its journal, so that the result is always the same.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._keys: dict[str, str] = {}
        self._taken: set[str] = set()
        for name in names:
            self.key(name)

    def key(self, name: str) -> str:
        """Return MLflow's name; a new one is added."""
        key = self._keys.get(name)
        if key is None:
            key = valid_name(name)
            if key in self._taken:
                key = _with_digest(key, name)
            self._keys[name] = key
            self._taken.add(key)
        return key


def valid_model_name(name: str) -> str:
    """Return a valid name of a logged model that can be typed in runs:/RUN/NAME: `cnn-my.csv` becomes `cnn-my-csv`."""
    return _NOT_OF_A_MODEL.sub("-", name).strip("-")[:MAX_NAME] or "model"


def cut(text: str, *, most: int) -> str:
    """Return the text, or its beginning and its length."""
    if len(text) <= most:
        return text
    note = f"... ({len(text)} characters)"
    return text[: most - len(note)] + note


def _with_digest(spelled: str, name: str) -> str:
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{spelled[: MAX_NAME - 9]}_{digest}"
