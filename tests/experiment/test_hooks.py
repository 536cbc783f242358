"""`train.hooks`: numbers, images and tables of a user's functions, compared with a manual loop; errors; a resumed run."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hand_loop import batches_of_digits, steps_of
from refused import problems_of

import runner
from runner import cli
from runner.experiment.check import check_here, composed
from runner.models.mlp import MLP
from runner.tracking.journal_reader import read_points
from runner.training import fit, metric_buffer
from runner.training.fit import Training

HOOKS = """
import torch
from PIL import Image

def norms(view):
    torch.rand(7)  # it may draw, and the training does not notice
    return {"norm/" + name: value.norm() for name, value in view.model.named_parameters()}

def shows(view, count=9):
    inputs, targets = next(view.batches("val"))[:2]
    said = view.model(inputs[:count]).argmax(1)
    return {"digits/first": inputs[:count].reshape(-1, 1, 8, 8), "answers": {"said": said, "is": targets[:count]}}

def picture(view):
    return {"weights": Image.fromarray(view.model.output.weight.numpy())}

def epochs(view):
    return {"epochs/done": view.epoch}

class Counts:
    def __init__(self, by=1, name="calls"):
        self.by, self.name, self.calls = by, name, 0

    def __call__(self, view):
        self.calls += self.by
        return {self.name: self.calls}

def needs_two(view, other):
    pass

def takes_none():
    pass
