"""Whole runs with metrics, derived values and plots: what is measured, selected, stopped at and drawn."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from runner import cli
from runner.tracking.journal_reader import read_points

SHORT = ("model=linear", "tracking.enabled=false", "hydra.run.dir=run", "device=cpu", "train.batch_size=200")
OWN = "def hits(said, true):\n    return (said.argmax(1) == true).float().mean()\n"
HITS = "task.metrics={hits: {_target_: my_tasks.hits, _partial_: true}}"


def summary(name="run"):
    return json.loads(Path(name, "summary.json").read_text())


def test_best_weights_by_f1_equal_scikit_learns(own_folder):
    words = ["train.early_stopping.metric=val/f1", "train.ema_decay=0.9", "train.accumulate_steps=2"]
    assert cli.main([*SHORT, *words, "task.metrics=[f1]", "train.num_epochs=4", "task.plots=false"]) == 0
    found, points = summary(), read_points(own_folder / "run")
    values = [value for _, value in points["val/f1"]]
    assert found["best"] == {**found["best"], "metric": "val/f1", "mode": "max", "value": max(values)}
    assert "test/f1" in points and "train/f1" not in points and not list((own_folder / "run" / "plots").glob("roc*"))

    from runner.data.builtin.scikit import digits
    from runner.data.split import split
    from runner.models.linear import Linear

    inputs, targets = split(digits(), val_fraction=0.1, test_fraction=0.1, limit=None, seed=0).test
    model = Linear(64, 10)
    model.load_state_dict(torch.load("run/checkpoints/best.pt", weights_only=True)["model"])
    said = model(inputs).argmax(1).numpy()
    assert points["test/f1"][0][1] == pytest.approx(f1_score(targets.numpy(), said, average="macro"), abs=1e-6)


def test_metric_missing_from_custom_task_is_reported(own_folder, capsys):
    loss = (
        "def loss(model, batch):\n    return {'loss': model(batch[0]).square().mean(), 'size': batch[0].abs().mean()}\n"
    )
    (own_folder / "my_tasks.py").write_text(loss)
    own = ["task=own", "task.function._target_=my_tasks.loss", "train.early_stopping.metric=val/sise"]
    words = [*SHORT, *own, "train.num_epochs=2"]
    assert cli.main([*words, "train.early_stopping.patience=2"]) == 1
    assert "train.early_stopping.metric=val/size" in summary()["error"]
    assert cli.main([*words, "scheduler=plateau", "hydra.run.dir=falls"]) == 1
    assert "train.early_stopping.metric=val/size" in summary("falls")["error"]
    assert cli.main([*words, "hydra.run.dir=other"]) == 0
    assert "train.early_stopping.metric=val/size" in capsys.readouterr().out


STOPS = """
def enough(view):
    return {"stop": view.epoch == 2, "norm": 1.0}
