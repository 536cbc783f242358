"""With train.precision=fp64, every number of a run, from the file to the metrics, equals that of a loop in float64."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from runner import cli
from runner.device import check_precision
from runner.device.hardware import Hardware
from runner.errors import RunnerError
from runner.models.mlp import MLP
from runner.tracking.journal_reader import read_points

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
NUM_TRAINED, NUM_STEPS = 48, 12
RUN = [
    *("device=cpu", "train.precision=fp64", "train.batch_size=48", "train.eval_batch_size=5", "train.num_steps=12"),
    *("model=mlp", "model.hidden_sizes=[8]", "task=regression", "optimizer=sgd", "optimizer.lr=0.05"),
    *("optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0"),
    *(
        "optimizer.fused=false",
        "scheduler=constant",
        "data.test_fraction=0",
        "tracking.enabled=false",
        "hydra.run.dir=run",
    ),
]
OWN_DATA = """
import numpy as np, torch
from torch.utils.data import TensorDataset

ROWS = np.load("rows.npz")
TRAIN, VAL = (ROWS["x_train"], ROWS["y_train"]), (ROWS["x_val"], ROWS["y_val"])

def arrays():
    return {"train": TRAIN, "val": VAL}

def tensors():
    return {"train": tuple(map(torch.from_numpy, TRAIN)), "val": tuple(map(torch.from_numpy, VAL))}

def loss(model, batch):
    outputs = model(batch[0]).squeeze(1)
    assert outputs.dtype == batch[0].dtype == batch[1].dtype == torch.float64
    return {"loss": (outputs - batch[1]).square().mean(), "mae": (outputs - batch[1]).abs().mean()}

def dataset():
    return {"train": TensorDataset(*map(torch.from_numpy, TRAIN)), "val": TensorDataset(*map(torch.from_numpy, VAL))}
"""
SOURCES = {
    "table": ["data=table", "data.path=train.csv", "data.val_path=val.csv", "data.target=y"],
    "mapped table": [
        *("data=table", "data.path=train.csv", "data.val_path=val.csv", "data.target=y", "data.in_memory=false")
    ],
    "npz": ["data=arrays", "data.path=rows.npz"],
    **{name: [f"data._target_=double_data.{name}"] for name in ("arrays", "tensors", "dataset")},
    "own task": ["data._target_=double_data.tensors", "task=own", "task.function._target_=double_data.loss"],
}


@pytest.fixture
def rows(own_folder):
    """Write rows with more digits than float32 has, as a table and as arrays."""
    draws = np.random.default_rng(0)
    inputs = 100 + draws.normal(size=(NUM_TRAINED + 12, 3))
    targets = 50 + (inputs - 100).sum(1) ** 2
    parts = {"train": slice(NUM_TRAINED), "val": slice(NUM_TRAINED, None)}
    for name, part in parts.items():
        lines = [",".join(map(repr, map(float, (*x, y)))) for x, y in zip(inputs[part], targets[part], strict=True)]
        Path(f"{name}.csv").write_text("\n".join(["a,b,c,y", *lines]))
    small = {f"x_{name}": inputs[part] - 100 for name, part in parts.items()}
    np.savez("rows.npz", **small, **{f"y_{name}": targets[part] / 10 for name, part in parts.items()})
    Path("double_data.py").write_text(OWN_DATA)
    return {name: (inputs[part], targets[part]) for name, part in parts.items()}


def test_balanced_weights_in_fp64_are_exact(own_folder):
    """A linear model starts at zero, so that its first loss is log(2)."""
    draws = np.random.default_rng(0)
    np.savez("rows.npz", x_train=draws.normal(size=(97, 3)), y_train=np.arange(97) >= 61)
    words = ["model=linear", "task=classification", "task.class_weights=balanced", "data.val_fraction=0"]
    settings = [word for word in RUN if "hidden_sizes" not in word]
    assert cli.main([*settings, *SOURCES["npz"], *words, "train.batch_size=97", "train.num_steps=1"]) == 0
    points = read_points(Path("run"))
    torch.testing.assert_close(points["train/loss"][0][1], float(np.log(2)), **CLOSE)


def by_hand(train, val, *, is_scaled):
    """Return the losses of all steps, the measured values, and the predictions of the validation rows."""
    (x, y), (more_x, more_y) = (tuple(torch.from_numpy(np.asarray(part)) for part in split) for split in (train, val))
    y, more_y = y[:, None], more_y[:, None]
    zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    mean, std = (x.mean(0), x.std(0, correction=0)) if is_scaled else (zero, one)
    middle, spread = (y.mean(0), y.std(0, correction=0)) if is_scaled else (zero, one)
    torch.manual_seed(0)
    model = MLP(3, 1, [8]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        outputs = model((x - mean) / std) * spread + middle
        losses.append(F.mse_loss(outputs, y).item())
        (((outputs - y) / spread) ** 2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        outputs = model((more_x - mean) / std) * spread + middle
    away = outputs - more_y
    r2 = 1 - away.square().sum() / (more_y - more_y.mean()).square().sum()
    return losses, {"mse": away.square().mean(), "mae": away.abs().mean(), "r2": r2}, outputs


def run_and_loop(rows, name):
    """Train by the command line and by hand. Returns the run's points and the result of by_hand()."""
    metrics = [] if name == "own task" else ["task.metrics=[r2]"]
    assert cli.main([*RUN, *SOURCES[name], *metrics]) == 0
    if "table" not in name:
        found = np.load("rows.npz")
        rows = {split: (found[f"x_{split}"], found[f"y_{split}"]) for split in ("train", "val")}
    return read_points(Path("run")), *by_hand(rows["train"], rows["val"], is_scaled="table" in name)


