"""`python -m runner export`: the model in other formats, computed without this package."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import problems_of
from trained_runs import model_of

from runner import cli
from runner.config.instantiate import build
from runner.runs import export, export_formats
from runner.version import HERE

#: programs of a recipient, who has the file and its neighbors, but no runner
READ = {
    "pt2": "import torch; compute = lambda rows: torch.export.load(file).module()(torch.from_numpy(rows)).detach().numpy()",
    "onnx": "import onnxruntime; compute = lambda rows: onnxruntime.InferenceSession(file).run(None, {about['inputs'][0]['name']: rows})[0]",
    "mlflow": "import mlflow.pyfunc; compute = lambda rows: mlflow.pyfunc.load_model(file).predict(rows)",
    "safetensors": (
        "from safetensors.numpy import load_file; w = load_file(file)\n"
        "def compute(rows):\n"
        "    rows = np.nan_to_num((rows - w['before.means']) / w['before.spreads'])\n"
        "    hidden = np.maximum(rows @ w['model.hidden.0.weight'].T + w['model.hidden.0.bias'], 0)\n"
        "    return hidden @ w['model.output.weight'].T + w['model.output.bias']"
    ),
}
FILES = {"pt2": "model.pt2", "onnx": "model.onnx", "safetensors": "model.safetensors", "mlflow": "mlflow"}


def computed_elsewhere(files, folder):
    """Return the outputs for 1, 2, 5 and all rows of rows.npy by form, of a process without this package.

    files: By form; of a pickled model the shape of its output for three images.
    """
    read = "".join(
        f"about, file = json.load(open({str(about_of(file))!r})), {str(file)!r}\n{READ[form]}\n"
        f"np.savez({str(folder / form)!r}, *[compute(rows[:n]) for n in (1, 2, 5, len(rows))])\n"
        for form, file in files.items()
        if form in READ
    )
    code = (
        f"import json, sys, numpy as np\nrows = np.load('rows.npy')\n{read}"
        f"images = mlflow.pyfunc.load_model({str(files['pickled'])!r}).predict(np.ones((3, 1, 8, 8), np.float32))\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'runner']\n"
        "print(images.shape)"
    )
    # -I ignores the current directory and PYTHONPATH, where this package is
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", code], cwd=folder, capture_output=True, text=True
    )
    assert done.stdout.strip() == "(3, 10)", done.stderr
    return {form: list(np.load(folder / f"{form}.npz").values()) for form in READ}


def about_of(file):
    return file / "about.json" if file.is_dir() else file.with_name(f"{file.name}.json")


@pytest.mark.slow
def test_exports_compute_without_this_package(own_model, run, tmp_path):
    """A model without a graph is pickled by MLflow, with its module."""
    folder, pickled = Path("outputs/table/run").absolute(), own_model("Branching")
    rows = np.array([[1000 + n % 5, n / 10, n % 3] for n in range(11)], np.float32)
    np.save(tmp_path / "rows.npy", rows)
    files = {form: folder / "exports" / FILES[form] for form in READ} | {"pickled": pickled / "exports/mlflow"}
    files["pickled"].mkdir(parents=True)
    for name in ("MLmodel", "earlier"):  # an earlier export, which is replaced
        (files["pickled"] / name).touch()
    for form in READ:
        code, out, _ = run("export", str(folder), "--format", form)
        assert code == 0 and "checked as the original for 1, 2, 3, 7, 16 rows" in out
    assert run("export", str(pickled), "--format", "mlflow")[0] == 0
    assert list(files["pickled"].rglob("my_nets.py")) and not (files["pickled"] / "earlier").exists()
    with torch.no_grad():
        expected = model_of(folder)(torch.from_numpy(rows)).numpy()
    for outputs in computed_elsewhere(files, tmp_path).values():
        for output, count in zip(outputs, (1, 2, 5, 11), strict=True):
            np.testing.assert_allclose(output, expected[:count], rtol=1e-4, atol=1e-5)


def test_about_file_describes_inputs_and_outputs(run):
    assert run("export", "outputs/table/run", "--format", "pt2", "--output", "mine.pt2")[0] == 0
    about = json.loads(Path("mine.pt2.json").read_text())
    assert about["inputs"] == [{"name": "inputs", "shape": ["rows", 3], "dtype": "float32"}]
    assert about["outputs"] == [{"name": "outputs", "shape": ["rows", 2], "dtype": "float32"}]
    assert about["classes"] == ["low", "high"] and about["kind"] == "multiclass" and "softmax" in about["meaning"]
    assert about["preprocessing"]["in_the_model"]["before"]["_target_"] == "my_rows.Scale"
    assert about["preprocessing"]["before_it"]["columns"] == ["a", "the b, in m", "c"]
    assert about["checked"]["rows"] == [1, 2, 3, 7, 16]


def test_export_with_predictions_gives_probabilities(run):
    assert run("export", "outputs/table/run", "--format", "pt2", "--output", "told.pt2", "--predictions")[0] == 0
    rows = torch.tensor([[1001.0, 0.3, 1.0], [1002.0, -0.4, 2.0]])
    output = torch.export.load("told.pt2").module()(rows)
    torch.testing.assert_close(output, model_of("outputs/table/run")(rows).softmax(-1))
    assert "probabilities" in json.loads(Path("told.pt2.json").read_text())["meaning"]


def test_safetensors_metadata_builds_the_model(run):
    from safetensors import safe_open

    assert run("export", "outputs/digits/run", "--format", "safetensors", "--output", "d.safetensors")[0] == 0
    with safe_open("d.safetensors", framework="pt") as found:
        card = json.loads(found.metadata()["card"])
        model = build(card["model"], key="model")
        model.load_state_dict({name: found.get_tensor(name) for name in found.keys()})  # noqa: SIM118
    rows = torch.rand(5, 1, 8, 8)
    assert torch.equal(model.eval()(rows), model_of("outputs/digits/run")(rows))


@pytest.fixture
def own_model(run, tmp_path):
    """Return a function that trains a model of my_nets for one step."""

    def train(name):
        words = ["model=linear", f"model._target_=my_nets.{name}", "train.num_steps=1", "device=cpu", "data.limit=100"]
        assert run(*words, "tracking.enabled=false", f"hydra.run.dir={tmp_path}/{name}")[0] == 0
        return tmp_path / name

    return train


@pytest.mark.parametrize(
    ("name", "forms", "output"),
    [
        ("Branching", ("pt2", "onnx"), ["my_nets.py:", "outputs.sum() > 0", "--format safetensors"]),
        ("Solving", ("pt2", "onnx"), ["the operation aten.linalg_lstsq", "--format mlflow"]),
        ("OverTheBatch", ("safetensors",), []),
    ],
)
def test_unsupported_model_leaves_no_file(name, forms, output, own_model, run):
    folder = own_model(name)
    for form in forms:
        code, _, err = run("export", str(folder), "--format", form)
        assert code == (2 if output else 0)
        for text in output:
            assert text in err
        left = {path.name for path in (folder / "exports").iterdir()}
        assert left == (set() if output else {"model.safetensors", "model.safetensors.json"}), left


def test_wrong_export_is_removed(run, monkeypatch, tmp_path):
    from runner.runs import export
    from runner.runs import export_formats as forms

    def wrong(trained, module, example, file):
        compute = forms.pt2(trained, module, example, file)
        return lambda rows: compute(rows) + (0.01 if len(rows) == 7 else 0)

    monkeypatch.setitem(export.FORMS, "pt2", ("model.pt2", wrong))
    code, _, err = run("export", "outputs/digits/run", "--format", "pt2", "--output", str(tmp_path / "m.pt2"))
    assert code == 2 and "for 7 rows output 0 differs from the original's by up to 0.01" in err
    assert not list(tmp_path.iterdir())


def test_export_without_rows_checks_random_ones(run, tmp_path):
    shutil.copytree("outputs/digits/run", tmp_path / "run")
    (tmp_path / "run/journal/example.pt").unlink()
    assert run("export", str(tmp_path / "run"), "--format", "pt2")[0] == 0


def test_error_names_the_models_line():
    code = compile("1 / 0", str(HERE / "runs" / "load.py"), "exec")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code)
    assert export_formats._where(raised.value).startswith(" at test_export.py:")


def test_users_directory_is_not_replaced(tmp_path, messages):
    """Otherwise the directory would be deleted with all its files."""
    (tmp_path / "about.json").write_text("{}")
    messages(problems_of(export._target, "mlflow", str(tmp_path)))
    (tmp_path / "MLmodel").write_text("")
    assert export._target("mlflow", str(tmp_path)) == tmp_path


TWO = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 1), nn.Linear(2, 1)

    def forward(self, one, other, scale=None):
        return (self.one(one) + self.other(other)) * (1 if scale is None else scale)

def rows():
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(64, size, generator=draws) for name, size in {"one": 3, "other": 2, "y": 1}.items()}

def loss(model, batch):
    return (model(batch["one"], scale=2.0, other=batch["other"]) - batch["y"]).square().mean()
"""
OF_TWO = [
    *("data._target_=two.rows", "model._target_=two.Two", "task=own", "task.function._target_=two.loss", "device=cpu"),
    *("train.num_epochs=1", "tracking.enabled=false", "hydra.run.dir=two_run"),
]


