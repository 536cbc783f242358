"""`python -m runner predict`: the model's numbers, from each kind of file and into each kind."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from trained_runs import model_of

from runner.data.tables import files
from runner.device import backends
from runner.errors import RunnerError
from runner.models.card import read_card
from runner.runs import inputs
from runner.runs.output_files import write_file

RUN = "outputs/digits/run"
LETTERS = ",".join(f"c{number}" for number in range(64))


def rows_of(count=50):
    return np.random.default_rng(1).random((count, 1, 8, 8), np.float32)


def probabilities(rows):
    with torch.no_grad():
        return model_of(RUN)(torch.from_numpy(rows)).softmax(-1).numpy()


def write_rows(name, rows):
    frame = pandas.DataFrame(rows.reshape(len(rows), 64), columns=[f'a "pixel", {number}' for number in range(64)])
    path = Path(name)
    if path.suffix in (".csv", ".tsv"):
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".feather":
        frame.to_feather(path)
    elif path.suffix == ".npz":
        np.savez(path, x=rows, other=rows[:1])
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({"x": rows}, path)
    else:
        np.save(path, rows)


def read_back(path):
    if path.endswith(".npz"):
        with np.load(path) as found:
            return pandas.DataFrame({name: found[name] for name in found.files})
    if path.endswith(".jsonl"):
        return pandas.DataFrame([json.loads(line) for line in Path(path).read_text().splitlines()])
    if path.endswith((".csv", ".tsv")):
        return pandas.read_csv(path, sep="\t" if path.endswith(".tsv") else ",", dtype={"label": str})
    return pandas.read_parquet(path) if path.endswith(".parquet") else pandas.read_feather(path)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("csv", "npz"),
        ("tsv", "tsv"),
        ("parquet", "feather"),
        ("feather", "parquet"),
        ("npz", "jsonl"),
        ("safetensors", "csv"),
    ],
)
def test_predict_reads_and_writes_each_format(kind, written, run):
    rows = rows_of()
    write_rows(f"rows.{kind}", rows)
    code, out, _ = run("predict", RUN, "--input", f"rows.{kind}", "--output", f"out.{written}", "--batch-size", "7")
    assert code == 0 and f"written 50 rows to out.{written}" in out and not list(Path().glob(".out*"))
    found, expected = read_back(f"out.{written}"), probabilities(rows)
    assert list(found.columns) == ["label", "probability", *(f"p_{number}" for number in range(10))]
    np.testing.assert_allclose(found.iloc[:, 2:].to_numpy(), expected, rtol=1e-5)
    assert list(found.label.astype(str)) == [str(number) for number in expected.argmax(1)]
    np.testing.assert_allclose(found.probability, expected.max(1), rtol=1e-5)


def test_the_preprocessing_travels(run, table):
    """The table's numbers are about 1000: without the layer that was fitted in training, all predictions would be wrong."""
    table(Path("new.csv"), 40, start=500)
    code, _, _ = run("predict", "outputs/table/run", "--input", "new.csv", "--output", "out.csv")
    assert code == 0
    found = pandas.read_csv("out.csv")
    assert list(found.columns) == ["label", "probability", "p_low", "p_high"]
    assert (found.label == pandas.read_csv("new.csv").kind).mean() > 0.9


def test_predict_regression_restores_scale(run, table):
    table(Path("new.csv"), 40, start=500)
    assert run("predict", "outputs/sizes/run", "--input", "new.csv", "--output", "out.csv")[0] == 0
    header, *lines = csv.reader(Path("out.csv").read_text().splitlines())
    assert header == ["size"] and len(lines) == 40
    rows = torch.tensor(pandas.read_csv("new.csv").iloc[:, :3].to_numpy(np.float32))
    with torch.no_grad():
        expected = model_of("outputs/sizes/run")(rows)[:, 0]
    np.testing.assert_allclose([float(line[0]) for line in lines], expected, rtol=1e-4)
    assert expected.abs().max() > 3  # scaled back


def test_predict_npz_columns_may_have_any_name(tmp_path):
    """Also like an argument of np.savez."""
    parts = [{"file": np.array(["a"]), "allow_pickle": np.eye(2)[:1]}, {"file": np.array(["bc"]), "allow_pickle": np.eye(2)[1:]}]  # fmt: skip
    assert write_file(tmp_path / "some.npz", parts) == 2
    with np.load(tmp_path / "some.npz") as found:
        assert {name: found[name].tolist() for name in found} == {"file": ["a", "bc"], "allow_pickle": [[1, 0], [0, 1]]}


