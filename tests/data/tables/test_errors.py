"""Errors in a user's table; the message names the file, the line and the column."""

import numpy as np
import pandas
import pytest
from refused import problems_of

from runner.config.instantiate import build
from runner.data.tables import files
from runner.data.tables.table import table

GOOD = "age,city,y\n1,a,0\n2,b,1\n3,a,1\n4,b,0\n"


@pytest.fixture(autouse=True)
def folder(own_folder):
    (own_folder / "good.csv").write_text(GOOD)
    return own_folder


def problems(*args, **settings):
    return problems_of(table, *args, **settings)


@pytest.mark.parametrize(
    "content",
    [
        GOOD.replace("3,a", "old,a"),
        GOOD.replace("3,a", "-,a"),
        GOOD.replace("3,a", '"3,5",a'),
        GOOD.replace("3,a", "inf,a"),
        GOOD.replace("1,a", '1,"a\nb\n"').replace("3,a", "old,a"),
        GOOD.replace("\n3,a", "\n\n\nold,a"),
        "d,y\n2026-01-01,0\n2026-02-30,1\n2026-01-03,0\n2026-01-04,1\n",
        GOOD.replace("3,a,1", "3,a"),
        GOOD.replace("3,a,1", "3,a,1,1"),
        GOOD.replace("3,a,1", "3,a,"),
        GOOD.replace("1\n", "\n"),
        GOOD.replace(",0\n", ",1\n"),
        "age,y\n,0\nNA,1\n",
        "age,age,y\n1,2,0\n",
        "",
        "age,y\n",
        "age,y\n1,1\n",
        "y\n1\n2\n",
    ],
)
def test_invalid_file_is_refused(content, folder, messages):
    (folder / "t.csv").write_text(content)
    messages(problems("t.csv"))


@pytest.mark.parametrize(
    "settings",
    [
        {"target": "yy"},
        {"drop": ["cities"]},
        {"columns": ["Age"]},
        {"categorical": ["ages"]},
        {"target": "y", "drop": ["y"]},
        {"target": "y", "columns": ["y"]},
        {"columns": ["age"], "categorical": ["city"]},
        {"drop": ["city"], "categorical": ["city"]},
        {"kind": "classes"},
        {"missing": "zero"},
        {"max_categories": 0},
        {"in_memory": "maybe"},
        {"target": "city", "kind": "regression"},
        {"target": ["y", "city"], "kind": "classification"},
        {"target": ["y", "age"], "kind": "multilabel"},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings, messages):
    messages(problems("good.csv", **settings))


def test_bad_values_of_all_columns_are_listed(folder, messages):
    values = [
        f"{row},{'-' if row % 2 and row < 30 else row},{'?!' if row == 8 else row},{row % 2}" for row in range(60)
    ]
    (folder / "t.csv").write_text("\n".join(["a,b,c,y", *values]) + "\n")
    messages(problems("t.csv"))


@pytest.mark.parametrize(
    "value",
    [
        lambda row: f"{row % 12 + 1}/{row % 28 + 1}/{2000 + row}",
        lambda row: f"a review, number {row}",
        lambda row: f"key{row}",
    ],
)  # fmt: skip
def test_table_without_usable_column_says_why(folder, value, messages):
    (folder / "t.csv").write_text("x,y\n" + "".join(f'"{value(row)}",{row % 2}\n' for row in range(200)))
    messages(problems("t.csv"))


@pytest.mark.parametrize("kind", ["auto", "regression"])
@pytest.mark.parametrize("target", ["when", ["when", "y"]])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_as_target_are_refused(kind, target, ending, folder, messages):
    days = pandas.date_range("2026-01-01", periods=9)
    frame = pandas.DataFrame({"y": np.arange(9) / 2, "x": range(9), "when": days})
    frame.to_csv("t.csv", index=False) if ending == "csv" else frame.to_parquet("t.parquet")
    messages(problems(f"t.{ending}", target, kind=kind))
    assert table(f"t.{ending}", "when", kind="classification").facts["num_classes"] == 9


@pytest.mark.parametrize("target", ["y", ["y", "z"]])
def test_text_among_target_numbers_is_refused(folder, target, messages):
    (folder / "t.csv").write_text("x,z,y\n" + "".join(f"{row},{row}.5,{row}.5\n" for row in range(9)) + "9,1,oops\n")
    messages(problems("t.csv", target))
    if target == "y":
        assert table("t.csv", target, kind="classification").facts["num_classes"] == 10


def test_all_unknown_names_are_reported():
    assert len(problems("good.csv", "yy", drop=["a1"], columns=["b1"])) == 3


@pytest.mark.parametrize(
    "path", ["god.csv", "none/t.csv", "*.tsv", "empty", "t.xlsx", "t.parquet", "t.feather", "t.csv.gz"]
)
def test_other_files_are_refused(path, folder, messages):
    (folder / "empty").mkdir()
    for name in ("t.xlsx", "t.parquet", "t.feather", "t.csv.gz"):
        (folder / name).write_text(GOOD)
    messages(problems(path))


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_other_encodings_are_refused(encoding, folder, messages):
    (folder / "t.csv").write_bytes("age,city,y\n1,a,0\n2,Å,1\n".encode(encoding))
    messages(problems("t.csv"))


def test_carriage_returns_as_line_ends_are_refused(folder, messages):
    (folder / "mac.csv").write_text(GOOD, newline="\r")
    messages(problems("mac.csv"))
    (folder / "t.csv").write_text(GOOD + "5,a\rb,1\n", newline="")
    messages(problems("t.csv"))


def test_number_in_boolean_column_is_refused(folder, messages):
    pandas.DataFrame({"flag": [True, False, None, True], "y": [0, 1, 0, 1]}).to_parquet("t.parquet")
    reader = build(table("t.parquet").reader, key="reader")
    pandas.DataFrame({"flag": [1.0, 0.0, None]}).to_parquet("numbers.parquet")
    assert reader("numbers.parquet").nan_to_num(-1).tolist() == [[1], [0], [-1]]
    pandas.DataFrame({"flag": [1, 0, 5]}).to_parquet("numbers.parquet")
    messages(problems_of(reader, "numbers.parquet"))


def test_missing_values_can_be_refused(folder, messages):
    (folder / "t.csv").write_text(GOOD.replace("3,a", ",a"))
    messages(problems("t.csv", missing="refuse"))
    messages(problems("good.csv", missing="refuse", test_path="t.csv"))
    assert table("t.csv").facts["in_features"] == 4


def test_bad_value_in_parquet_has_its_row(folder, messages):
    import pandas as pd

    pd.DataFrame({"x": [1.0, 2.0, float("inf")], "y": [0, 1, 0]}).to_parquet("t.parquet")
    messages(problems("t.parquet"))


@pytest.mark.parametrize(
    ("ending", "where"), [("csv", "line 70002"), ("parquet", "row 70001"), ("feather", "row 70001")]
)
def test_bad_value_far_down_has_its_line(ending, where, folder, monkeypatch):
    """After the rows that are read at once."""
    import pandas as pd

    monkeypatch.setattr(files, "MIN_BLOCK", 2**16)

    frame = pd.DataFrame({"x": np.arange(80_000.0), "y": np.arange(80_000) % 2})
    frame.loc[70_000, "x"] = np.inf
    if ending == "feather":
        frame.to_feather("t.feather", chunksize=30_000)
    else:
        getattr(frame, f"to_{ending}")(f"t.{ending}", index=False)
    (problem,) = problems(f"t.{ending}")
    assert problem.message.startswith(f"t.{ending}, {where}, column 'x', is ")
