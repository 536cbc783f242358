"""Real files on disk, read like a user's files."""

import csv
import datetime as dt
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.tables import table as table_module
from runner.data.tables.table import table

MIXED = """\
age,city,member,joined,income,label
31,Oslo,True,2026-01-05,100.5,yes
45,Rome,False,2026-02-10,,no
28,,True,2026-03-01,75,no
31,Oslo,false,,80,yes
"""


@pytest.fixture(autouse=True)
def folder(own_folder, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(own_folder / "cache"))
    return own_folder


@pytest.fixture
def mixed(folder):
    (folder / "mixed.csv").write_text(MIXED)
    return "mixed.csv"


def features(source, rows=None):
    """Return the model's input for the source's rows."""
    rows = source.rows if rows is None else rows
    return build(source.around(source.rows).before, key="before")(rows[0])


def write(name, text, encoding="utf-8"):
    Path(name).write_text(text, encoding=encoding, newline="")
    return name


def problem(*args, **settings):
    return problems_of(table, *args, **settings)[0]


@pytest.mark.parametrize("in_memory", [True, False])
def test_place_counts_rows_that_were_dropped(folder, in_memory):
    write("a.csv", "day,x,y\n2026-01-05,1,1\n\n2026-01-06,2,\n2026-01-07,3,3\n")
    write("b.csv", "day,x,y\n2026-01-08,4,4\n")
    source = table(["a.csv", "b.csv"], drop_missing_targets=True, in_memory=in_memory)
    assert [source.place(row) for row in range(4)] == ["a.csv, line 2", "a.csv, line 5", "b.csv, line 2", ""]
    assert source.columns == ("day", "day", "day", "x")


def test_columns_of_every_kind_are_encoded(mixed):
    source = table(mixed)
    days = (dt.date(2026, 1, 5) - dt.date(1970, 1, 1)).days
    assert source.rows[0][0].tolist() == [31, 0, 1, days, 0, 0, 100.5]
    second, third, fourth = source.rows[0][1:]
    assert math.isnan(second[-1])
    assert math.isnan(third[1])
    assert torch.isnan(fourth[3:6]).all()
    assert source.rows[1].tolist() == [1, 0, 0, 1]
    assert source.classes == ("no", "yes")
    # age, member, days, income; two cities, months, weekdays; whether city, joined and income are missing
    assert source.facts["in_features"] == 4 + 2 + 12 + 7 + 3
    assert features(source).shape == (4, 28)
    assert not torch.isnan(features(source)).any()
    assert "label (the last column): 2 classes" in source.origin


def test_facts_agree_with_layers_of_any_split(mixed):
    source = table(mixed)
    for chosen in ([0], [1, 2], [3]):
        rows = tuple(part[chosen] for part in source.rows)
        before = build(source.around(rows).before, key="before")
        found = before(source.rows[0])
        assert found.shape[1] == source.facts["in_features"]
        assert torch.isfinite(found).all()


def test_layers_are_fitted_on_the_training_split(folder):
    write("t.csv", "x,c,y\n" + "".join(f"{i},{'rare' if i == 3 else 'common'},{i % 2}\n" for i in range(20)))
    source = table("t.csv")
    train = tuple(part[4:] for part in source.rows)
    node = source.around(train).before
    assert node["means"] == [11.5]
    assert node["fills"] == [11.5]
    assert node["spreads"] == [pytest.approx(np.arange(4, 20).std())]
    assert node["seen"] == [1, 0]
    assert build(node, key="before")(source.rows[0])[3, 1:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("values", "kind", "classes"),
    [
        (["3", "5", "3"], "classification", ("3", "5")),
        (["10", "9", "-1"], "classification", ("-1", "9", "10")),
        (["1.0", "2.0", "1.0"], "classification", ("1", "2")),
        (["b", "a", "b"], "classification", ("a", "b")),
        (["True", "False", "true"], "classification", ("false", "true")),
        (["0.5", "2", "3"], "regression", ()),
    ],
)
def test_the_kind_follows_from_the_target(values, kind, classes):
    write("t.csv", "x,y\n" + "".join(f"{i},{value}\n" for i, value in enumerate(values)))
    source = table("t.csv")
    assert source.classes == classes
    assert source.reader["target"]["kind"] == kind
    if classes:
        assert [source.classes[index] for index in source.rows[1]] == [
            value.removesuffix(".0").lower() for value in values
        ]
    else:
        assert source.rows[1].tolist() == [[0.5], [2], [3]]
        assert source.targets == ("y",)


def test_many_whole_numbers_are_a_regression():
    write("t.csv", "x,y\n" + "".join(f"{i % 7},{i}\n" for i in range(150)))
    assert table("t.csv").facts["num_classes"] is None
    assert table("t.csv", kind="classification").facts["num_classes"] == 150