def test_predict_without_predictions_writes_raw_outputs(run, monkeypatch):
    """From a table without a header, with the switches that are set."""
    switches, set_them = [], backends.set_switches
    monkeypatch.setattr(
        backends, "set_switches", lambda *args, **more: switches.append(more) or set_them(*args, **more)
    )
    np.savetxt("rows.csv", rows_of(4).reshape(4, -1), delimiter=",", fmt="%.9g")
    words = ["--input", "rows.csv", "--output", "out.npz", "device=cpu", "++backends.cpu.num_threads=1"]
    assert run("predict", "outputs/raw/run", *words)[0] == 0
    with torch.no_grad():
        expected = model_of("outputs/raw/run")(torch.from_numpy(rows_of(4)))
    found = read_back("out.npz")
    assert list(found.columns) == [f"output_{number}" for number in range(10)]
    np.testing.assert_allclose(found.to_numpy(), expected, rtol=1e-5)
    assert [each.get("num_threads") for each in switches] == [1]


def test_predict_handles_any_number_of_rows(run, monkeypatch):
    monkeypatch.setattr(files, "MIN_BLOCK", 2**14)
    monkeypatch.setattr(files, "COLUMN_BYTES", 1)
    for count in (1, 16, 17, 50):
        write_rows("rows.csv", rows_of(count))
        assert (len(list(inputs.table_rows(Path("rows.csv"), width=64))) > 1) == (count == 50)
        assert run("predict", RUN, "--input", "rows.csv", "--output", "out.csv", "--batch-size", "5")[0] == 0
        found = pandas.read_csv("out.csv")
        np.testing.assert_allclose(found[[f"p_{n}" for n in range(10)]], probabilities(rows_of(count)), rtol=1e-5)


def nan_row(rows):
    rows[2, 0, 3, 1] = np.nan
    return rows


@pytest.mark.parametrize(
    ("kind", "rows", "output"),
    [
        ("csv", nan_row(rows_of(4)), ["bad.csv, line 4, column 'a \"pixel\", 25', is missing"]),
        ("npy", nan_row(rows_of(4)), ["NaN or infinite values in the rows of bad.npy", "row 2, column 25"]),
        ("csv", rows_of(0), ["has no rows"]),
        ("npy", rows_of(0), ["has no rows"]),
        ("npy", np.zeros((3, 1, 9, 9), np.float32), ["(1, 9, 9)", "takes (1, 8, 8)"]),
    ],
)
def test_predict_error_keeps_older_output(kind, rows, output, run):
    write_rows(f"bad.{kind}", rows) if rows.size == 64 * len(rows) else np.save("bad.npy", rows)
    Path("out.csv").write_text("older")
    code, _, err = run("predict", RUN, "--input", f"bad.{kind}", "--output", "out.csv")
    assert code == 2
    for text in output:
        assert text in err
    assert Path("out.csv").read_text() == "older" and not list(Path().glob(".out*"))


def test_predict_arrays_of_other_width_raise(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).random((60, 4), np.float32)
    np.savez("train.npz", x=rows, y=rows[:, 0] > 0.5)
    words = ["data=arrays", "data.path=train.npz", "model=linear", "device=cpu", "train.num_epochs=1"]
    words += ["train.precision=bf16", "tracking.enabled=false", "task.plots=false", "hydra.run.dir=run"]
    assert run(*words)[0] == 0
    for name, width, output in (
        ("rows.npz", 5, ["the rows have the shape (5,), and the run's model takes (4,)", "without targets"]),
        ("rows.npy", 3, ["(3,)", "takes (4,)", "without targets"]),
        ("rows.npy", 5, ["the last column may be the target", "np.load('rows.npy')[:, :-1]"]),
    ):
        (np.save if name.endswith("npy") else np.savez)(name, np.zeros((3, width), np.float32))
        code, _, err = run("predict", "run", "--input", name, "--output", "never.csv")
        assert code == 2 and all(text in err for text in output), err
    np.save("rows.npy", rows[:3])
    code, out, _ = run("predict", "run", "--input", "rows.npy", "--output", "out.csv")
    assert code == 0  # computed as in the run
    assert any(line.startswith("device") and line.endswith(", bf16") for line in out.splitlines())


def test_predict_accepts_shorter_texts(run, tmp_path):
    tokens = np.random.default_rng(0).integers(9, size=(60, 6))
    np.savez(tmp_path / "train.npz", x=tokens, y=tokens[:, 0] > 4)
    words = ["data=arrays", f"data.path={tmp_path}/train.npz", "data.float_inputs=false", "model=gru"]
    words += ["model.vocab_size=9", "device=cpu", "train.num_epochs=1", "tracking.enabled=false", "task.plots=false"]
    assert run(*words, f"hydra.run.dir={tmp_path}/run")[0] == 0
    for width, code in ((4, 0), (6, 0), (8, 2)):
        np.save(tmp_path / "rows.npy", tokens[:3, :1].repeat(width, 1))
        arguments = ["--input", f"{tmp_path}/rows.npy", "--output", f"{tmp_path}/out.csv"]
        assert run("predict", f"{tmp_path}/run", *arguments)[0] == code


