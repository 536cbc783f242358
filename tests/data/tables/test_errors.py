"""What a person's table has wrong, and that the message names the file, the line and the column."""

import gzip
import subprocess

import numpy as np
import pandas
import pytest
from refused import problems_of

from runner.config.instantiate import build
from runner.data.tables import csv
from runner.data.tables.table import table
from runner.errors import RunnerError

GOOD = "age,city,y\n1,a,0\n2,b,1\n3,a,1\n4,b,0\n"


@pytest.fixture(autouse=True)
def folder(own_folder):
    (own_folder / "good.csv").write_text(GOOD)
    return own_folder


def problems(*args, **settings):
    return problems_of(table, *args, **settings)


@pytest.mark.parametrize(
    ("content", "so", "write"),
    [
        (GOOD.replace("3,a", "old,a"), "t.csv, line 4, column 'age', is 'old'", "data.categorical=[age]"),
        (
            GOOD.replace("3,a", "-,a"),
            "line 4, column 'age', is '-'",
            "\"data.missing_values=['-']\", data.categorical=[age]",
        ),
        (GOOD.replace("3,a", '"3,5",a'), "line 4, column 'age', is '3,5'", "data.categorical=[age]"),
        (GOOD.replace("3,a", "inf,a"), "line 4, column 'age', is 'inf'", "data.drop=[age]"),
        (GOOD.replace("1,a", '1,"a\nb\n"').replace("3,a", "old,a"), "line 6, column 'age'", "data.drop"),
        (GOOD.replace("\n3,a", "\n\n\nold,a"), "line 6, column 'age'", "data.drop"),
        (
            "d,y\n2026-01-01,0\n2026-02-30,1\n2026-01-03,0\n2026-01-04,1\n",
            "line 3, column 'd', is '2026-02-30'",
            "data.drop=[d]",
        ),
        (GOOD.replace("3,a,1", "3,a"), "t.csv, line 4, has 2 values, and the header names 3 columns", "mended"),
        (GOOD.replace("3,a,1", "3,a,1,1"), "line 4, has 4 values", "quotes"),
        (GOOD.replace("3,a,1", "3,a,"), "line 4, column 'y', is missing, and it is the target", "left out"),
        (GOOD.replace("1\n", "\n"), "line 3, column 'y', is missing, and it is the target; so are 1 more", "left out"),
        (GOOD.replace(",0\n", ",1\n"), "column 'y' is '1' in all 4 rows", "data.target"),
        ("age,y\n,0\nNA,1\n", "column 'age' of t.csv has no value in any of its 2 rows", "data.drop=[age]"),
        ("age,age,y\n1,2,0\n", "t.csv has 2 columns called 'age'", "names of their own"),
        ("", "t.csv is empty", "column names"),
        ("age,y\n", "no rows", "rows below"),
        ("age,y\n1,1\n", "in all 1 rows", "data.target"),
        ("y\n1\n2\n", "no input column is left next to y: the table has no other column", "data.target=..."),
    ],
)
def test_what_is_wrong_in_a_file(content, so, write, folder):
    (folder / "t.csv").write_text(content)
    (problem, *_) = problems("t.csv")
    assert so in problem.message
    assert write in problem.help


@pytest.mark.parametrize(
    ("settings", "asked", "so", "write"),
    [
        ({"target": "yy"}, "data.target=yy", "no column 'yy'; it has age, city, y", "data.target=y"),
        ({"drop": ["cities"]}, "data.drop=cities", "no column", "data.drop=[city]"),
        ({"columns": ["Age"]}, "data.columns=Age", "no column", "data.columns=[age]"),
        ({"categorical": ["ages"]}, "data.categorical=ages", "no column", "data.categorical=[age]"),
        ({"target": "y", "drop": ["y"]}, "data.drop=[y]", "the target", "data.target"),
        ({"target": "y", "columns": ["y"]}, "data.columns=[y,...]", "the target", "the other columns"),
        (
            {"columns": ["age"], "categorical": ["city"]},
            "data.categorical=[city]",
            "data.columns leaves",
            "data.columns with city among them",
        ),
        (
            {"drop": ["city"], "categorical": ["city"]},
            "data.categorical=[city]",
            "data.drop leaves",
            "data.drop without",
        ),
        ({"kind": "classes"}, "data.kind=classes", "auto, classification", "data.kind=regression"),
        ({"missing": "zero"}, "data.missing=zero", "mean", "data.missing=refuse"),
        ({"max_categories": 0}, "data.max_categories=0", "1 or more", "data.max_categories=100"),
        ({"in_memory": "maybe"}, "data.in_memory=maybe", "memory", "data.in_memory=auto"),
        (
            {"target": "city", "kind": "regression"},
            "data.path=good.csv",
            "line 2, column 'city', is 'a'",
            "data.kind=classification",
        ),
        (
            {"target": ["y", "city"], "kind": "classification"},
            "data.kind=classification data.target=[y,city]",
            "several",
            "multilabel",
        ),
        (
            {"target": ["y", "age"], "kind": "multilabel"},
            "data.path=good.csv",
            "line 3, column 'age', is '2'",
            "data.target=... without age",
        ),
    ],
)
def test_what_is_wrong_in_the_settings(settings, asked, so, write):
    (problem, *_) = problems("good.csv", **settings)
    assert problem.source == asked
    assert so in problem.message
    assert write in problem.help


