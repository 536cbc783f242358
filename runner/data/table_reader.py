"""What a table was trained on, as plain values, goes in; it reads rows of the same kind from a person's file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from runner.data.table_columns import Columns, Encoder, columns_of
from runner.data.table_files import TableFile, table_files
from runner.data.table_forms import Form, form_of
from runner.data.table_rows import fits_in_memory, gathered
from runner.data.table_target import Target, target_of
from runner.errors import Fault, RunnerError

log = logging.getLogger("runner")
TARGET = "runner.data.table_reader.TableReader"
WRITE = "that line mended, or a file of the kind that was trained on"


class TableReader:
    """reader(path) -> (N, raw floats) float32 on the host, as the trained model takes it, without its targets.

    The file's columns may stand in any order, beside others; its targets may be there. A category that training did not
    know counts as unknown, and one warning says how many there are. unknown: the same, by column, after a call.
    """

    def __init__(
        self,
        columns: Sequence[Mapping[str, Any]],
        target: Mapping[str, Any],
        *,
        refuses_missing: bool = False,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        plain = [_visible(item) for item in columns]
        self.columns: Columns = columns_of(plain, refuses_missing=refuses_missing)
        self.target: Target = target_of(_visible(target))
        self.form = form_of(**_visible(form or {}))
        self.unknown: dict[str, int] = {}

    def __call__(self, path: str, *, key: str = "--input") -> Tensor | Iterator[Tensor]:
        """All rows of the file; of one that memory has no room for, an iterator of some thousands at a time.

        Raises: RunnerError for a file without one of the columns, and for a value that its column can't take.
        """
        files = table_files(path, key=key, form=self.form)
        fits, _ = fits_in_memory(sum(file.num_bytes(self.columns.num_floats) for file in files), "auto")
        if not fits:
            return self._some(files)
        encoder = Encoder(self.columns, write=WRITE)
        chunks = ((rows, rows[:, :0]) for rows, _, _ in encoder.chunks(files))
        rows, _ = gathered(chunks, num_floats=self.columns.num_floats)
        if not len(rows):
            raise RunnerError(Fault(f"{key}={path}", "it has no rows", "a file with rows below its column names"))
        self._tell(encoder)
        return rows

    def _some(self, files: Sequence[TableFile]) -> Iterator[Tensor]:
        from torch import from_numpy

        encoder = Encoder(self.columns, write=WRITE)
        for rows, _, _ in encoder.chunks(files):
            yield from_numpy(rows)
        self._tell(encoder)

    def _tell(self, encoder: Encoder) -> None:
        self.unknown = encoder.unknown
        tell_unknown(encoder)


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


def tell_unknown(encoder: Encoder) -> None:
    for name, count in encoder.unknown.items():
        rows = "1 row has a category" if count == 1 else f"{count:,} rows have categories"
        log.warning("column %r: %s that training did not know; taken as unknown", name, rows)


def _hidden(value: Any) -> Any:
    """A text with ${ in it would be filled in by Hydra; no table holds a zero byte."""
    return _mapped(value, lambda text: text.replace("${", "$\0{"))


def _visible(value: Any) -> Any:
    return _mapped(value, lambda text: text.replace("$\0{", "${"))


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return change(value) if isinstance(value, str) else value
