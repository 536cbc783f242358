"""Chooses a table's input columns and its target, from what its files hold and from the settings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runner.config.identity import as_typed
from runner.data.tables.cells import NUMBER, suggested
from runner.data.tables.encoder import (
    Column,
    Columns,
    TableTarget,
    missing_target,
    missing_value,
    parts_of,
    reader_node,
)
from runner.data.tables.files import TableFile
from runner.data.tables.scan import Tally, offset_note, scan
from runner.errors import Problem, RunnerError, listed, nearest, refuse

#: whole numbers are taken as classes up to this number of different ones, as in runner.data.array_files
MAX_CLASSES = 100
#: texts of a column that are tried as dates, and columns with a hint
MAX_TRIED, MAX_HINTS = 1000, 4


@dataclass(frozen=True)
class ColumnSettings:
    """The settings of data=table that choose columns; see runner.data.table()."""

    target: str | Sequence[str] | None
    kind: str
    columns: Sequence[str] | None
    drop: Sequence[str] | None
    categorical: Sequence[str] | None
    missing: str
    max_categories: int
    drop_missing_targets: bool
    dtype: str


@dataclass(frozen=True)
class ChosenColumns:
    columns: Columns
    target: TableTarget
    num_rows: int | None = None  # None if they were not counted
    notes: tuple[str, ...] = ()  # what was chosen, and why
    is_cut: bool = False  # rare categories are unknown

    def node(self) -> dict[str, Any]:
        reader = reader_node(self.columns, self.target)
        return {"reader": reader, "num_rows": self.num_rows, "notes": list(self.notes), "is_cut": self.is_cut}


def from_reader(
    reader: Mapping[str, Any],
    *,
    num_rows: int | None = None,
    notes: Sequence[str] = ("columns and classes of an earlier run",),
    is_cut: bool = False,
) -> ChosenColumns:
    """Return the columns and the target of a reader, as in model.json; with a whole `ChosenColumns.node()`, of that."""
    columns, target, _ = parts_of(reader)
    return ChosenColumns(columns, target, num_rows, tuple(notes), is_cut)


def choose(files: Sequence[TableFile], names: Sequence[str], settings: ColumnSettings) -> ChosenColumns:
    """Choose the kind of each column of `names`; reads the files completely. Raises: RunnerError with every problem."""
    targets = _texts(settings.target) if settings.target is not None else list(names[-1:])
    inputs = _inputs(names, targets, settings, files[0])
    categorical = {name for name in _texts(settings.categorical) if name not in targets}
    complete = targets if settings.drop_missing_targets else ()
    tallies, num_left_out = scan(files, [*inputs, *targets], counted=[*categorical, *targets], complete=complete)
    if tallies[targets[0]].rows == 0:
        problem = f"all {num_left_out:,} rows lack the target" if num_left_out else f"`{files[0].name}` has no rows"
        raise RunnerError.of(files[0].setting, problem, "use a file with rows below the column names")
    problems: list[Problem] = []
    notes: list[str] = []
    try:
        target, reason = find_target([tallies[name] for name in targets], settings.kind)
        notes.append(f"target {', '.join(targets)}{' (the last column)' if settings.target is None else ''}: {reason}")
    except RunnerError as error:
        problems += error.problems
    if num_left_out:
        notes.append(f"left out, since they have no {' or '.join(targets)}: {num_left_out:,} rows")
    notes += _header_note(names, files[0])
    kept: list[Column] = []
    keys: list[str] = []
    hints: list[str] = []
    is_single = settings.dtype == "float32"
    never_keys = {*categorical, *_texts(settings.columns)}
    for name in inputs:
        tally = tallies[name]
        try:
            kind = "category" if name in categorical else tally.kind()
        except RunnerError as error:
            problems += error.problems
            continue
        if not kind:
            problem = f"column {name!r} of {files[0].name} has no value in any of its {tally.rows:,} rows"
            problems.append(Problem.suggest(files[0].setting, problem, [f"data.drop=[{name}]"]))
            continue
        if kind == "category" and name not in categorical:
            most = max(settings.max_categories, tally.present / 2)
            is_key = name not in never_keys and (tally.is_cut or len(tally.texts) > most)
            if fix := " or ".join(suggested(_first_texts(tally))):
                how = "left out" if is_key else "taken as texts"
                hints.append(f"column {name} ({next(iter(tally.texts), '')}) is {how}; {fix}")
            if is_key:
                keys.append(name)
                continue
        if settings.missing == "refuse" and tally.first_missing is not None:
            problems.append(missing_value(name, *tally.first_missing))
            continue
        column = tally.column(kind, most=settings.max_categories)
        kept.append(column if is_single else replace(column, offset=0.0))
    refuse(problems)
    if keys:
        notes.append(f"left out, because nearly all their texts differ: {listed(keys)}")
    cut = [column.name for column in kept if len(tallies[column.name].texts) > len(column.categories) > 0]
    if gaps := [column.name for column in kept if column.has_missing]:
        shares = [f"{name} {1 - tallies[name].present / tallies[name].rows:.0%}" for name in gaps]
        notes.append(f"missing values: {listed(shares)}; numbers become the training mean")
    if cut:
        notes.append(f"the {settings.max_categories} most frequent categories of {listed(cut)}; others are as unknown")
    notes += [offset_note(column.name, column.offset) for column in kept if column.offset][:MAX_HINTS]
    if target.kind == "regression" and is_single:
        notes += [_digits_note(tallies[name]) for name in targets if tallies[name].offset()]
    if files[0].form.date_format:
        _check_date_format(tallies, files[0])
    if not kept:
        raise RunnerError(_no_columns(targets, keys, tallies, files[0]))
    columns = Columns(tuple(kept), settings.missing == "refuse", settings.dtype)
    return ChosenColumns(columns, target, tallies[targets[0]].rows, (*notes, *hints[:MAX_HINTS]), bool(cut))


def find_target(tallies: Sequence[Tally], kind: str) -> tuple[TableTarget, str]:
    """Return the target, and the reason for its kind. Raises: RunnerError if it is constant, missing or of another kind."""
    names = tuple(tally.name for tally in tallies)
    setting = f"data.target={names[0] if len(names) == 1 else '[' + ','.join(names) + ']'}"
    for tally in tallies:
        if tally.first_missing is not None:
            num_missing = tally.rows - tally.present
            raise RunnerError(missing_target(tally.name, *tally.first_missing, count=num_missing))
        if len(tally.texts) == 1:
            value = next(iter(tally.texts))
            problem = f"column {tally.name!r} is {value!r} in all {tally.rows:,} rows, so there is nothing to learn"
            raise RunnerError.of(setting, problem, "use another column as `data.target`, or add rows with other values")
    if kind != "classification" and (dates := [tally.name for tally in tallies if tally.nums["date"] == tally.rows]):
        raise RunnerError(holds_dates(dates[0], setting=setting, is_single=len(tallies) == 1))
    chosen, reason = (kind, "as asked") if kind != "auto" else _guess(tallies)  # words: ok (a note that users know)
    if chosen != "classification":
        return TableTarget(names, chosen), f"{chosen}, {reason}"
    if len(tallies) > 1:
        problem = "`data.target` names several columns, and a class is one value per row"
        fix = "name one column in `data.target`, or use `data.kind=multilabel`"
        raise RunnerError.of(f"data.kind=classification {setting}", problem, fix)
    if tallies[0].is_cut:
        problem = f"column {names[0]!r} has more than 100,000 different values"
        raise RunnerError.suggest("data.kind=classification", problem, ["data.kind=regression"])
    classes = tuple(sorted(tallies[0].texts, key=_order))
    return TableTarget(names, chosen, classes), f"{len(classes)} classes, {reason}"


def holds_dates(name: str, *, setting: str, is_single: bool = True) -> Problem:
    """Return the error of a target of dates that `data.kind` doesn't call classes."""
    fix = "use another column as `data.target`, or numbers instead of dates"
    if is_single:
        fix += ", or `data.kind=classification` for one class per date"
    return Problem(setting, f"column {name!r} holds dates, and a target is classes or numbers", fix)