def test_bad_values_of_all_columns_are_listed(folder):
    values = [
        f"{row},{'-' if row % 2 and row < 30 else row},{'?!' if row == 8 else row},{row % 2}" for row in range(60)
    ]
    (folder / "t.csv").write_text("\n".join(["a,b,c,y", *values]) + "\n")
    first, second = problems("t.csv")
    assert first.message.startswith("t.csv, line 3, column 'b', is '-' (also line 5: '-', line 7: '-'")
    assert "line 21: '-', 5 more)" in first.message and first.help.startswith("\"data.missing_values=['-']\"")
    assert "line 10, column 'c', is '?!'" in second.message


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        (lambda row: f"{row % 12 + 1}/{row % 28 + 1}/{2000 + row}", "data.date_format='%m/%d/%Y'"),
        (lambda row: f"a review, number {row}", "data=huggingface data.path=csv data.data_files=t.csv data.inputs=x data.target=y model=transformer"),
        (lambda row: f"key{row}", "data.categorical=[x]"),
    ],
)  # fmt: skip
def test_table_without_usable_column_says_why(folder, value, fix):
    (folder / "t.csv").write_text("x,y\n" + "".join(f'"{value(row)}",{row % 2}\n' for row in range(200)))
    (problem,) = problems("t.csv")
    assert problem.message == "no input column is left next to y: x is left out, because nearly all the texts differ"
    assert problem.help == fix


@pytest.mark.parametrize("kind", ["auto", "regression"])
@pytest.mark.parametrize("target", ["when", ["when", "y"]])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_are_no_target(kind, target, ending, folder):
    days = pandas.date_range("2026-01-01", periods=9)
    frame = pandas.DataFrame({"y": np.arange(9) / 2, "x": range(9), "when": days})
    frame.to_csv("t.csv", index=False) if ending == "csv" else frame.to_parquet("t.parquet")
    (problem,) = problems(f"t.{ending}", target, kind=kind)
    assert problem.source == ("data.target=when" if target == "when" else "data.target=[when,y]")
    assert "column 'when' holds dates" in problem.message and "another column" in problem.help
    assert ("data.kind=classification" in problem.help) == (target == "when")
    assert table(f"t.{ending}", "when", kind="classification").facts["num_classes"] == 9


@pytest.mark.parametrize(
    ("target", "mend", "gone"),
    [
        ("y", "data.kind=classification", "categorical"),
        (["y", "z"], "data.target=... without y", "classification"),
    ],
)
def test_a_text_among_the_numbers_of_a_target(folder, target, mend, gone):
    (folder / "t.csv").write_text("x,z,y\n" + "".join(f"{row},{row}.5,{row}.5\n" for row in range(9)) + "9,1,oops\n")
    (problem,) = problems("t.csv", target)
    assert "line 11, column 'y', is 'oops'" in problem.message
    assert problem.help.endswith(mend) and gone not in problem.help
    if target == "y":
        assert table("t.csv", target, kind="classification").facts["num_classes"] == 10


def test_all_unknown_names_at_once():
    assert len(problems("good.csv", "yy", drop=["a1"], columns=["b1"])) == 3


