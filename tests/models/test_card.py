"""Properties of a data set reach the model, the checkpoint, model.json and MLflow's copy of the model."""

import pytest
import torch
from refused import problems_of

from runner import run
from runner.config.instantiate import build
from runner.models.card import Card, read_card, write_card

CARD = Card(
    model={"_target_": "my_models.Net", "inputs": 3},
    task={"_target_": "runner.tasks.Classification"},
    reader={"_target_": "my_data.Reader", "columns": ["a", "b"]},
    classes=("no", "yes"),
    targets=(),
    data="mine",
    facts={"num_classes": 2},
)
CODE = """
import torch
from torch import nn

from runner.data.source import Preprocessing, from_arrays
from dataclasses import replace


class Centred(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))

    def forward(self, inputs):
        return inputs - self.mean


class Doubled(nn.Module):
    num_draws = 1

    def forward(self, batch, draws):
        return batch[0] * 2, batch[1]


def around(rows):
    return Preprocessing(before={"_target_": "bring.Centred", "mean": rows[0].mul(2).mean(0).tolist()})


def data():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) + 50
    found = from_arrays(x, (x[:, 0] > 50).long(), name="bring")
    return replace(found, around=around, finish=Doubled(), reader={"_target_": "bring.data"})
"""


def test_it_comes_back_as_it_was(tmp_path):
    write_card(tmp_path, CARD)
    assert read_card(tmp_path) == CARD


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}', '{"model": {}, "classes": 3, "targets": []}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "model.json").write_text(text)
    assert "can't be read" in problems_of(read_card, tmp_path)[0].message


def test_missing_card_says_what_is_needed(tmp_path, messages):
    messages(problems_of(read_card, tmp_path))


def test_data_layers_are_saved_with_the_model(own_folder):
    (own_folder / "bring.py").write_text(CODE)
    (own_folder / "conf" / "data").mkdir(parents=True)
    (own_folder / "conf" / "data" / "bring.yaml").write_text("_target_: bring.data\n")
    short = ["train.num_epochs=2", "train.batch_size=20", "optimizer.lr=0.1", "hydra.run.dir=here"]
    summary = run(["data=bring", "model=linear", "device=cpu", "tracking.enabled=false", *short])
    assert summary["status"] == "finished"
    folder = own_folder / "here"
    card = read_card(folder)
    assert card.classes == ("0", "1")
    assert card.reader == {"_target_": "bring.data"}
    assert card.facts["class_counts"] is not None
    assert sum(card.facts["class_counts"]) == 160
    assert card.facts["vocab_size"] is None
    state = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)["model"]
    assert set(state) == {"before.mean", "model.output.weight", "model.output.bias"}
    assert state["before.mean"].tolist() == card.model["before"]["mean"]
    assert all(95 < value < 105 for value in card.model["before"]["mean"]), "finished on the device: doubled"
    assert summary["metrics"]["test/accuracy"] > 0.9, "without the mean taken away it would learn nothing in two epochs"
    build(card.model).load_state_dict(state)