def _guess(tallies: Sequence[Tally]) -> tuple[str, str]:
    if len(tallies) > 1:
        are_labels = all(set(tally.texts) <= {"0", "1", "true", "false"} for tally in tallies)
        return ("multilabel", "all of them are 0 and 1") if are_labels else ("regression", "they hold numbers")
    (tally,) = tallies
    kind = tally.kind("data.kind=classification")
    if kind != "number":
        return "classification", f"they are {'texts' if kind != 'boolean' else 'true and false'}"
    are_whole = not tally.is_cut and all(text.lstrip("+-").isdecimal() for text in tally.texts)
    if are_whole and len(tally.texts) <= MAX_CLASSES:
        return "classification", f"up to {MAX_CLASSES} whole numbers are"
    return "regression", f"more than {MAX_CLASSES} whole numbers are" if are_whole else "they are not whole numbers"


def _order(text: str) -> tuple[bool, float, str]:
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text


def _inputs(names: Sequence[str], targets: Sequence[str], settings: ColumnSettings, file: TableFile) -> list[str]:
    columns, drop, categorical = map(_texts, (settings.columns, settings.drop, settings.categorical))
    known = set(names)
    problems = [
        _unknown(key, name, names, file)
        for key, some in (("target", targets), ("columns", columns), ("drop", drop), ("categorical", categorical))
        for name in some
        if name not in known
    ]
    for key, some, more, fix in (
        ("drop", drop, "", "use another column as `data.target`"),
        ("columns", columns, ",...", "remove it from `data.columns`"),
    ):
        if both := [name for name in some if name in targets]:
            problems.append(Problem(f"data.{key}=[{both[0]}{more}]", f"column `{both[0]}` is the target", fix))
    left_out = {*drop, *(known.difference(columns) if settings.columns is not None else ())} - {*targets}
    if lost := [name for name in categorical if name in left_out]:
        key, fix = ("drop", "remove it from") if lost[0] in drop else ("columns", f"add `{lost[0]}` to")
        problem = f"`data.{key}` leaves column `{lost[0]}` out"
        fix = f"{fix} `data.{key}`, or remove it from `data.categorical`"
        problems.append(Problem(f"data.categorical=[{lost[0]}]", problem, fix))
    refuse(problems)
    taken = {*targets, *drop}
    return [name for name in (columns if settings.columns is not None else names) if name not in taken]


