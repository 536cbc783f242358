"""What stands beside a model's and an optimizer's arguments: weights to start from, what is frozen, groups of parameters."""

import json
import shutil

import pytest
import torch
from omegaconf import OmegaConf

from runner import cli
from runner.config import compose
from runner.config.instantiate import build
from runner.config.nodes import SHARED
from runner.models.card import read_card

SHORT = [
    "device=cpu",
    "tracking.enabled=false",
    "train.num_epochs=1",
    "data.limit=300",
    "model=mlp",
    "model.hidden_sizes=[8]",
    "task.plots=false",
]


def run(folder, *words):
    return cli.main([*SHORT, f"hydra.run.dir={folder}", *words])


def weights(folder, name="best"):
    return torch.load(f"{folder}/checkpoints/{name}.pt", weights_only=True)["model"]


def test_conf_says_the_same_as_the_code():
    base = OmegaConf.load(compose.CONF / "base.yaml")
    for key, (_, usual) in SHARED.items():
        assert OmegaConf.to_container(base[key]) == usual


def test_a_run_starts_from_another_one_and_keeps_what_is_frozen(own_folder, capsys):
    assert run("first") == 0
    assert run("second", "model.weights=first", "model.freeze=hidden") == 0
    assert "starts: 4 of the model's 4 tensors come from first" in capsys.readouterr().out
    first, second = weights("first"), weights("second")
    assert torch.equal(first["hidden.0.weight"], second["hidden.0.weight"])
    assert not torch.equal(first["output.weight"], second["output.weight"])


def test_later_its_weights_are_its_own(own_folder):
    """The model is built again, and the run goes on, where the file it started from is gone."""
    assert run("first") == 0
    assert run("second", "model.weights=first", "train.num_steps=2") == 0
    shutil.rmtree("first")
    card = read_card(own_folder / "second")
    assert "weights" not in card.model
    build(card.model).load_state_dict(weights("second"))
    assert cli.main(["resume", "second", "train.num_steps=3"]) == 0
    assert json.loads((own_folder / "second" / "summary.json").read_text())["num_steps"] == 3
    assert run("third", "model.weights=first") == 2


def test_groups_reach_the_optimizer(own_folder):
    words = [
        "optimizer=sgd",
        "optimizer.groups=[{match: hidden, lr: 0}]",
        "train.num_steps=1",
        "train.checkpoint_every_steps=1",
    ]
    assert run("groups", *words) == 0
    groups = torch.load("groups/checkpoints/last.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.1, 2), (0.0, 2)]


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self, outputs, weights="DEFAULT", freeze=3):
        super().__init__()
        print("weights:", weights, "freeze:", freeze)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
    def forward(self, x):
        return self.layers(x)
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "weights: DEFAULT freeze: 3"), (["model.weights=V2", "model.freeze=0"], "weights: V2 freeze: 0")],
)
def test_a_class_with_such_an_argument_gets_it(words, told, own_folder, capsys):
    (own_folder / "my_net.py").write_text(OWN)
    (own_folder / "conf/model").mkdir(parents=True)
    (own_folder / "conf/model/mine.yaml").write_text("_target_: my_net.Net\noutputs: ${facts.out_features}\n")
    given = [word for word in SHORT if not word.startswith("model")]
    assert cli.main([*given, "hydra.run.dir=own", "model=mine", *words]) == 0
    assert told in capsys.readouterr().out
    assert json.loads((own_folder / "own" / "model.json").read_text())["model"].get("weights") == (
        (words and "V2") or None
    )


@pytest.mark.parametrize(
    ("word", "write"),
    [
        ("model.strict=maybe", "model.strict=true"),
        ("model.freeze=[3]", "model.freeze=[encoder]"),
        ("optimizer.groups=[{lr: 1}]", "optimizer.groups=[{match: encoder, lr: 0.0001}]"),
        ("optimizer.no_decay=norms", "optimizer.no_decay=norms_and_biases"),
        ("model.freeze=hiden", "hidden"),
        ("model.weights=nowhere.pt", "a file or a run's folder"),
        ("model.wieghts=first", "model.weights"),
        (f"model.weights={'w' * 300}", "a file or a run's folder"),
        (f"model._target_={'w' * 300}.Net", "your own class in a file"),
        ("train.early_stopping.metric=val/acuracy", "train.early_stopping.metric=val/accuracy"),
    ],
)
def test_what_they_are_not(word, write, own_folder, capsys):
    assert run("wrong", word) == 2
    assert write in capsys.readouterr().err


def test_a_fact_that_the_data_does_not_tell_is_named_with_the_models_that_suit(own_folder, capsys):
    (own_folder / "text.txt").write_text("one and two. " * 100)
    words = ["data=text", "data.path=text.txt", "data.context_length=8", "task=language", "device=cpu"]
    assert cli.main([*words, "model=mlp"]) == 2
    said = capsys.readouterr().err
    assert "this data tells no in_features; it tells input_shape=[8]" in said
    assert "write: model=gpt, model=transformer" in said
