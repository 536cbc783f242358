"""Layers whose shapes come from the data, and weights that torch does not see."""

import json

import pytest
import torch
from refused import problems_of
from torch import nn

from runner import cli
from runner.models.whole import check_trains, has_lazy, know_shapes


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.first = nn.LazyLinear(3), nn.LazyLinear(8)
        self.norm, self.drop = nn.LazyBatchNorm1d(), nn.Dropout(0.5)

    def forward(self, x):
        noise = torch.rand_like(x)  # drawn by rows
        return self.last(self.drop(self.norm(self.first(x + noise))))


def made(rows):
    torch.manual_seed(3)
    model = Lazy()
    assert has_lazy(model)
    know_shapes(model, lambda model, batch: model(batch[0]), lambda: (torch.rand(rows, 5), None))
    assert not has_lazy(model) and model.training and type(model.first) is nn.Linear
    return model.state_dict(), torch.rand(1)


def test_lazy_weights_depend_only_on_the_seed():
    (few, after_few), (many, after_many) = made(2), made(50)
    assert few["first.weight"].shape == (8, 5)
    assert all(torch.equal(few[name], many[name]) for name in few)
    assert few["norm.num_batches_tracked"] == 0  # the norm has not seen a batch
    assert torch.equal(after_few, after_many)  # later draws do not change either
    assert not torch.equal(few["first.weight"].flatten()[:24], few["last.weight"].flatten())


def test_unused_lazy_layer_is_named(messages):
    model = nn.ModuleDict({"used": nn.LazyLinear(2), "not_used": nn.LazyLinear(2)})
    messages(problems_of(know_shapes, model, lambda model, batch: model["used"](batch), lambda: torch.rand(2, 3)))


LAZY = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(o))
    def forward(self, x):
        return self.layers(x)
class Wrong(Net):
    def forward(self, x):
        return self.layers(x) + self.typo
"""
WORDS = [
    "~model",
    "+model.o=${facts.out_features}",
    "data=iris",
    "device=cpu",
    "tracking.enabled=false",
    "train.num_epochs=1",
    "task.plots=false",
]


def test_run_with_lazy_layers_can_be_resumed(own_folder, capsys):
    (own_folder / "lazy_net.py").write_text(LAZY)
    words = [*WORDS, "+model._target_=lazy_net.Net", "train.ema_decay=0.9", "train.num_steps=1"]
    assert cli.main([*words, "train.batch_size=50", "hydra.run.dir=one"]) == 0
    assert json.loads((own_folder / "one" / "summary.json").read_text())["num_parameters"] == 67
    assert cli.main(["evaluate", "one"]) == 0
    assert cli.main([*WORDS, "+model._target_=lazy_net.Wrong", "hydra.run.dir=two"]) == 2
    assert "help: correct lazy_net.py:12" in capsys.readouterr().err


class Layers(nn.Module):
    """One layer that torch sees, and any other attributes."""

    def __init__(self, **more):
        super().__init__()
        self.seen = nn.Linear(2, 2)
        for name, value in more.items():
            setattr(self, name, value)


class Helper:
    def __init__(self, layer):
        self.layer = layer


@pytest.mark.parametrize(
    "hidden",
    [
        [nn.Linear(2, 2)],
        (nn.Linear(2, 2), nn.ReLU()),
        {"a": nn.Linear(2, 2)},
        [nn.Parameter(torch.ones(2))],
        torch.ones(2, requires_grad=True),
        Helper(nn.Linear(2, 2)),
    ],
)
def test_unregistered_weights_are_refused(hidden, messages):
    messages(problems_of(check_trains, nn.Sequential(Layers(more=hidden)), source="model"))


def test_lists_of_registered_or_fixed_modules_pass():
    model = Layers(before=Layers(), teacher=[nn.Linear(2, 2).requires_grad_(False)], masks=[torch.ones(2)])
    model.also = [model.seen, model.seen.weight]
    model.before.later = [model.seen]
    model.choices = {"chosen": model.seen, "other": nn.Linear(2, 2)}
    check_trains(model, source="model")
    check_trains(nn.LSTM(2, 2), source="model")


def test_all_unregistered_lists_are_reported(messages):
    hidden = Layers(a=[nn.Linear(2, 2), nn.Linear(2, 2)], b=[nn.Linear(2, 2)])
    messages(problems_of(check_trains, hidden, source="model"))
    messages(problems_of(check_trains, nn.ReLU(), source="model"))
