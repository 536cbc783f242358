"""Chooses a `datasets` table's input and target columns, from their types and from what the user says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runner.config.checks import choice
from runner.errors import RunnerError, nearest

KINDS = ("auto", "classification", "regression", "language")
#: what targets are usually called, the likeliest first
TARGETS = ("label", "labels", "target", "targets", "class", "y", "fine_label")
#: columns that number the rows and tell nothing of them
NUMBERING = ("id", "idx", "index", "__index_level_0__")
NUMBER, LIST, TEXT, IMAGE, CLASS, OTHER = "number", "list", "text", "image", "class", "other"


@dataclass(frozen=True)
class Chosen:
    """What is read of a table."""

    form: str  # of the inputs: number (lists of numbers too), text or image
    inputs: tuple[str, ...]
    target: str | None  # None for language, where the following tokens are the targets
    kind: str  # classification, regression or language
    names: tuple[str, ...]  # of the classes, where the column itself knows them


def chosen(features: Any, *, inputs: str | Sequence[str] | None, target: str | None, kind: str) -> Chosen:
    """features: by name, a table's. What is None is found. Raises: RunnerError with the columns that there are."""
    choice(kind, KINDS, key="data.kind")
    forms = {name: form_of(feature) for name, feature in features.items()}
    asked = [inputs] if isinstance(inputs, str) else None if inputs is None else list(inputs)
    for key, names in (("inputs", asked or []), ("target", [target] if target else [])):
        for name in names:
            if name not in forms:
                hits = nearest(name, forms) or list(forms)
                problem = f"there is no column `{name}`; there are {_told(forms)}"
                raise RunnerError.suggest(f"data.{key}={name}", problem, (f"data.{key}={hit}" for hit in hits))
    if kind != "language":
        target = target or _found_target(forms, taken=asked or [])
    columns = asked or _found_inputs({name: form for name, form in forms.items() if name != target}, kind)
    form = _one_form(columns, forms)
    if target is None or kind == "language":
        if form != TEXT:
            ways = [f"data.target={name}" for name in forms if name not in columns]
            problem = f"`data.target` is not set, and no column is called {' or '.join(TARGETS[:3])}; there are {_told(forms)}"
            raise RunnerError.suggest("data.target=null", problem, ways, "use a table with a target")
        return Chosen(form, tuple(columns), None, "language", ())
    if kind == "auto":
        is_number = getattr(features[target], "dtype", "").startswith("float") or forms[target] == LIST
        kind = "regression" if is_number else "classification"
    if forms[target] in (IMAGE, OTHER):
        problem = f"column `{target}` has {forms[target]} values, and a target is a class or a number"
        raise RunnerError.of(f"data.target={target}", problem, "use a column with classes or numbers as `data.target`")
    own = tuple(features[target].names) if forms[target] == CLASS else ()
    return Chosen(form, tuple(columns), target, kind, own)


def form_of(feature: Any) -> str:
    """What a column holds, in one word."""
    from datasets import features as known

    dtype = str(getattr(feature, "dtype", ""))
    if isinstance(feature, known.Image):
        return IMAGE
    if isinstance(feature, known.ClassLabel):
        return CLASS
    if isinstance(feature, known.Value):
        if "string" in dtype:
            return TEXT
        return NUMBER if dtype.startswith(("int", "uint", "float", "bool")) else OTHER
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return LIST if form_of(inner) in (NUMBER, LIST) else OTHER
    return OTHER


def _found_target(forms: dict[str, str], *, taken: Sequence[str]) -> str | None:
    free = [name for name in forms if name not in taken]
    for name in TARGETS:
        if hits := [column for column in free if column.lower() == name]:
            return hits[0]
    classes = [name for name in free if forms[name] == CLASS]
    return classes[0] if len(classes) == 1 else None


def _found_inputs(forms: dict[str, str], kind: str) -> list[str]:
    useful = {name: form for name, form in forms.items() if name.lower() not in NUMBERING}
    images = [name for name, form in useful.items() if form == IMAGE]
    texts = [name for name, form in useful.items() if form == TEXT]
    numbers = [name for name, form in useful.items() if form in (NUMBER, LIST)]
    if len(images) == 1:
        return images
    if len(texts) == 1 and (not numbers or kind == "language"):
        return texts
    if numbers and not texts and not images:
        return numbers
    problem = f"the input columns are not clear: there are {_told(forms)}"
    ways = [f"data.inputs={name}" for name in [*images, *texts]]
    ways += [f"data.inputs=[{','.join(numbers)}]"] * bool(numbers)
    raise RunnerError.suggest("data.inputs=null", problem, ways, "use a table of numbers, texts or images")


def _one_form(columns: Sequence[str], forms: dict[str, str]) -> str:
    found = {NUMBER if forms[name] in (LIST, CLASS) else forms[name] for name in columns}
    if len(found) == 1 and OTHER not in found and not (IMAGE in found and len(columns) > 1):
        return found.pop()
    problem = f"inputs must be numbers, texts or one image; these are {_told({name: forms[name] for name in columns})}"
    alike = [name for name in columns if forms[name] in (NUMBER, LIST)] or list(columns[:1])
    raise RunnerError.suggest(f"data.inputs=[{','.join(columns)}]", problem, [f"data.inputs=[{','.join(alike)}]"])


def _told(forms: dict[str, str]) -> str:
    return ", ".join(f"{name} ({form})" for name, form in forms.items()) or "none"
