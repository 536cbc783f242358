"""`train.keep_checkpoints`: each kept checkpoint can be measured, exported and used as initial weights."""

import json
from pathlib import Path

import pytest
import torch

from runner.tracking.journal_reader import read_points
from runner.training.checkpoint import load, read_kept

WORDS = ["model=mlp", "model.hidden_sizes=[8]", "optimizer.lr=0.01", "train.num_epochs=2"]
WORDS += ["train.evaluate_every_steps=5", "train.keep_checkpoints=best:2", "train.ema_decay=0.5"]
WORDS += ["task.plots=false", "tracking.enabled=false", "hydra.run.dir=outputs/kept"]


@pytest.fixture
def folder(run):
    if not Path("outputs/kept").exists():  # in the directory of the session's runs
        assert run(*WORDS)[0] == 0
    return Path("outputs/kept")


def test_kept_checkpoint_equals_its_measurement(run, folder):
    points = dict(read_points(folder)["val/loss"])
    assert sorted(points) == [5, 10, 15, 20, 24]
    best = sorted(points, key=points.__getitem__)[:2]
    assert [entry["step"] for entry in read_kept(folder / "checkpoints")] == sorted(best)
    for entry in read_kept(folder / "checkpoints"):
        code, out, _ = run("evaluate", str(folder / "checkpoints" / entry["file"]), "--json", "device=cpu")
        found = json.loads(out)
        assert code == 0 and found["step"] == entry["step"]
        assert found["metrics"]["val/loss"] == points[entry["step"]] == entry["metrics"]["val/loss"]
        assert found["in_the_run"].keys() == {"val/loss", "val/accuracy"}
        assert json.loads((folder / f"evaluations/step-{entry['step']}.json").read_text())["step"] == entry["step"]
    assert not (folder / "evaluation.json").exists()


def test_kept_checkpoint_is_exported_and_loaded(run, folder):
    file = folder / "checkpoints" / read_kept(folder / "checkpoints")[0]["file"]
    assert run("export", str(file), "--format", "safetensors", "--output", "model.safetensors")[0] == 0
    from safetensors.torch import load_file

    average = load(file)["average"]
    assert all(torch.equal(value, average[name]) for name, value in load_file("model.safetensors").items())
    words = [word for word in WORDS if "hydra" not in word]
    assert run(*words, f"model.weights={file}", "hydra.run.dir=outputs/next")[0] == 0


def test_missing_checkpoint_names_the_others(run, folder):
    (first, _) = read_kept(folder / "checkpoints")
    expected = str(folder / "checkpoints" / f"step-{first['step']}0.pt")
    code, _, err = run("evaluate", expected)
    assert code == 2 and "the run has no checkpoint" in err and first["file"] in err
    code, _, err = run("register", str(folder / "checkpoints" / first["file"]), "--name", "m")
    assert code == 2 and "best weights" in err


@pytest.mark.parametrize("value", ["last", "last:0", "3"])
def test_unknown_checkpoint_setting_raises(run, value):
    code, _, err = run(*WORDS[:1], f"train.keep_checkpoints={value}")
    assert code == 2 and "every_epoch, last:K or best:K" in err
    code, _, err = run(*WORDS[:-1], "data.val_fraction=0")
    assert code == 2 and "needs a validation split" in err