def test_several_targets():
    write("t.csv", "a,b,x,c\n0,1,5,1.5\n1,1,6,2\n1,0,7,3\n")
    labels = table("t.csv", ["b", "a"], drop=["c"])
    assert labels.rows[1].tolist() == [[1, 0], [1, 1], [0, 1]]
    assert (labels.targets, labels.classes, labels.facts["num_classes"]) == (("b", "a"), (), None)
    numbers = table("t.csv", ["a", "c"])
    assert numbers.reader["target"]["kind"] == "regression"
    assert numbers.around(numbers.rows).after["means"] == [pytest.approx(2 / 3), pytest.approx(6.5 / 3)]
    assert labels.around(labels.rows).after is None


def test_settings_of_columns(mixed):
    chosen = table(mixed, "label", columns=["income", "age"])
    assert [column["name"] for column in chosen.reader["columns"]] == ["income", "age"]
    ages = table(mixed, "label", columns=["age"], categorical=["age"])
    assert ages.reader["columns"][0]["categories"] == ["31", "28", "45"]
    assert features(ages).tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    raw = table(mixed, "label", columns=["income"], normalize=False)
    assert features(raw)[:, 0].tolist() == pytest.approx([100.5, (100.5 + 75 + 80) / 3, 75, 80])


def test_rare_categories_are_as_unknown():
    write("t.csv", "c,y\n" + "".join(f"{c},{i % 2}\n" for i, c in enumerate("aaabbbbcd")))
    source = table("t.csv", max_categories=2)
    assert source.reader["columns"][0]["categories"] == ["b", "a"]
    assert source.rows[0][:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, -1, -1]
    assert "2 most frequent categories of c" in source.origin


def test_keys_are_left_out_unless_named():
    write("t.csv", "name,x,y\n" + "".join(f"n{i},{i},{i % 2}\n" for i in range(150)))
    assert table("t.csv").facts["in_features"] == 1
    assert "left out" in table("t.csv").origin
    assert table("t.csv", columns=["name", "x"]).facts["in_features"] == 101


def test_values_as_other_programs_write_them():
    text = '\ufeffindex a;when;on\r\n\r\n 1 ;2026-01-01T00:00:00+02:00;TRUE\r\n?;2026-01-02 06:30:00Z;false\r\n" 2.5";;True\r\n'
    write("t.csv", text)
    source = table("t.csv")
    hours = [22.0, 6.5]
    assert source.rows[0][:2, -1].tolist() == hours
    assert source.rows[0][[0, 2], 0].tolist() == [1, 2.5]
    assert math.isnan(source.rows[0][1, 0])
    assert [column["name"] for column in source.reader["columns"]] == ["index a", "when"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "parquet", "feather", "CSV", "Csv.GZ", "PARQUET", "Pq"])
def test_every_format_gives_the_same(ending, mixed):
    import pandas as pd

    frame = pd.read_csv(mixed, parse_dates=["joined"])
    file = f"again.{ending}"
    kind = ending.lower().replace("pq", "parquet")
    if kind in ("parquet", "feather"):
        getattr(frame, f"to_{kind}")(file)
    else:
        compression = "gzip" if kind == "csv.gz" else None
        frame.to_csv(file, sep="\t" if kind == "tsv" else ",", compression=compression)  # with pandas' unnamed index
    source, again = table(mixed), table(file)
    assert torch.equal(source.rows[0].nan_to_num(-9), again.rows[0].nan_to_num(-9))
    assert torch.equal(source.rows[1], again.rows[1])
    assert again.facts == source.facts
    assert again.around(again.rows) == source.around(source.rows)


def test_a_folder_and_a_glob_of_parts(folder, messages):
    import pandas as pd

    whole = pd.DataFrame({"x": np.arange(10.0), "c": list("ababababab"), "y": np.arange(10) % 2})
    (folder / "parts").mkdir()
    whole[:6].to_parquet("parts/0.parquet")
    whole[6:][["y", "c", "x"]].to_parquet("parts/1.parquet")
    whole.to_csv("whole.csv", index=False)
    expected = table("whole.csv").rows[0]
    for path in ("parts", "parts/*.parquet", ["parts/0.parquet", "parts/1.parquet"]):
        assert torch.equal(table(path, "y").rows[0], expected)
    whole[["x", "y"]].to_parquet("parts/2.parquet")
    messages(problem("parts", "y"))


