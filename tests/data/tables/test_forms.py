"""Tables of other countries and programs: decimal commas, other dates, no header, rows without a target."""

import datetime as dt

import numpy as np
import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.tables import files
from runner.data.tables.cells import suggested
from runner.data.tables.table import table

GERMAN = (
    "Preis;Menge;Datum;y\n3,5;1.000;05.03.2023;a\n1.234,50;2;31.12.2024;b\n-,25;3;01.01.2025;a\n1e3;;13.01.2025;b\n"
)
SETTINGS = {"decimal": ",", "date_format": "%d.%m.%Y"}


@pytest.fixture(autouse=True)
def folder(own_folder, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(own_folder / "cache"))
    (own_folder / "german.csv").write_text(GERMAN)
    return own_folder


def problem(*args, **settings):
    return problems_of(table, *args, **settings)[0]


def rows_of(source):
    if isinstance(source.rows, tuple):
        return source.rows
    return source.rows.__getitems__(range(len(source.rows)))


@pytest.mark.parametrize("in_memory", [True, False])
def test_decimal_commas_and_dates(in_memory):
    source = table("german.csv", **SETTINGS, in_memory=in_memory)
    inputs, targets = rows_of(source)
    assert inputs[:, 0].tolist() == [3.5, 1234.5, -0.25, 1000]
    assert inputs[:3, 1].tolist() == [1000, 2, 3]
    days = [(dt.date(*day) - dt.date(1970, 1, 1)).days for day in ((2023, 3, 5), (2024, 12, 31), (2025, 1, 1))]
    assert inputs[:3, 2].tolist() == days
    assert targets.tolist() == [0, 1, 0, 1]
    given = table("german.csv", test_path="german.csv", **SETTINGS, in_memory=in_memory).given["test"]
    again = given[0] if in_memory else given.__getitems__(range(4))[0]
    assert torch.equal(again.nan_to_num(), inputs.nan_to_num())


@pytest.mark.parametrize(
    ("lines", "columns"),
    [
        (["7,60;6,82;29,62", "1,00;2,5;3,25"], ["c0", "c1"]),
        ([",60;,82;,62", "1,00;2,5;3,25"], ["c0", "c1"]),
        (['"7,60","6,82","29,62"', '"1,00","2,5","3,25"'], ["c0", "c1"]),
        (["7,60\t6,82", "1,00\t2,5"], ["c0"]),
    ],
)
def test_a_decimal_comma_parts_no_columns(folder, lines, columns):
    (folder / "bare.csv").write_text("\n".join([*lines, *lines]) + "\n")
    source = table("bare.csv", decimal=",", header=False)
    assert list(source.columns) == columns and rows_of(source)[0][1, :2].tolist() == [1.0, 2.5][: len(columns)]


def test_quoted_values_may_be_separated_by_commas(folder):
    (folder / "quoted.csv").write_text('a,b,y\n"7,60","6,82",1\n"1,00","2,5",2\n')
    assert list(table("quoted.csv", decimal=",").columns) == ["a", "b"]


def test_reader_and_evaluation_keep_the_form():
    source = table("german.csv", **SETTINGS)
    read = build(source.reader, key="reader")("german.csv")
    assert torch.equal(read.nan_to_num(), source.rows[0].nan_to_num())
    measured = table("german.csv", **SETTINGS, like=source.reader)
    assert torch.equal(measured.rows[0].nan_to_num(), source.rows[0].nan_to_num())
    usual = table("german.csv", columns=["Menge"], drop=["Preis", "Datum"], decimal=",")
    assert usual.reader["form"] == {"decimal": ","}


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_file_without_a_header(folder, in_memory, messages):
    (folder / "iris.data.csv").write_text("5.1,3.5,setosa\n4.9,3.0,other\n6.1,3.5,setosa\n")
    source = table("iris.data.csv", header=False, in_memory=in_memory)
    assert rows_of(source)[0].flatten().tolist() == pytest.approx([5.1, 3.5, 4.9, 3.0, 6.1, 3.5])
    assert [column["name"] for column in source.reader["columns"]] == ["c0", "c1"]
    assert source.reader["target"]["names"] == ["c2"]
    (folder / "new.csv").write_text("7.0,1.5\n")
    assert build(source.reader, key="reader")("new.csv").tolist() == [[7.0, 1.5]]
    (folder / "bad.csv").write_text("1,0\n2,1\nx,0\n4,1\n")
    messages(problem("bad.csv", header=False))
    told = table("iris.data.csv").notes
    assert any("the first line is taken as names: 5.1, 3.5, setosa; data.header=false" in note for note in told)


@pytest.mark.parametrize("in_memory", [True, False])
def test_rows_without_a_target_are_left_out(folder, in_memory, monkeypatch, messages):
    lines = [f"{index},{'' if index % 3 else index % 2}" for index in range(60)]
    (folder / "bad.csv").write_text("x,y\n" + "\n".join([*lines, "inf,1"]) + "\n")
    messages(problem("bad.csv", drop_missing_targets=True, in_memory=in_memory))
    monkeypatch.setattr(files, "MIN_BLOCK", 64)  # several batches
    monkeypatch.setattr(files, "COLUMN_BYTES", 1)
    (folder / "t.csv").write_text("x,y\n" + "\n".join(lines) + "\n")
    messages(problem("t.csv"))
    source = table("t.csv", drop_missing_targets=True, in_memory=in_memory)
    assert rows_of(source)[0][:, 0].tolist() == list(range(0, 60, 3))
    assert "left out, since they have no y: 40 rows" in source.notes
    (folder / "none.csv").write_text("x,y\n1,\n2,\n")
    messages(problem("none.csv", drop_missing_targets=True))


