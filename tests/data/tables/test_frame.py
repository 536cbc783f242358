"""A DataFrame is read like the file that it came from, and rows become a DataFrame that is read as the same rows."""

import numpy as np
import pandas
import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.tables.encoder import columns_in, frame_of
from runner.data.tables.table import table

ROWS = """age,city,joined,seen,member,code,price,big,stamp,y
31,Rome,2026-11-21,2026-11-21 23:59:59,true,1,"$1,234.50",1000001,1700000001,a
,Oslo,2026-01-02,2026-01-02 00:00:01,,2,"$2",7,1700000002,b
45,,,2025-12-31 07:15:00,false,1,$3.25,,,a
29.5,O${x},2024-02-29,,true,2,"$7,000.00",9,1700000003,b
31,Rome,2026-11-21,2026-11-21 12:00:00,true,3,$1,8,1700000009,a
"""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "t.csv").write_text(ROWS)
    found = table(str(tmp_path / "t.csv"), categorical=["city", "code"], max_categories=2)
    return build(found.reader, key="reader"), columns_in(found.reader), tmp_path / "t.csv"


def same(found, wanted):
    assert found.shape == wanted.shape and torch.equal(found.nan_to_num(-77), wanted.nan_to_num(-77))


CHANGED = {
    "as pandas reads them": lambda frame: frame,
    "in another order, beside others": lambda frame: frame[frame.columns[::-1]].assign(more=1),
    "under another index": lambda frame: frame.set_index(pandas.Index([7, 7, 1, 0, 7])),
    "as objects": lambda frame: frame.astype(object),
    "with pandas' own types": lambda frame: frame.convert_dtypes(),
    "texts and numbers mixed": lambda frame: frame.assign(age=["31", None, 45, 29.5, 31], code=[1, "2", 1, 2, "3"]),
    "as dates and categories": lambda frame: frame.assign(
        joined=pandas.to_datetime(frame.joined),
        seen=pandas.to_datetime(frame.seen).dt.tz_localize("UTC"),
        city=frame.city.astype("category"),
        member=frame.member.astype("boolean"),
        code=frame.code.astype("Int64"),
        price=[1234.5, 2, 3.25, 7000, 1],
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_frame_is_read_as_its_file(how, reader):
    read, _, file = reader
    same(read.frame(CHANGED[how](pandas.read_csv(file))), read(str(file)))


def test_the_form_of_the_runs_file_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "german.csv"
    file.write_text("Preis;Datum;y\n3,5;05.03.2023;a\n1.234,50;31.12.2024;b\n")
    read = build(table(str(file), decimal=",", date_format="%d.%m.%Y").reader, key="reader")
    same(read.frame(pandas.read_csv(file, sep=";")), read(str(file)))


def test_frame_without_column_is_refused(reader, messages):
    read, _, file = reader
    frame = pandas.read_csv(file)
    messages(problems_of(read.frame, frame.rename(columns={"age": "agee"})))
    messages(problems_of(read.frame, frame.assign(age=[1, "old", 2, 3, 4])))


def test_frame_of_rows_is_read_as_them(reader):
    read, columns, file = reader
    rows = read(str(file))
    frame = frame_of(columns, rows.numpy())
    assert frame.age.dtype == np.float64 and frame.member.tolist() == [True, None, False, True, True]
    assert frame.seen[0].startswith("2026-11-21 23:59:5")
    assert (rows[:, columns.names.index("city")] < 0).any()  # one city is unknown
    same(read.frame(frame), rows)