@pytest.mark.parametrize(
    ("path", "so", "write"),
    [
        ("god.csv", "no such file", "data.path=good.csv"),
        ("none/t.csv", "no folder none", "data.path=FILE"),
        ("*.tsv", "no file is called like that", "data.path='FOLDER/*.parquet'"),
        ("empty", "no tables in that folder", "FILE.csv"),
        ("t.xlsx", "files like t.xlsx are not read here", "CSV or Parquet"),
        ("t.parquet", "t.parquet is no whole Parquet file", "written as Parquet"),
        ("t.feather", "t.feather is no whole Feather file", "written as Feather"),
        ("t.csv.gz", "t.csv.gz is no whole gzip file", "packed again"),
    ],
)
def test_what_is_no_table(path, so, write, folder):
    (folder / "empty").mkdir()
    for name in ("t.xlsx", "t.parquet", "t.feather", "t.csv.gz"):
        (folder / name).write_text(GOOD)
    (problem,) = problems(path)
    assert problem.source == f"data.path={path}"
    assert so in problem.message
    assert write in problem.help


@pytest.mark.parametrize(("encoding", "line", "kind"), [("latin-1", 3, "another encoding"), ("utf-16", 1, "UTF-16")])
def test_another_encoding(encoding, line, kind, folder):
    (folder / "t.csv").write_bytes("age,city,y\n1,a,0\n2,Å,1\n".encode(encoding))
    (problem,) = problems("t.csv")
    assert f"t.csv, line {line}" in problem.message
    assert kind in problem.message
    assert "iconv" in problem.help


@pytest.mark.parametrize("name", ["old mac.csv", "t.csv.gz"])
def test_lines_that_end_with_a_carriage_return_alone(name, folder):
    content = GOOD.replace("\n", "\r").encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (problem,) = problems(name)
    assert f"{name} ends lines with a carriage return alone" in problem.message
    subprocess.run(["bash", "-c", problem.help], check=True, cwd=folder)
    assert (folder / "unix.csv").read_text() == GOOD


def test_one_value_with_such_an_end_far_down(folder):
    (folder / "t.csv").write_text(GOOD + "5,a\rb,1\n", newline="")
    (problem,) = problems("t.csv")
    assert "tr '\\r' '\\n' < t.csv > unix.csv" in problem.help


def test_a_number_is_neither_true_nor_false(folder):
    pandas.DataFrame({"flag": [True, False, None, True], "y": [0, 1, 0, 1]}).to_parquet("t.parquet")
    reader = build(table("t.parquet").reader, key="reader")
    pandas.DataFrame({"flag": [1.0, 0.0, None]}).to_parquet("numbers.parquet")
    assert reader("numbers.parquet").nan_to_num(-1).tolist() == [[1], [0], [-1]]
    pandas.DataFrame({"flag": [1, 0, 5]}).to_parquet("numbers.parquet")
    with pytest.raises(RunnerError, match=r"row 3, column 'flag', is 5, and that column holds true and false"):
        reader("numbers.parquet")


def test_missing_values_can_be_refused(folder):
    (folder / "t.csv").write_text(GOOD.replace("3,a", ",a"))
    (problem,) = problems("t.csv", missing="refuse")
    assert (problem.source, problem.message) == ("data.missing=refuse", "t.csv, line 4, column 'age', is missing")
    (problem,) = problems("good.csv", missing="refuse", test_path="t.csv")
    assert problem.message == "t.csv, line 4, column 'age', is missing"
    assert table("t.csv").facts["in_features"] == 4


def test_a_row_of_a_parquet_file(folder):
    import pandas as pd

    pd.DataFrame({"x": [1.0, 2.0, float("inf")], "y": [0, 1, 0]}).to_parquet("t.parquet")
    (problem,) = problems("t.parquet")
    assert problem.message.startswith("t.parquet, row 3, column 'x', is inf")


@pytest.mark.parametrize(
    ("ending", "where"), [("csv", "line 70002"), ("parquet", "row 70001"), ("feather", "row 70001")]
)
def test_the_place_of_a_bad_value_far_down(ending, where, folder, monkeypatch):
    """Beyond the rows that are read at once."""
    import pandas as pd

    monkeypatch.setattr(csv, "LEAST_BLOCK", 2**16)

    frame = pd.DataFrame({"x": np.arange(80_000.0), "y": np.arange(80_000) % 2})
    frame.loc[70_000, "x"] = np.inf
    if ending == "feather":
        frame.to_feather("t.feather", chunksize=30_000)
    else:
        getattr(frame, f"to_{ending}")(f"t.{ending}", index=False)
    (problem,) = problems(f"t.{ending}")
    assert problem.message.startswith(f"t.{ending}, {where}, column 'x', is ")