def test_model_of_two_inputs_is_exported(own_folder):
    (own_folder / "two.py").write_text(TWO)
    assert cli.main(OF_TWO) == 0
    for form in ("pt2", "safetensors", "mlflow", "onnx"):
        if form == "onnx" and not importlib.util.find_spec("onnxscript"):
            continue
        assert cli.main(["export", "two_run", "--format", form, "--output", f"model.{form}"]) == 0
        about = own_folder / ("model.mlflow/about.json" if form == "mlflow" else f"model.{form}.json")
        assert [each["name"] for each in json.loads(about.read_text())["inputs"]] == ["one", "other"]
    program = torch.export.load("model.pt2").module()
    assert program(torch.ones(5, 3), torch.ones(5, 2), 2.0).shape == (5, 1)


def test_export_without_an_example_of_inputs_is_refused(own_folder, capsys):
    (own_folder / "two.py").write_text(TWO)
    assert cli.main([*OF_TWO, "tracking.log_model=false"]) == 0
    capsys.readouterr()
    assert cli.main(["export", "two_run", "--format", "pt2", "--json"]) == 2
    (error,) = json.loads(capsys.readouterr().out)["faults"]
    assert "`forward` of Two takes other inputs" in error["message"] and "tracking.log_model=true" in error["help"]
