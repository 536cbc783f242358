import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from runner.tracking import mlflow_store, model_graph

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|mlflow|pydantic|copyreg).*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|mlflow).*"),
]


class OnlyFour(nn.Linear):
    """Its graph is valid only for four rows."""

    def forward(self, rows):
        return super().forward(rows.reshape(4, 8) if len(rows) == 4 else rows)


class Branching(nn.Linear):
    """Has no graph: its forward pass depends on values."""

    def forward(self, rows):
        return super().forward(rows if float(rows.sum()) > 0 else -rows)


class Drifting(nn.Linear):
    """Its graph always returns the first result."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        return super().forward(rows) + self.calls


@pytest.mark.parametrize(
    ("make", "example"),
    [
        (OnlyFour, torch.rand(4, 8)),
        (Drifting, torch.rand(4, 8)),
        (Branching, torch.rand(4, 8)),
        (nn.Linear, {"a": torch.rand(4, 8)}),
        (nn.Linear, torch.rand(4, 7)),  # does not accept these rows
    ],
)
def test_model_without_graph_leaves_nothing(make, example, tmp_path, capfd):
    assert not model_graph.write_graph(tmp_path / "graph", make(8, 3).eval(), example, requirements=[])
    assert not model_graph.has_graph(tmp_path / "graph") and list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")  # it is written while the training uses the terminal


MAKE = """
import sys
from pathlib import Path
from runner.tracking import model_graph
model_graph.as_model(Path("graph"), Path("made"), "r")
assert "torch" not in sys.modules
"""


def test_model_directory_is_written_without_torch(tmp_path):
    with mlflow_store.settings():
        import mlflow.pytorch
    module, rows = nn.Sequential(nn.Linear(8, 3), nn.Tanh()).eval(), torch.rand(7, 8)
    assert model_graph.write_graph(tmp_path / "graph", module, rows[:1], requirements=["torch==2.0", "numpy"])
    assert model_graph.has_graph(tmp_path / "graph")
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "uv.lock").write_text("")
    code = f"import os; os.environ.update({mlflow_store.SETTINGS!r})\n{MAKE}"
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "made"
    assert {"torch==2.0", "numpy"} <= set((made / "requirements.txt").read_text().split())
    assert not (made / "uv.lock").exists() and not (made / "pyproject.toml").exists()
    with torch.no_grad(), mlflow_store.settings():
        expected = module(rows)
        torch.testing.assert_close(mlflow.pytorch.load_model(str(made))(rows), expected)
        predicted = mlflow.pyfunc.load_model(str(made)).predict(rows.numpy())
        card = mlflow.models.Model.load(str(made))
    np.testing.assert_allclose(predicted, expected.numpy(), rtol=1e-6)
    assert card.signature.inputs.inputs[0].shape == (-1, 8) and card.signature.outputs.inputs[0].shape == (-1, 3)
    assert card.run_id == "r" and card.saved_input_example_info