def _unknown(key: str, name: str, names: Sequence[str], file: TableFile) -> Problem:
    hits = nearest(name, names, cutoff=0.6)
    ways = [f"data.{key}={hit}" if key == "target" else f"data.{key}=[{hit}]" for hit in hits]
    problem = f"`{file.name}` has no column {name!r}; it has {listed(names)}"
    return Problem.suggest(f"data.{key}={name}", problem, ways, "use one of these columns", code="unknown-option")


def _no_columns(targets: Sequence[str], keys: Sequence[str], tallies: Mapping[str, Tally], file: TableFile) -> Problem:
    problem = f"no input column is left next to {', '.join(targets)}"
    if not keys:
        return Problem(file.setting, f"{problem}: the table has no other column", "use another column as `data.target`")
    problem += f": {', '.join(keys)} {'is' if len(keys) == 1 else 'are'} left out, because nearly all the texts differ"
    name, texts = keys[0], _first_texts(tallies[keys[0]])
    ways = suggested(texts) or [f"data.categorical=[{name}]"]
    if ways[0].startswith("data.categorical") and sum(" " in text.strip() for text in texts) * 2 > len(texts):
        where = as_typed("data.path", file.path)
        if file.path.suffix not in (".csv", ".tsv", ".parquet", ".arrow"):  # its library does not know the ending
            where = f"data.path={'csv' if file.is_csv else 'parquet'} {as_typed('data.data_files', file.path)}"
        ways = [f"data=huggingface {where} data.inputs={name} data.target={targets[0]} model=transformer"]
    return Problem.suggest(file.setting, problem, ways)


def _header_note(names: Sequence[str], file: TableFile) -> list[str]:
    numbers = [name for name in names if re.match(NUMBER, name)]
    if not file.is_csv or not file.form.header or len(numbers) * 2 <= len(names):
        return []
    return [f"the first line is taken as names: {listed(names[:5])}; data.header=false if it is a row"]


def _digits_note(tally: Tally) -> str:
    step = float(np.spacing(np.float32(tally.offset())))
    problem = f"target {tally.name} has steps of {step:g} in float32, in which models compute"
    return f"{problem}; a column of {tally.name} less {tally.offset():,.15g} as the target keeps its digits"


def _check_date_format(tallies: Mapping[str, Tally], file: TableFile) -> None:
    if any(tally.nums["date"] for tally in tallies.values()):
        return
    ways = next((found for tally in tallies.values() if (found := suggested(_first_texts(tally)))), None)
    problem = f"no column of `{file.name}` has dates in this format"
    setting = f"data.date_format={file.form.date_format[0]}"
    raise RunnerError.suggest(setting, problem, ways or ["data.date_format=null"])


def _first_texts(tally: Tally) -> list[str]:
    return list(itertools.islice(tally.texts, MAX_TRIED))


def _texts(names: str | Sequence[str] | None) -> list[str]:
    if names is None:
        return []
    return list(dict.fromkeys(map(str, [names] if isinstance(names, str | int | float) else names)))
