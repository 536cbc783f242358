"""Chooses a table's input and target columns, from its files and from what the user says of its columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.data.tables.arrow_values import NUMBER
from runner.data.tables.encoder import Column, Columns, listed
from runner.data.tables.files import TableFile
from runner.data.tables.forms import suggested
from runner.data.tables.node import arguments, reader_node
from runner.data.tables.reader import TableReader
from runner.data.tables.scan import Tally, scan, taken_less
from runner.data.tables.target import Target, find_target
from runner.errors import Problem, RunnerError, nearest, refuse

#: texts of a column that decide whether they look like dates, and columns that are told of
MOST_LOOKED_AT, MOST_HINTS = 1000, 4


@dataclass(frozen=True)
class Table:
    columns: Columns
    target: Target
    num_rows: int | None = None  # None where nobody has counted them
    notes: tuple[str, ...] = ()  # what was chosen, and why
    is_cut: bool = False  # rare categories are unknown

    def node(self) -> dict[str, Any]:
        """Plain values, for table_of()."""
        reader = reader_node(self.columns, self.target)
        return {"reader": reader, "num_rows": self.num_rows, "notes": list(self.notes), "is_cut": self.is_cut}


def table_of(node: Mapping[str, Any]) -> Table:
    found = from_reader(node["reader"])
    return Table(found.columns, found.target, node["num_rows"], tuple(node["notes"]), node["is_cut"])


def from_reader(node: Mapping[str, Any]) -> Table:
    """The columns and the target of an earlier run. node: its reader, as in model.json."""
    reader = TableReader(**arguments(node))
    return Table(reader.columns, reader.target, notes=("columns and classes of an earlier run",))


def choose(
    files: Sequence[TableFile],
    names: Sequence[str],  # of all its columns
    *,
    target: str | Sequence[str] | None,
    kind: str,
    columns: Sequence[str] | None,
    drop: Sequence[str] | None,
    categorical: Sequence[str] | None,
    missing: str,
    max_categories: int,
    drop_missing_targets: bool = False,
) -> Table:
    """Choose the kind of each column; reads the files completely.

    Raises:
        RunnerError: For every error in the table or the settings.
    """
    _check(missing, max_categories)
    targets = _texts(target) if target is not None else list(names[-1:])
    inputs = _inputs(names, targets, columns, drop, categorical, file=files[0])
    forced = {name for name in _texts(categorical) if name not in targets}
    complete = targets if drop_missing_targets else ()
    tallies, num_left_out = scan(files, [*inputs, *targets], counted=[*forced, *targets], complete=complete)
    if tallies[targets[0]].rows == 0:
        problem = (
            f"all {num_left_out:,} rows lack the target" if num_left_out else f"`{files[0].path.name}` has no rows"
        )
        raise RunnerError.of(files[0].asked, problem, "use a file with rows below the column names")
    asked = f"data.target={targets[0] if len(targets) == 1 else '[' + ','.join(targets) + ']'}"
    problems: list[Problem] = []
    notes: list[str] = []
    try:
        found, why = find_target([tallies[name] for name in targets], kind, asked=asked)
        notes.append(f"target {', '.join(targets)}{' (the last column)' if target is None else ''}: {why}")
    except RunnerError as error:
        problems += error.problems
    if num_left_out:
        notes.append(f"left out, since they have no {' or '.join(targets)}: {num_left_out:,} rows")
    notes += _on_the_header(names, files[0])
    kept: list[Column] = []
    left_out: list[str] = []
    hints: list[str] = []
    wanted = {*forced, *_texts(columns)}
    for name in inputs:
        tally = tallies[name]
        try:
            what = "category" if name in forced else _kind(tally, files[0])
        except RunnerError as error:
            problems += error.problems
            continue
        if what == "category" and name not in wanted and _is_a_key(tally, max_categories):
            left_out.append(name)
            hints += _on_the_form(tally, "left out")
            continue
        if what == "category" and name not in forced:
            hints += _on_the_form(tally, "taken as texts")
        if missing == "refuse" and tally.first_missing is not None:
            place, row = tally.first_missing
            problem = f"{place.of(row)}, column {name!r}, is missing"
            problems.append(
                Problem.suggest("data.missing=refuse", problem, ["data.missing=mean", f"data.drop=[{name}]"])
            )
            continue
        kept.append(tally.column(what, most=max_categories))
    refuse(problems)
    if left_out:
        notes.append(f"left out, because nearly all their texts differ: {listed(left_out)}")
    if gaps := [column.name for column in kept if column.has_missing]:
        shares = [f"{name} {1 - tallies[name].present / tallies[name].rows:.0%}" for name in gaps]
        notes.append(f"missing values: {listed(shares)}; numbers become the training mean")
    if counters := [column.name for column in kept if column.kind == "number" and tallies[column.name].is_row_number()]:
        notes.append(f"{listed(counters)} only counts the rows; data.drop=[{','.join(counters)}] leaves it out")
    if cut := [column.name for column in kept if len(tallies[column.name].texts) > len(column.categories) > 0]:
        notes.append(f"the {max_categories} most frequent categories of {listed(cut)}; others are as unknown")
    notes += [taken_less(column.name, column.offset) for column in kept if column.offset][:MOST_HINTS]
    if found.kind == "regression":
        notes += [_on_its_digits(tallies[name]) for name in targets if tallies[name].offset()]
    if used := files[0].form.date_format:
        _check_used(used, tallies, files[0])
    notes += hints[:MOST_HINTS]
    if not kept:
        raise RunnerError(_nothing_left(targets, [tallies[name] for name in left_out], files[0]))
    return Table(Columns(tuple(kept), missing == "refuse"), found, tallies[targets[0]].rows, tuple(notes), bool(cut))


def _inputs(
    names: Sequence[str],
    targets: Sequence[str],
    columns: Sequence[str] | None,
    drop: Sequence[str] | None,
    categorical: Sequence[str] | None,
    *,
    file: TableFile,
) -> list[str]:
    asked = (
        ("target", targets),
        ("columns", _texts(columns)),
        ("drop", _texts(drop)),
        ("categorical", _texts(categorical)),
    )
    known = set(names)
    problems = [_unknown(key, name, names, file) for key, some in asked for name in some if name not in known]
    if both := [name for name in _texts(drop) if name in targets]:
        problems.append(
            Problem(
                f"data.drop=[{both[0]}]", f"column `{both[0]}` is the target", "use another column as `data.target`"
            )
        )
    if both := [name for name in _texts(columns) if name in targets]:
        problems.append(
            Problem(
                f"data.columns=[{both[0]},...]", f"column `{both[0]}` is the target", "remove it from `data.columns`"
            )
        )
    left_out = {*_texts(drop), *(known.difference(_texts(columns)) if columns is not None else ())} - {*targets}
    if lost := [name for name in _texts(categorical) if name in left_out]:
        key, fix = ("drop", "remove it from") if lost[0] in _texts(drop) else ("columns", f"add `{lost[0]}` to")
        problem = f"`data.{key}` leaves column `{lost[0]}` out"
        fix = f"{fix} `data.{key}`, or remove it from `data.categorical`"
        problems.append(Problem(f"data.categorical=[{lost[0]}]", problem, fix))
    refuse(problems)
    taken = {*targets, *_texts(drop)}
    return [name for name in (_texts(columns) if columns is not None else names) if name not in taken]


def _nothing_left(targets: Sequence[str], left_out: Sequence[Tally], file: TableFile) -> Problem:
    problem = f"no input column is left next to {', '.join(targets)}"
    if not left_out:
        return Problem(file.asked, f"{problem}: the table has no other column", "use another column as `data.target`")
    names = ", ".join(tally.name for tally in left_out)
    problem += f": {names} {'is' if len(left_out) == 1 else 'are'} left out, because nearly all the texts differ"
    first = left_out[0]
    texts = list(itertools.islice(first.texts, MOST_LOOKED_AT))
    ways = suggested(texts)
    if not ways and sum(" " in text.strip() for text in texts) * 2 > len(texts):
        words = f"data.data_files={file.path} data.inputs={first.name} data.target={targets[0]} model=transformer"
        ways = [f"data=huggingface data.path={'csv' if file.is_csv else 'parquet'} {words}"]
    return Problem.suggest(file.asked, problem, ways or [f"data.categorical=[{first.name}]"])


def _unknown(key: str, name: str, names: Sequence[str], file: TableFile) -> Problem:
    hits = nearest(name, names, cutoff=0.6)
    ways = [f"data.{key}={hit}" if key == "target" else f"data.{key}=[{hit}]" for hit in hits]
    problem = f"`{file.path.name}` has no column {name!r}; it has {listed(names)}"
    return Problem.suggest(f"data.{key}={name}", problem, ways, "use one of these columns", code="unknown-option")


def _kind(tally: Tally, file: TableFile) -> str:
    kind = tally.kind()
    if not kind:
        problem = f"column {tally.name!r} of {file.path.name} has no value in any of its {tally.rows:,} rows"
        raise RunnerError.suggest(file.asked, problem, [f"data.drop=[{tally.name}]"])
    return kind


def _on_the_header(names: Sequence[str], file: TableFile) -> list[str]:
    numbers = [name for name in names if re.match(NUMBER, name)]
    if not file.is_csv or not file.form.header or len(numbers) * 2 <= len(names):
        return []
    return [f"the first line is taken as names: {listed(names[:5])}; data.header=false if it is a row"]


def _on_the_form(tally: Tally, what: str) -> list[str]:
    fix = " or ".join(suggested(itertools.islice(tally.texts, MOST_LOOKED_AT)))
    first = next(iter(tally.texts), "")
    return [f"column {tally.name} ({first}) is {what}; {fix}"] if fix else []


def _on_its_digits(tally: Tally) -> str:
    offset = tally.offset()
    step = float(np.spacing(np.float32(offset)))
    return (
        f"target {tally.name} is told in steps of {step:g}, as float32, in which models compute, has no room for more of "
        f"its digits; a column of {tally.name} less {offset:,.15g} as the target keeps them"
    )


def _check_used(formats: Sequence[str], tallies: Mapping[str, Tally], file: TableFile) -> None:
    if any(tally.dates for tally in tallies.values()):
        return
    texts = {name: suggested(itertools.islice(tally.texts, MOST_LOOKED_AT)) for name, tally in tallies.items()}
    ways = next((found for found in texts.values() if found), ["data.date_format=null"])
    problem = f"no column of `{file.path.name}` has dates in this format"
    raise RunnerError.suggest(f"data.date_format={formats[0]}", problem, ways)


def _is_a_key(tally: Tally, most: int) -> bool:
    return tally.is_cut or len(tally.texts) > max(most, tally.present / 2)


def _check(missing: str, max_categories: int) -> None:
    if missing not in ("mean", "refuse"):
        problem = "`data.missing` must be `mean` (the training split's) or `refuse`"
        raise RunnerError.suggest(f"data.missing={missing}", problem, ["data.missing=mean", "data.missing=refuse"])
    if type(max_categories) is not int or max_categories < 1:
        problem = "`data.max_categories` must be a whole number, 1 or more"
        raise RunnerError.suggest(f"data.max_categories={max_categories}", problem, ["data.max_categories=100"])


def _texts(names: str | Sequence[str] | None) -> list[str]:
    if names is None:
        return []
    return list(dict.fromkeys(map(str, [names] if isinstance(names, str | int | float) else names)))
