"""Decides what a table's target columns are, from their tallies: classes, numbers or several labels a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from runner.config.checks import choice
from runner.data.tables.arrow_values import BadValue, as_booleans, as_codes, as_numbers
from runner.data.tables.encoder import Place, bad_value
from runner.data.tables.scan import Tally
from runner.errors import Problem, RunnerError

KINDS = ("auto", "classification", "regression", "multilabel")
#: whole numbers are taken as classes up to so many different ones, as in runner.data.array_data
MOST_CLASSES = 100


@dataclass(frozen=True)
class Target:
    names: tuple[str, ...]
    kind: str  # classification | regression | multilabel
    classes: tuple[str, ...] = ()

    @property
    def num_outputs(self) -> int:
        return len(self.classes) or len(self.names)

    def node(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def encode(self, values: Sequence[Any], place: Place) -> Any:
        """(n,) int64 of classes, else (n, T) float32. Raises: RunnerError for a value that is missing or none of them."""
        for name, column in zip(self.names, values, strict=True):
            if column.null_count:
                row = int(column.is_null().to_numpy(zero_copy_only=False).argmax())
                raise RunnerError(_missing(name, place, row))
        if self.kind != "classification":
            return np.stack(
                [self._floats(name, column, place) for name, column in zip(self.names, values, strict=True)], 1
            )
        codes = as_codes(values[0], {text: number for number, text in enumerate(self.classes)})
        if (codes < 0).any():
            row = int((codes < 0).argmax())
            problem = f"{place.of(row)}, column {self.names[0]!r}, is {values[0][row].as_py()!r}, a class that the training table lacks"
            fix = f"add rows of this class to the training table (it has {', '.join(self.classes[:10])}), or remove that line"
            raise RunnerError.of(place.file.asked, problem, fix)
        return codes.astype(np.int64)

    def _floats(self, name: str, values: Any, place: Place) -> Any:
        try:
            if self.kind == "multilabel":
                found = as_booleans(values)
                if (is_no_label := ~np.isin(found, (0, 1))).any():
                    raise BadValue(row := int(is_no_label.argmax()), values[row].as_py())
            else:
                found = as_numbers(values)
        except BadValue as bad:
            holds = "labels, 0 or 1" if self.kind == "multilabel" else "the numbers of a regression"
            ways = ["data.kind=classification"] * (len(self.names) == 1)
            raise RunnerError(bad_value(name, holds, bad, place, ways, f"leave {name} out of `data.target`")) from None
        return found.astype(np.float32)


def target_of(node: Mapping[str, Any]) -> Target:
    return Target(tuple(node["names"]), node["kind"], tuple(node["classes"]))


def find_target(tallies: Sequence[Tally], kind: str, *, asked: str) -> tuple[Target, str]:
    """The target, and how its kind was found. Raises: RunnerError for one that is constant, missing or of another kind."""
    choice(kind, KINDS, key="data.kind")
    for tally in tallies:
        if tally.first_missing is not None:
            raise RunnerError(_missing(tally.name, *tally.first_missing, count=tally.rows - tally.present))
        if len(tally.texts) == 1:
            problem = f"column {tally.name!r} is {next(iter(tally.texts))!r} in all {tally.rows:,} rows, so there is nothing to learn"
            raise RunnerError.of(asked, problem, "use another column as `data.target`, or add rows with other values")
    if kind != "classification" and (dates := [tally.name for tally in tallies if tally.dates == tally.rows]):
        raise RunnerError(holds_dates(dates[0], asked=asked, is_one=len(tallies) == 1))
    found, why = (kind, "as asked") if kind != "auto" else _guess(tallies)
    names = tuple(tally.name for tally in tallies)
    if found != "classification":
        return Target(names, found), f"{found}, {why}"
    if len(tallies) > 1:
        problem = "`data.target` names several columns, and a class is one value per row"
        fix = "name one column in `data.target`, or use `data.kind=multilabel`"
        raise RunnerError.of(f"data.kind=classification {asked}", problem, fix)
    if tallies[0].is_cut:
        problem = f"column {names[0]!r} has more than 100,000 different values"
        raise RunnerError.suggest("data.kind=classification", problem, ["data.kind=regression"])
    return Target(names, found, tuple(sorted(tallies[0].texts, key=_order))), f"{len(tallies[0].texts)} classes, {why}"


def holds_dates(name: str, *, asked: str, is_one: bool = True) -> Problem:
    """Of a target that nobody has called classes. is_one: whether it is the only column of the target."""
    fix = "use another column as `data.target`, or numbers instead of dates"
    if is_one:
        fix += ", or `data.kind=classification` for one class per date"
    return Problem(asked, f"column {name!r} holds dates, and a target is classes or numbers", fix)


def _guess(tallies: Sequence[Tally]) -> tuple[str, str]:
    if len(tallies) > 1:
        are_labels = all(set(tally.texts) <= {"0", "1", "true", "false"} for tally in tallies)
        return ("multilabel", "all of them are 0 and 1") if are_labels else ("regression", "they hold numbers")
    (tally,) = tallies
    kind = tally.kind("data.kind=classification")
    if kind != "number":
        return "classification", f"they are {'texts' if kind != 'boolean' else 'true and false'}"
    are_whole = not tally.is_cut and all(text.lstrip("+-").isdecimal() for text in tally.texts)
    if are_whole and len(tally.texts) <= MOST_CLASSES:
        return "classification", f"up to {MOST_CLASSES} whole numbers are"
    return "regression", f"more than {MOST_CLASSES} whole numbers are" if are_whole else "they are not whole numbers"


def _order(text: str) -> tuple[bool, float, str]:
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def _missing(name: str, place: Place, row: int, *, count: int = 1) -> Problem:
    also = f"; so are {count - 1:,} more" if count > 1 else ""
    problem = f"{place.of(row)}, column {name!r}, is missing, and it is the target{also}"
    fix = "use `data.drop_missing_targets=true` to leave out rows without a target, or another column as `data.target`"
    return Problem(place.file.asked, problem, fix)