@pytest.mark.parametrize("name", SOURCES)
def test_run_in_fp64_equals_a_hand_loop(rows, name):
    points, losses, measured, outputs = run_and_loop(rows, name)
    torch.testing.assert_close([value for _, value in points["train/loss"]], losses, **CLOSE)
    torch.testing.assert_close(points["val/loss"][-1][1], measured["mse"].item(), **CLOSE)
    torch.testing.assert_close(points["val/mae"][-1][1], measured["mae"].item(), **CLOSE)
    if name != "own task":
        torch.testing.assert_close(points["val/r2"][-1][1], measured["r2"].item(), rtol=1e-11, atol=0)
    if name == "table":
        check_predictions(measured, outputs, "val.csv")
    if name == "npz":
        more = np.load("rows.npz")["x_val"]
        np.save("more.npy", more)
        np.savetxt("more.csv", more, fmt="%.17g", delimiter=",", header="a,b,c", comments="")
        check_predictions(measured, outputs, "more.npy", "more.csv")
        check_exports()


def check_exports():
    for form, file in {
        "pt2": "model.pt2*.json",
        "safetensors": "model.safetensors*.json",
        "mlflow": "model.mlflow/about.json",
    }.items():
        assert cli.main(["export", "run", "--format", form, "--output", f"model.{form}"]) == 0
        about = json.loads(next(Path().glob(file)).read_text())
        assert {each["dtype"] for each in (*about["inputs"], *about["outputs"])} == {"float64"}
        assert about["checked"]["largest_difference"] < 1e-14


def check_predictions(measured, outputs, *files):
    for file in files:
        assert cli.main(["predict", "run", "--input", file, "--output", f"{file}.csv"]) == 0
        said = [float(line.split(",")[-1]) for line in Path(f"{file}.csv").read_text().splitlines()[1:]]
        torch.testing.assert_close(said, outputs[:, 0].tolist(), **CLOSE)
    assert cli.main(["evaluate", "run", "--json"]) == 0
    found = json.loads(Path("run/evaluation.json").read_text())["metrics"]
    torch.testing.assert_close(found["val/mae"], measured["mae"].item(), **CLOSE)


def test_float64_module_keeps_dtype_in_fp32_run(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    (own_folder / "doubles.py").write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 3).double()\n\n    def forward(self, x):\n"
        "        return self.layer(x.double()).float()\n"
    )
    words = ["~model", "+model._target_=doubles.Net", "data=iris", "device=cpu", "train.num_epochs=1"]
    assert cli.main([*words, "tracking.enabled=false", "task.plots=false", "hydra.run.dir=run"]) == 0
    assert cli.main(["evaluate", "run"]) == 0


def test_fp64_on_mps_is_refused():
    with pytest.raises(RunnerError, match="has no float64"):
        check_precision("fp64", "mps", Hardware(mps_built=True, macos="15.0"))