def test_types_of_parquet_columns(folder, messages):
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as parquet

    columns = {
        "int8": pa.array([1, None, 3], pa.int8()),
        "decimal": pa.array([decimal.Decimal("1.5"), None, decimal.Decimal(2)]),
        "dictionary": pa.array(["u", "v", "u"]).dictionary_encode(),
        "date": pa.array([dt.date(1970, 1, 3), None, dt.date(1970, 2, 1)]),
        "zoned": pa.array([dt.datetime(1970, 1, 1, 12, tzinfo=dt.UTC)] * 3, pa.timestamp("ns", "Europe/Oslo")),
        "large": pa.array(["p", "q", None], pa.large_string()),
        "flag": pa.array([True, None, False]),
        "y": pa.array([7, 8, 8]),
    }
    parquet.write_table(pa.table(columns), "t.parquet")
    source = table("t.parquet")
    assert source.rows[0][0].tolist() == [1, 1.5, 0, 2, 0, 5, 0.5, 0, 3, 12, 0, 1]
    assert source.classes == ("7", "8")
    parquet.write_table(pa.table({**columns, "list": pa.array([[1], [2], [3]])}), "t.parquet")
    messages(problem("t.parquet", "y"))
    assert table("t.parquet", "y", drop=["list"]).facts == source.facts


def test_ready_splits(mixed, messages):
    write("later.csv", "label,income,joined,member,city,age,more\nno,1,2026-01-01,true,Paris,NA,9\n")
    source = table(mixed, test_path="later.csv", val_path=mixed)
    assert set(source.given) == {"test", "val"}
    inputs, targets = source.given["test"]
    assert targets.tolist() == [0]
    assert inputs[0, 1] == -1
    assert math.isnan(inputs[0, 0])
    write("later.csv", MIXED.replace("yes", "perhaps"))
    messages(problem(mixed, test_path="later.csv"))


def test_like_an_earlier_run(mixed):
    source = table(mixed)
    write("one.csv", "label,age,city,member,joined,income\nyes,1,Rome,false,2026-01-01,5\n")
    again = table("one.csv", like=source.reader)
    assert again.classes == source.classes
    assert again.rows[1].tolist() == [1]
    assert again.rows[0][0, :3].tolist() == [1, 1, 0]
    assert again.facts == source.facts
    assert torch.equal(table("one.csv", like=build(source.reader, key="like")).rows[0], again.rows[0])


def test_reader_takes_columns_in_any_order(mixed, caplog):
    source = table(mixed)
    reader = build(source.reader, key="reader")
    assert torch.equal(reader(mixed).nan_to_num(-9), source.rows[0].nan_to_num(-9))
    lines = [line.split(",") for line in MIXED.splitlines()]
    write("other.csv", "".join(",".join(reversed(line[:-1])) + "\n" for line in lines).replace("Rome", "Paris"))
    rows = reader("other.csv")
    assert torch.equal(rows[2:].nan_to_num(-9), source.rows[0][2:].nan_to_num(-9))
    assert rows[1, 1] == -1
    assert reader.unknown == {"city": 1}
    assert "'city': 1 row has a category that training did not know" in caplog.text


def test_the_reader_says_what_is_missing(mixed, messages):
    reader = build(table(mixed).reader, key="reader")
    write("less.csv", "age,City,member,income\n1,a,true,2\n")
    messages(problems_of(reader, "less.csv"))
    write("bad.csv", MIXED.replace("28,", "old,"))
    messages(problems_of(reader, "bad.csv"))
    write("none.csv", MIXED.splitlines()[0] + "\n")
    messages(problems_of(reader, "none.csv"))