@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("", "`bad.csv` is empty"),
        ("a,b\n1,2\n", "the table has 2 columns (a, b), and the run's model takes 64"),
        (f"{LETTERS}\n{LETTERS},1\n", "`bad.csv`, line 2, has 65 values, and the header names 64 columns"),
        (LETTERS + "\n" + ",".join(["x"] * 64), "bad.csv, line 2, column 'c0', is 'x'"),
    ],
)
def test_broken_tables(content, output, run):
    Path("bad.csv").write_text(content)
    code, _, err = run("predict", RUN, "--input", "bad.csv", "--output", "never.csv")
    assert code == 2 and output in err
    assert not Path("never.csv").exists()


def test_predict_leaves_missing_cells_to_reader(run, table):
    table(Path("new.csv"), 5)
    lines = Path("new.csv").read_text().splitlines()
    lines[2] = "," + lines[2].partition(",")[2]
    Path("new.csv").write_text("\n".join(lines))
    assert run("predict", "outputs/table/run", "--input", "new.csv", "--output", "out.csv")[0] == 0
    assert not pandas.read_csv("out.csv").isna().any().any()
    Path("new.csv").write_text("x,y\n1,2\n")
    code, _, err = run("predict", "outputs/table/run", "--input", "new.csv", "--output", "out.csv")
    assert code == 2 and "it has no column a" in err


def test_answers_of_many_dimensions_stay_arrays(tmp_path):
    from runner.runs.predict import columns

    card = read_card(Path("outputs/raw/run"))
    found = columns({"a": torch.zeros(3, 2, 2), "b": torch.zeros(3)}, lambda model, batch: {}, card)
    assert {name: values.shape for name, values in found.items()} == {"output_a": (3, 2, 2), "output_b": (3,)}
    for kind in ("csv", "parquet"):
        with pytest.raises(RunnerError, match=r"out\.npz"):
            write_file(tmp_path / f"out.{kind}", [found])
        assert not list(tmp_path.iterdir())
    write_file(tmp_path / "out.npz", [found, found])
    with np.load(tmp_path / "out.npz") as kept:
        assert kept["output_a"].shape == (6, 2, 2)


def test_predict_multilabel_has_probability_per_label():
    from dataclasses import replace

    from runner.runs.predict import columns
    from runner.tasks.classification import Classification

    task, card = Classification(), replace(read_card(Path(RUN)), targets=("cat", "dog"))
    task.kind = "multilabel"
    found = columns(torch.tensor([[0.25, 0.75]]), task, card)
    assert {name: values.tolist() for name, values in found.items()} == {"p_cat": [0.25], "p_dog": [0.75]}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a process's own memory there")
def test_many_rows_in_little_memory(tmp_path, warm):
    """A file of 100 MB, in another process that may grow by at most half of that after its first rows."""
    import subprocess

    rows = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (400_000, 64))
    rows[:] = rows_of(1000).reshape(1000, 64).repeat(400, 0)
    rows.flush()
    code = (
        "import resource, sys; from pathlib import Path; from runner.runs import predict\n"
        "found = predict.predicted_columns\n"
        "def told(*given):\n"
        "    for number, answers in enumerate(found(*given)):\n"
        "        if number == 20: global before; before = own()\n"
        "        yield answers\n"
        "def own(): return int(next(l for l in Path('/proc/self/status').read_text().splitlines() if 'RssAnon' in l).split()[1])\n"
        "predict.predicted_columns = told\n"
        "from runner import cli\n"
        f"assert cli.main(['predict', {RUN!r}, '--input', {str(tmp_path / 'rows.npy')!r}, '--output', {str(tmp_path / 'out.parquet')!r}, '--batch-size', '8192']) == 0\n"
        "print('grown', own() - before)"
    )
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = warm.program([sys.executable, "-c", code], **streams)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert int(output.split()[-1]) < 50_000  # KiB
    assert len(pandas.read_parquet(tmp_path / "out.parquet", columns=["label"])) == 400_000


def test_predict_counts_rows_from_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BATCH_ROWS", 16)
    monkeypatch.setattr(files, "MIN_BLOCK", 200)
    monkeypatch.setattr(files, "COLUMN_BYTES", 64)
    values = np.ones((40, 3))
    values[35, 1] = np.nan
    for name in ("rows.csv", "rows.parquet"):
        frame = pandas.DataFrame(values, columns=["a", "b", "c"])
        getattr(frame, f"to_{name.split('.')[1]}")(tmp_path / name, index=False)
        line = "line 37" if name.endswith("csv") else "row 36"
        with pytest.raises(RunnerError, match=f"{line}, column 'b', is missing"):
            list(inputs.table_rows(tmp_path / name, width=3))
