"""A run on a table with texts, dates and gaps: its MLflow model accepts the DataFrame that pandas reads."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest

from runner.runs import serve
from runner.tracking import mlflow_store
from runner.version import PACKAGES

WORDS = ["data=table", "data.path=people.csv", "data.drop=[id]", "model=mlp", "model.hidden_sizes=[8]", "device=cpu"]
COLUMNS = ["age", "city", "joined", "member", "price"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|mlflow|pydantic|copyreg).*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|mlflow).*"),
]

LOAD = """
import sys, mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1])
frame = pandas.read_csv("people.csv")
pandas.DataFrame(model.predict(frame)).to_csv(sys.argv[2], index=False)
assert model.metadata.signature.inputs.input_names() == ["age", "city", "joined", "member", "price"]
try:
    model.predict(frame.drop(columns=["city"]))
except Exception as error:
    assert "missing inputs ['city']" in str(error), error
else:
    raise AssertionError("a column less")
"""


@pytest.fixture(autouse=True)
def people(own_folder, monkeypatch):
    """Write a CSV of 120 rows in the test's directory."""
    monkeypatch.setenv("RUNNER_CACHE", str(own_folder / "cache"))
    for name, value in mlflow_store.SETTINGS.items():
        monkeypatch.setenv(name, value)
    draw, lines = random.Random(0), ["id,age,city,joined,member,price,kind"]
    for row in range(120):
        age = draw.randint(18, 80)
        cells = [f"k{row}", age if row % 7 else "", draw.choice(["Rome", "Oslo", "Bern", ""])]
        cells += [f"2026-{row % 12 + 1:02d}-{row % 28 + 1:02d}", ["true", "false", ""][row % 3], f'"$1,{row:03d}.50"']
        lines.append(",".join(map(str, [*cells, "old" if age > 45 else "young"])))
    Path("people.csv").write_text("\n".join(lines) + "\n")


def predicted(run, folder):
    """Return the probabilities that `predict` writes."""
    assert run("predict", folder, "--input", "people.csv", "--output", "answers.csv")[0] == 0
    return pandas.read_csv("answers.csv")[["p_old", "p_young"]].to_numpy()


def test_logged_model_equals_predict(run, own_folder, empty_store, warm_programs):
    shutil.copy(empty_store, "mlflow.db")
    assert run(*WORDS, "train.num_epochs=2", "hydra.run.dir=outputs/a/run", "tracking.system_metrics=false")[0] == 0
    run_id = json.loads(Path("outputs/a/run/summary.json").read_text())["run_id"]
    expected = predicted(run, "outputs/a/run")
    with mlflow_store.settings():
        import mlflow.pyfunc

        mlflow.set_tracking_uri(f"sqlite:///{own_folder}/mlflow.db")
        try:
            model = mlflow.pyfunc.load_model(f"runs:/{run_id}/mlp-table")
        finally:
            mlflow.set_tracking_uri(None)
    frame = pandas.read_csv("people.csv")
    powers = np.exp(model.predict(frame))
    np.testing.assert_allclose(powers / powers.sum(1, keepdims=True), expected, rtol=1e-4, atol=1e-6)
    rows = frame.assign(age=frame.age.fillna(30).astype("int64"))  # integers in a column that had gaps in training
    assert model.predict(rows[COLUMNS[::-1]]).shape == (120, 2)
    assert list(model.input_example.columns) == COLUMNS
    np.testing.assert_array_equal(model.predict(model.input_example).shape, (4, 2))


def test_exported_model_predicts_in_another_process(run, own_folder, warm):
    words = ["train.num_epochs=1", "hydra.run.dir=outputs/a/run", "tracking.enabled=false", "tracking.log_model=false"]
    assert run(*WORDS, *words)[0] == 0 and not Path("outputs/a/run/journal/example.pt").exists()
    assert run("export", "outputs/a/run", "--format", "mlflow", "--predictions", "--output", "told")[0] == 0
    about = json.loads(Path("told/about.json").read_text())
    assert [column["name"] for column in about["inputs"]] == COLUMNS and "DataFrame" in about["how"]
    expected = predicted(run, "outputs/a/run")
    shutil.rmtree("outputs")  # the model needs no file of the run
    home = str(PACKAGES)
    environment = {**mlflow_store.SETTINGS, "PYTHONPATH": home, "PATH": "/usr/bin:/bin", "HOME": str(own_folder)}
    command = [sys.executable, "-W", "ignore", "-c", LOAD, "told", "said.csv"]
    process = warm.program(command, stderr=subprocess.PIPE, text=True, env=environment)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    np.testing.assert_allclose(pandas.read_csv("said.csv").to_numpy(), expected, rtol=1e-4, atol=1e-6)


def test_serve_tells_the_columns_to_ask_with(capsys):
    inputs = [{"name": 'the "age"', "shape": ["rows"], "dtype": "number"}]
    about = {"inputs": inputs, "meaning": "numbers", "classes": []}
    serve._say(about, 5001, has_columns=True)
    assert '{"dataframe_records": [{"the \\"age\\"": number}, ...]}' in capsys.readouterr().out