"""
WORDS = ["model=mlp", "model.hidden_sizes=[8]", "task.plots=false", "tracking.log_model=false"]
WORDS += ["tracking.system_metrics=false"]


@pytest.fixture
def here(own_folder, empty_store, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    (own_folder / "my_hooks.py").write_text(HOOKS)
    (own_folder / "mlflow.db").write_bytes(empty_store.read_bytes())
    return own_folder


def by_hand(num_epochs):
    """Return the norms of the weights after each epoch of 12 steps, and before the first."""
    torch.manual_seed(0)
    model = MLP(64, 10, [8])
    norms = [{name: value.norm().item() for name, value in model.named_parameters()}]
    for number, _ in enumerate(steps_of(model, batches_of_digits(num_epochs)), start=1):
        if number % 12 == 0:
            norms.append({name: value.norm().item() for name, value in model.named_parameters()})
    return norms


def test_weight_norms_equal_loop_by_hand(here):
    both = "train.hooks=[{_target_: my_hooks.norms, at: [start, epoch]}]"
    assert cli.main([*WORDS, both, "train.num_epochs=3", "hydra.run.dir=run", "tracking.enabled=false"]) == 0
    points = read_points(Path("run"))
    norms = by_hand(3)
    for name in norms[0]:
        assert list(points[f"norm/{name}"]) == [(12 * epoch, value[name]) for epoch, value in enumerate(norms)]
    assert json.loads(Path("run/summary.json").read_text())["metrics"]["norm/output.bias"] == norms[3]["output.bias"]
    assert cli.main([*WORDS, "train.num_epochs=3", "hydra.run.dir=plain", "tracking.enabled=false"]) == 0
    assert list(points["train/loss"]) == list(read_points(Path("plain"))["train/loss"])


def test_first_window_leaves_out_the_start(here, monkeypatch):
    start, times = Training.call_hooks, []

    def slow(self, when):
        times.append(when)
        return start(self, when)

    def clock():
        return time.perf_counter() + 1e6 * ("start" in times)

    monkeypatch.setattr(Training, "call_hooks", slow)
    for module in (fit, metric_buffer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock, time=time.time))
    words = ["train.num_epochs=1", "hydra.run.dir=run", "tracking.enabled=false"]
    assert cli.main([*WORDS, *words]) == 0 and "start" in times
    assert all(value > 0.01 for _, value in read_points(Path("run"))["speed/steps_per_second"])


def test_images_and_tables_are_in_mlflows_format(here):
    import pandas as pd
    from mlflow import MlflowClient

    hooks = (
        "train.hooks=[{_target_: my_hooks.shows, at: [start, epoch, end], count: 4},"
        "{_target_: my_hooks.Counts, by: 2},{_target_: my_hooks.picture, at: end}]"
    )
    assert cli.main([*WORDS, hooks, "train.num_epochs=2", "hydra.run.dir=run"]) == 0
    run_id = json.loads(Path("run/summary.json").read_text())["run_id"]
    client = MlflowClient(f"sqlite:///{here}/mlflow.db")
    images = sorted(item.path for item in client.list_artifacts(run_id, "images"))
    assert [path for path in images if path.startswith("images/weights+step+24+")]  # float numbers, converted
    images = [path for path in images if "weights" not in path]
    assert [path.split("+")[:3] for path in images if path.endswith(".png")] == [
        ["images/digits~first", "step", str(step)] for step in (0, 12, 24)
    ]
    assert len(images) == 6 and sum(path.endswith("+compressed.webp") for path in images) == 3
    tags = client.get_run(run_id).data.tags
    assert tags["mlflow.loggedImages"] == "True"
    assert json.loads(tags["mlflow.loggedArtifacts"]) == [{"path": "tables/answers.json", "type": "table"}]

    table = pd.read_json(client.download_artifacts(run_id, "tables/answers.json", str(here)), orient="split")
    assert table["step"].tolist() == [0] * 4 + [12] * 4 + [24] * 4 and set(table) == {"step", "said", "is"}
    assert [point.value for point in client.get_metric_history(run_id, "calls")] == [2.0, 4.0]


def test_resumed_run_shows_each_step_once(here):
    hooks = "train.hooks=[my_hooks.norms,my_hooks.shows]"
    words = [*WORDS, hooks, "tracking.enabled=false", "hydra.run.dir=run"]
    assert cli.main([*words, "train.num_epochs=2"]) == 0
    file = Path("run/checkpoints/last.pt")
    kept = file.read_bytes()
    assert cli.main(["resume", "run", "train.num_epochs=3"]) == 0
    whole, table = read_points(Path("run")), Path("run/tables/answers.json").read_text()
    file.write_bytes(kept)  # like after a kill before the last checkpoint
    assert cli.main(["resume", "run", "train.num_epochs=3"]) == 0
    again = read_points(Path("run"))
    assert [step for step, _ in again["norm/output.bias"]] == [12, 24, 36]
    assert list(again["norm/output.bias"]) == list(whole["norm/output.bias"])
    assert Path("run/tables/answers.json").read_text() == table and len(list(Path("run/images").glob("*.png"))) == 3
    assert set(runner.history("run").columns) >= {"norm/output.bias", "train/loss"}


def test_hook_metric_decides_best_and_stopping(here):
    words = [f"train.early_stopping.{word}" for word in ("metric=val/calls", "mode=min", "patience=2")]
    words += ["train.hooks=[{_target_: my_hooks.Counts, name: val/calls}]", "hydra.run.dir=run"]
    assert cli.main([*WORDS, *words, "tracking.enabled=false"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["ending"], summary["num_epochs"]) == ("patience", 3)
    assert summary["best"] | {"mode": "min"} == {"metric": "val/calls", "value": 1.0, "step": 12, "mode": "min"}


def test_hook_metric_needs_no_validation_split(here, capsys):
    quick = ["data.val_fraction=0", "tracking.enabled=false", "train.early_stopping.patience=1"]
    own = ["train.early_stopping.metric=val/calls", "train.early_stopping.mode=min", "hydra.run.dir=run"]
    hook = "train.hooks=[{_target_: my_hooks.Counts, name: val/calls}]"
    assert cli.main([*WORDS, *quick, *own, hook, "train.evaluate_every_steps=2"]) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["ending"], summary["num_steps"], summary["best"]["step"]) == ("patience", 4, 2)
    assert cli.main([*WORDS, *quick, *own[:2], "train.hooks=[my_hooks.epochs]"]) == 1  # not one of its names
    assert "help: use `train.early_stopping.metric=val/loss`" in capsys.readouterr().out
    assert cli.main([*WORDS, *quick, hook]) == 2 and "needs a validation split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        ("[my_hooks.norm]", "my_hooks.norms"),
        ("[os.system]", "os.system"),
        ("[{_target_: my_hooks.shows, cuont: 3}]", "count"),
        ("[{_target_: my_hooks.shows, at: epcoh}]", "at: start, epoch or end}"),
        ("my_hooks.norms", "must be a list of functions"),
        ("[3]", "must be a list of functions"),
    ],
)
def test_invalid_hook_is_refused_by_check(here, hooks, said):
    cfg, _ = composed([], [*WORDS, "device=cpu", f"train.hooks={hooks}"])
    (problem,) = problems_of(check_here, cfg)
    assert said in f"{problem.message} {problem.help}"


@pytest.mark.parametrize(("name", "said"), [("needs_two", "other"), ("takes_none", "def takes_none(view)")])
def test_unsuitable_hook_is_refused_before_tracking(here, capsys, name, said):
    assert cli.main([*WORDS, f"train.hooks=[my_hooks.{name}]", "hydra.run.dir=run"]) == 2
    assert said in capsys.readouterr().err and not Path("run/journal").exists()


def test_within_an_epoch_it_is_not_done(here):
    hook = "train.hooks=[{_target_: my_hooks.epochs, at: epoch}]"
    words = ["train.evaluate_every_steps=5", "train.num_steps=29", "hydra.run.dir=run", "tracking.enabled=false"]
    assert cli.main([*WORDS, hook, *words]) == 0
    done = {5: 0, 10: 0, 15: 1, 20: 1, 25: 2, 29: 3}  # of 12 steps; the last one ends with the training
    assert dict(read_points(Path("run"))["epochs/done"]) == done


@pytest.mark.parametrize(
    ("words", "times"),
    [
        (["train.early_stopping.metric=val/calls", "train.evaluate_every_steps=2"], 1),
        (["data.val_fraction=0"], 0),  # without rows, no value is expected, whatever a hook measures
    ],
)
def test_unmeasured_metric_is_reported_once(here, capsys, words, times):
    quick = ["train.hooks=[my_hooks.epochs]", "train.num_steps=6", "tracking.enabled=false"]
    assert cli.main([*WORDS, *quick, *words]) == 0
    assert capsys.readouterr().out.count("the last weights are kept") == times