def test_odd_names_survive_the_model_card():
    names = ["a,b", 'quo"te', "${x}", "ü \n new", "{y}", "=1", "target"]
    rows = [["${x}", 1, 2, 3, 4, 5, 0], ["{z}", 5, 4, 3, 2, 1, 1]]
    with Path("odd.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names, *rows])
    source = table("odd.csv")
    reader = build(json.loads(json.dumps(source.reader)), key="reader")
    assert reader.columns.names == names[:-1]
    assert reader.columns.columns[0].categories == ("${x}", "{z}")
    assert torch.equal(reader("odd.csv"), source.rows[0])


def test_thousands_of_columns():
    count = 1000
    rows = [",".join(f"{(i * j) % 11}" for j in range(count)) for i in range(5)]
    write("wide.csv", ",".join(f"c{j}" for j in range(count - 1)) + ",y\n" + "\n".join(rows) + "\n")
    source = table("wide.csv")
    assert source.rows[0].shape == (5, count - 1)
    assert source.rows[0][2, 7].item() == 14 % 11
    assert features(source).shape == (5, count - 1)


def test_numbers_first_and_texts_later_are_texts(folder, monkeypatch):
    from runner.data.tables import files

    monkeypatch.setattr(files, "MIN_BLOCK", 64)  # several batches
    monkeypatch.setattr(files, "COLUMN_BYTES", 1)
    rows = ["1,0", "2,1"] * 10 + ["north,0", "south,1"] * 30
    write("t.csv", "c,y\n" + "\n".join(rows) + "\n")
    categories = table("t.csv").reader["columns"][0]["categories"]
    assert categories == ["north", "south", "1", "2"]


@pytest.mark.parametrize(("ending", "in_memory"), [("csv", False), ("parquet", True)])
def test_numbers_with_many_digits_stay_distinct(in_memory, ending, folder):
    stamps = [1_700_000_000 + number for number in range(100)]
    places = [52.12345 + number * 1e-7 for number in range(100)]
    # their differences are as large as they are: they do not change
    cents = [number * 10_000_019 for number in range(100)]
    columns = {"stamp": stamps, "place": places, "cents": cents, "label": ["a", "b"] * 50}
    if ending == "csv":
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        write("t.csv", "\n".join([",".join(columns), *lines]) + "\n")
    else:
        pa.parquet.write_table(pa.table(columns), "t.parquet")
    source = table(f"t.{ending}", "label", in_memory=in_memory)
    rows = source.rows if in_memory else source.rows.mapped_tensors()
    exact = np.array([stamps, places, cents]).T
    scaled = torch.tensor((exact - exact.mean(0)) / exact.std(0)).float()
    torch.testing.assert_close(features(source, rows), scaled, rtol=1e-5, atol=1e-5)
    assert [note.split(":")[0] for note in source.notes[1:]] == [
        "column stamp is taken less 1,700,000,050",
        "column place is taken less 52.12345495",
    ]
    assert rows[0][:, 2].tolist() == np.float32(cents).tolist()
    read = build(json.loads(json.dumps(source.reader)), key="reader")
    assert torch.equal(read(f"t.{ending}"), rows[0])
    assert torch.equal(table(f"t.{ending}", "label", like=source.reader).rows[0], rows[0])


def test_table_in_float64_keeps_all_digits(folder):
    (folder / "t.csv").write_text("".join(["a,y\n", *(f"{4e9 + n / 8},{7e9 + n / 4}\n" for n in range(200))]))
    source = table("t.csv", dtype="float64")
    assert source.rows[0][:, 0].tolist() == [4e9 + n / 8 for n in range(200)]
    assert source.rows[1][:, 0].tolist() == [7e9 + n / 4 for n in range(200)]
    assert "float32" not in str(source.notes)
    assert build(source.reader, key="reader")("t.csv")[5, 0].item() == 4e9 + 5 / 8


def test_note_names_target_with_many_digits():
    write("t.csv", "x,y\n" + "".join(f"{-number},{1_700_000_000 + number}\n" for number in range(200)))
    (told,) = table("t.csv").notes[1:]
    assert "target y has steps of 128 in float32" in told and "a column of y less 1,700,000,100" in told
    assert len(table("t.csv", "x").notes) == 2  # an input column has its mean subtracted


def test_moments_of_chunks_equal_those_of_rows(monkeypatch):
    monkeypatch.setattr(table_module, "CHUNK_FLOATS", 8)
    draw = np.random.default_rng(0)
    rows = np.sort(draw.normal(1e3, 10, (101, 3)), 0).astype(np.float32)
    rows[draw.random(rows.shape) < 0.2] = np.nan
    rows[:20, 1] = np.nan  # whole chunks without a value
    wages = np.sort(draw.normal(0, 7, (101, 1)), 0).astype(np.float32)
    tensors = torch.from_numpy(rows), torch.from_numpy(wages)
    for some in (tensors, Batched(*tensors)):
        around = table_module.fit(some, sizes=[0, 0, 0], flagged=[1], scale_targets=True)
        exact = rows.astype(np.float64)
        np.testing.assert_allclose(around.before["means"], np.nanmean(exact, 0), rtol=1e-12)
        np.testing.assert_allclose(around.before["spreads"], np.nanstd(exact, 0), rtol=1e-9)
        np.testing.assert_allclose(around.after["means"], wages.astype(np.float64).mean(0), rtol=1e-9)
        np.testing.assert_allclose(around.after["spreads"], wages.astype(np.float64).std(0), rtol=1e-9)


class Batched(torch.utils.data.Dataset):
    """Rows that come in batches, like those of a mapped file."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitems__(self, indices):
        return tuple(column[list(indices)] for column in self.columns)


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([5.0] * 30, 1.0),
        ([0.0] * 30, 1.0),
        ([1e9, *[1e9 + 64] * 29], 1.0),  # one step of float32: a rounding error, not a spread
        ([0.0] * 29 + [1e-12], None),  # small numbers that differ count as different
        ([1e-12, 2e-12] * 15, None),
        ([100.0, 100.001] * 15, None),
    ],
)
def test_columns_that_are_constant_or_nearly(values, spread):
    rows = torch.tensor(values)[:, None], torch.zeros(30, dtype=torch.int64)
    before = table_module.fit(rows, sizes=[0]).before
    assert before["spreads"] == [pytest.approx(spread or rows[0].double().std(correction=0).item())]
    assert torch.isfinite(build(before, key="before")(rows[0])).all()