"""
QUIET = ("task.plots=false", "train.num_steps=72", "optimizer.lr=0.01", "data.limit=1600")


@pytest.mark.parametrize(
    ("words", "metric", "every", "reached"),
    [
        (["train.stop_when={val/loss: '<0.9', val/accuracy: '>=2'}"], "val/loss", 7, lambda value: value < 0.9),
        (["train.stop_when={train/loss: '<0.9'}", "data.val_fraction=0"], "train/loss", 8, lambda value: value < 0.9),
        (
            ["data.val_fraction=0", "train.stop_when={train/accuracy: '>0.8'}", "train.evaluate_every_steps=3"],
            *("train/accuracy", 3, lambda value: value > 0.8),
        ),
    ],
)
def test_stop_when_ends_run_at_value(own_folder, capsys, words, metric, every, reached):
    whole = ["hydra.run.dir=whole", "train.stop_when=null", "train.evaluate_every_steps=null"]
    assert cli.main([*SHORT, *QUIET, *words, *whole]) == 0
    values = dict(read_points(own_folder / "whole")[metric])
    end = next(step for step, value in values.items() if reached(value) and step % every == 0)
    assert cli.main([*SHORT, *QUIET, *words, "train.num_steps=5"]) == 0 and 5 < end < 72
    capsys.readouterr()
    assert cli.main(["resume", "run", "train.num_steps=72"]) == 0
    found, said = summary(), capsys.readouterr().out
    assert (found["status"], found["num_steps"]) == ("finished", end)
    assert found["ending"].startswith(f"train.stop_when: {metric} ")
    assert f"({found['ending']})" in said and f"stop {found['ending']}" in (own_folder / "run/runner.log").read_text()
    assert cli.main(["resume", "run", "train.num_steps=80"]) == 0
    assert summary()["num_steps"] == end
    assert cli.main(["resume", "run", f"train.stop_when={{{metric}: '<-1'}}"]) == 0
    assert (summary()["ending"], summary()["num_steps"]) == ("finished", 80)


def test_stop_when_is_refused_with_a_fix(own_folder, capsys):
    assert cli.main([*SHORT, *QUIET, "train.stop_when={val/loss: 'below 1'}"]) == 2
    assert "{val/loss: '<1e-3'}" in capsys.readouterr().err
    assert cli.main([*SHORT, *QUIET, "train.stop_when={val/los: '<1'}"]) == 1
    assert "use `val/loss`" in summary()["error"]


def test_a_hook_ends_the_run_by_stop(own_folder):
    (own_folder / "my_hooks.py").write_text(STOPS)
    assert cli.main([*SHORT, *QUIET, "train.hooks=[my_hooks.enough]"]) == 0
    found, points = summary(), read_points(own_folder / "run")
    assert (found["status"], found["ending"]) == ("finished", "train.hooks: my_hooks.enough")
    assert found["num_epochs"] == 2 and len(points["norm"]) == 2 and "stop" not in points and "test/loss" in points


def test_resumed_run_measures_the_same(own_folder):
    (own_folder / "my_tasks.py").write_text(OWN)
    words = [*SHORT, HITS, "task.plots=false", "train.num_epochs=2", "data=synthetic", "data.num_rows=600"]
    assert cli.main(words) == 0
    whole = read_points(own_folder / "run")
    slowly = [*words, "hydra.run.dir=cut", "train.max_seconds=0.001"]
    assert cli.main(slowly) == 0
    for _ in range(60):
        if summary("cut")["ending"] == "finished":
            break
        assert cli.main(["resume", "cut"]) == 0
    cut = read_points(own_folder / "cut")
    assert cut["val/hits"] == whole["val/hits"] == whole["val/accuracy"]


def test_plots_of_best_weights_are_in_run(own_folder):
    assert cli.main([*SHORT, "train.num_epochs=1", "task.plots=[confusion,samples]"]) == 0
    drawn = {path.stem for path in (own_folder / "run" / "plots").iterdir()}
    assert drawn - {"loss", "accuracy", "time"} == {"confusion", "samples"}


def test_pictures_that_fail_never_fail_the_run(own_folder, monkeypatch, capsys):
    from runner.experiment.plots import draw

    def fails(results):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draw, "draw_confusion", fails)
    assert cli.main([*SHORT, "train.num_epochs=1", "task.plots=[confusion]"]) == 0
    assert summary()["status"] == "finished"
    line = "plots: confusion.png left out: OSError: [Errno 28] No space left on device"
    assert line in capsys.readouterr().out and line in (own_folder / "run" / "runner.log").read_text()
    monkeypatch.setattr("runner.experiment.figures.collect", fails)
    assert cli.main([*SHORT, "train.num_epochs=1", "hydra.run.dir=second"]) == 0
    assert "plots: left out, TypeError" in capsys.readouterr().out


def test_two_inputs_have_a_decision_boundary(own_folder):
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(200, 2))
    np.savez(own_folder / "moons.npz", x=inputs, y=(inputs[:, 0] > inputs[:, 1]).astype(int))
    words = [*SHORT, "data=arrays", "data.path=moons.npz", "train.num_epochs=3", "task.plots=[boundary]"]
    assert cli.main(words) == 0
    assert (own_folder / "run" / "plots" / "boundary.png").is_file()


def test_metrics_from_user_file_have_separate_names(own_folder):
    (own_folder / "my_tasks.py").write_text(OWN)
    (own_folder / "conf" / "experiment").mkdir(parents=True)
    (own_folder / "conf" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ntask:\n  metrics:\n    mine: {_target_: my_tasks.hits, _partial_: true}\n"
        "    macro:\n      _target_: torchmetrics.classification.MulticlassF1Score\n"
        "      num_classes: ${facts.num_classes}\n      average: macro\n"
    )
    assert cli.main([*SHORT, "experiment=mine", "train.num_epochs=1", "task.plots=false"]) == 0
    assert {"val/mine", "val/macro", "test/macro"} <= summary()["metrics"].keys()


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (("task=regression",), "task=classification"),
        (("data=synthetic", "data.num_classes=null"), "task=regression"),
        (("task.class_weights=[1,2]",), "10 weights"),
        (("task.metrics=[f11]",), "task.metrics=[f1]"),
    ],
)
def test_unsuitable_data_is_reported_before_training(own_folder, capsys, words, mend):
    assert cli.main([*SHORT, *words]) == 2
    assert mend in capsys.readouterr().err


def test_dataset_without_sizes_runs_with_suitable_model(own_folder):
    (own_folder / "mine.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import Dataset\n"
        "class Rows(Dataset):\n"
        "    def __len__(self): return 200\n"
        "    def __getitem__(self, number): return torch.full((3,), float(number)), torch.tensor(number % 2)\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(3, 2)\n"
    )
    for group, name in (("data", "Rows"), ("model", "Net")):
        (own_folder / "conf" / group).mkdir(parents=True)
        (own_folder / "conf" / group / "mine.yaml").write_text(f"_target_: mine.{name}\n")
    words = ["data=mine", "model=mine", "train.num_epochs=1", *SHORT[1:]]
    assert cli.main(words) == 0
    assert (own_folder / "run" / "plots" / "confusion.png").is_file()
    assert cli.main([*words, "task.metrics=[f1]"]) == 2
