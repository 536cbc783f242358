"""Reads rows of a user's file or DataFrame by the columns that a table was trained on, given as plain values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from runner.data.tables.encoder import Columns, Encoder, Rows, columns_of
from runner.data.tables.files import TableFile, table_files
from runner.data.tables.forms import form_of
from runner.data.tables.frame import TableFrame
from runner.data.tables.node import visible
from runner.data.tables.rows import fits_in_memory, gathered
from runner.data.tables.target import Target, target_of
from runner.errors import RunnerError

log = logging.getLogger("runner")
FIX = "use a file like the one that the run was trained on"


class TableReader:
    """Read a file's rows as the trained model takes them: reader(path) -> (N, raw floats) float32 on the host.

    The file may have further columns, in any order. Categories that training did not know and missing values are
    counted by column in `unknown` and `missing`, and reported with one warning each.
    """

    def __init__(
        self,
        columns: Sequence[Mapping[str, Any]],
        target: Mapping[str, Any],
        *,
        refuses_missing: bool = False,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        plain = [visible(item) for item in columns]
        self.columns: Columns = columns_of(plain, refuses_missing=refuses_missing)
        self.target: Target = target_of(visible(target))
        self.form = form_of(**visible(form or {}))
        self.unknown: dict[str, int] = {}
        self.missing: dict[str, int] = {}

    def __call__(self, path: str, *, key: str = "--input") -> Tensor | Iterator[Tensor]:
        """All rows of the file; of one that memory has no room for, an iterator of some thousands at a time.

        Raises: RunnerError for a file without one of the columns, and for a value that its column can't take.
        """
        files = table_files(path, key=key, form=self.form)
        fits, _ = fits_in_memory(sum(file.num_bytes(self.columns.num_floats) for file in files), "auto")
        if not fits:
            return self._some(files)
        rows = self._all(files)
        if not len(rows):
            raise RunnerError.of(
                f"{key}={path}", f"`{path}` has no rows", "use a file with rows below the column names"
            )
        return rows

    def frame(self, frame: Any) -> Tensor:
        """All rows of a pandas DataFrame, its columns by their names, as they are read from a file with the same values.

        Raises: RunnerError, as for a file.
        """
        return self._all([TableFrame(frame, "predict(DataFrame)", self.form)])

    def _all(self, files: Sequence[Rows]) -> Tensor:
        encoder = Encoder(self.columns, fix=FIX)
        chunks = ((rows, rows[:, :0]) for rows, _, _ in encoder.chunks(files))
        rows, _ = gathered(chunks, num_floats=self.columns.num_floats)
        self._report(encoder)
        return rows

    def _some(self, files: Sequence[TableFile]) -> Iterator[Tensor]:
        from torch import from_numpy

        encoder = Encoder(self.columns, fix=FIX)
        for rows, _, _ in encoder.chunks(files):
            yield from_numpy(rows)
        self._report(encoder)

    def _report(self, encoder: Encoder) -> None:
        self.unknown, self.missing = encoder.unknown, encoder.missing
        report_unknown(encoder)
        for name, count in encoder.missing.items():
            kind = next(column.kind for column in self.columns.columns if column.name == name)
            instead = "no category is set" if kind == "category" else "the training mean is used"
            log.warning(
                "column %r: %s no value; %s", name, "1 row has" if count == 1 else f"{count:,} rows have", instead
            )


def report_unknown(encoder: Encoder) -> None:
    """Warn of the categories that training did not know, once per column."""
    for name, count in encoder.unknown.items():
        rows = "1 row has a category" if count == 1 else f"{count:,} rows have categories"
        log.warning("column %r: %s that training did not know", name, rows)
