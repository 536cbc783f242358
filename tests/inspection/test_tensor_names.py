"""The name of a tensor, by the place where a user stores it."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import nn

from runner.inspection.tensor_names import TensorNames, in_frame

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Held:
    table: torch.Tensor


class Thing:
    def __init__(self):
        self.inside = torch.ones(3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.hidden = {"a": [nn.Linear(2, 3)]}
        self.scale = torch.ones(2)
        self.many = [torch.ones(1), {"k": torch.ones(2)}]
        self.held, self.thing, self.alone = Held(torch.ones(4)), Thing(), (nn.Linear(1, 1),)
        self.register_buffer("mask", torch.ones(2))


@pytest.fixture
def net():
    return Net()


@pytest.mark.parametrize(
    ("of", "path", "kind"),
    [
        (lambda net: net.layers[0].weight, "model.layers.0.weight", "parameter"),
        (lambda net: net.layers[1].running_var, "model.layers.1.running_var", "buffer"),
        (lambda net: net.mask, "model.mask", "buffer"),
        (lambda net: net.scale, "model.scale", "attribute"),
        (lambda net: net.many[1]["k"], "model.many[1]['k']", "attribute"),
        (lambda net: net.held.table, "model.held.table", "attribute"),
        (lambda net: net.thing.inside, "model.thing.inside", "attribute"),
        (lambda net: net.hidden["a"][0].bias, "model.hidden['a'][0].bias", "list"),
        (lambda net: net.alone[0].weight, "model.alone[0].weight", "list"),
        (lambda net: net.layers[0].weight[0, :1], "model.layers.0.weight", "parameter"),  # a view of it
    ],
)
def test_what_a_model_holds(net, of, path, kind):
    names = TensorNames()
    names.model(net)
    found = names.get(of(net))
    assert (found.path, found.kind) == (path, kind)


def test_what_a_batch_holds():
    x, y, z, w = (torch.ones(1) for _ in range(4))
    names = TensorNames()
    names.batch({"x": x, "pair": Pair(y, [z]), "thing": Thing(), "held": Held(w)})
    paths = ["batch['x']", "batch['pair'].first", "batch['pair'].second[0]", "batch['held'].table"]
    assert [names.get(tensor).path for tensor in (x, y, z, w)] == paths


def test_an_optimizers_state_is_named_by_its_parameter(net):
    optimizer = torch.optim.Adam(net.parameters())
    net.layers(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    names = TensorNames()
    names.model(net)
    names.optimizer(optimizer)
    state = optimizer.state[net.layers[0].weight]["exp_avg"]
    assert names.get(state).path == "optimizer.state[model.layers.0.weight]['exp_avg']"


def test_update_names_replaced_tensors(net):
    names = TensorNames()
    names.model(net)
    net.mask = torch.zeros(2)
    assert names.get(net.mask) is None
    net.itself = [net]  # a cycle ends
    names.update()
    assert names.get(net.mask).path == "model.mask"
    assert names.get(torch.ones(2)) is None


OUTSIDE = torch.ones(7)


def test_variables_of_a_running_function():
    around = torch.ones(5)

    def inner():
        import sys

        own, frame = [torch.ones(6)], sys._getframe()
        return [in_frame(frame, tensor) for tensor in (around[:2], own[0], OUTSIDE, torch.ones(1))]

    expected = [("around", "closure"), ("own[0]", "local"), ("OUTSIDE", "global"), None]
    assert [name and (name.path, name.kind) for name in inner()] == expected