def test_file_of_another_form_is_refused(folder, messages):
    assert messages(problem("german.csv")).suggestions == ("\"data.decimal=','\"",)
    assert messages(problem("german.csv", decimal=",")).suggestions == ("data.date_format='%d.%m.%Y'",)
    (folder / "t.csv").write_text("day,y\n31/12/2024,0\n30/12/2024,1\n")
    (folder / "short.csv").write_text("day,y\n12/31/99,0\n01/01/01,1\n")
    (folder / "numbers.csv").write_text("x,y\n1,0\n2,1\n")
    writes = {"t.csv": "'%d/%m/%Y'", "short.csv": "'%m/%d/%y'", "numbers.csv": "null"}
    for name, write in ((name, f"data.date_format={write}") for name, write in writes.items()):
        assert messages(problem(name, date_format="%m/%d/%Y")).suggestions == (write,)


def test_hint_names_columns_like_dates(folder):
    days = [f"{index % 12 + 1:02}/{index % 28 + 1:02}/20{index % 20:02}" for index in range(300)]
    cells = [f'{day},{index % 24:02}:{index % 60:02},"$1,{index:03}.50",{index % 2}' for index, day in enumerate(days)]
    (folder / "us.csv").write_text("day,time,price,y\n" + "\n".join(cells) + "\n")
    source = table("us.csv")
    told = [note for note in source.notes if note.startswith("column")]
    assert told[0] == "column day (01/01/2000) is left out; data.date_format='%m/%d/%Y'"
    assert told[1].endswith("data.date_format='%H:%M'")
    assert [column["name"] for column in source.reader["columns"] if column["kind"] == "number"] == ["price"]
    source = table("us.csv", date_format=["%m/%d/%Y", "%H:%M"])
    assert [column["kind"] for column in source.reader["columns"]] == ["date", "date", "number"]
    assert source.rows[0][7, -1].item() == 1007.5
    assert source.notes == ("target y (the last column): 2 classes, up to 100 whole numbers are",)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["3,5", "2"], "\"data.decimal=','\""),
        (["1,234", "12,500"], ""),  # thousands, or three decimals
        (["3,5", "2.5"], ""),
        (["1,5", "2", "3", "4"], ""),  # one of many: the message names that line
        (["05/13/2023"], "data.date_format='%m/%d/%Y'"),
        (["13/05/2023"], "data.date_format='%d/%m/%Y'"),
        (["03/05/2023"], "data.date_format='%m/%d/%Y' or data.date_format='%d/%m/%Y'"),
        (["31.12.99", "01.01.01"], "data.date_format='%d.%m.%y'"),  # '99 is before '01
        (["1-2-3"], ""),
        (["31.12.2024 13:45"], "data.date_format='%d.%m.%Y %H:%M'"),
        (["Oslo", "05/13/2023"], ""),
        ([], ""),
    ],
)
def test_what_is_suggested(texts, told):
    assert " or ".join(suggested(texts)) == told


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_missing_values_are_marked_by_setting(folder, ending):
    import pandas as pd

    frame = pd.DataFrame(
        {"x": [1.0, -999, 3, 4], "z": ["1", "-", "3", "4"], "c": ["a", "b", "-", "a"], "y": [0, 1, 0, 1]}
    )
    frame.to_csv("t.csv", index=False) if ending == "csv" else frame.to_parquet("t.parquet")
    source = table(f"t.{ending}", missing_values=["-", -999])
    inputs = source.rows[0]
    assert inputs.isnan().tolist() == [[False] * 3, [True, True, False], [False, False, True], [False] * 3]
    assert "missing values: x 25%, z 25%, c 25%; numbers become the training mean" in source.notes
    reader = build(source.reader, key="reader")
    assert torch.equal(reader(f"t.{ending}").nan_to_num(-9), inputs.nan_to_num(-9))
    assert reader.missing == {"x": 1, "z": 1, "c": 1}


def test_prices_are_numbers(folder):
    (folder / "t.csv").write_text("id,price,y\n" + "".join(f'{row},"€{row},234.50",{row % 2}\n' for row in range(1, 9)))
    source = table("t.csv")
    assert source.rows[0][0].tolist() == [1, 1234.5]


@pytest.mark.parametrize(
    "settings", [{"missing_values": [True]}, {"decimal": ";"}, {"header": "no"}, {"date_format": "DD.MM.YYYY"}], ids=str
)
def test_invalid_settings_are_refused(settings, messages):
    messages(problem("german.csv", **settings))


def test_a_parquet_file_has_names(folder, messages):
    import pandas as pd

    pd.DataFrame({"x": [1.0, 2.0], "y": [0, 1]}).to_parquet("t.parquet")
    messages(problem("t.parquet", header=False))


@pytest.mark.parametrize("value", ["-1e+308", "1e39", f"{10**40}"])
def test_number_beyond_float32_is_refused(value, folder, messages):
    (folder / "t.csv").write_text(f"x,y\n1,0\n{value},1\n3,0\n4,1\n")
    messages(problem("t.csv"))
    assert np.isfinite(np.float32(3.4e38))
