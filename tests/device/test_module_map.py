"""Modules on devices of their own. torch's meta device stands for the second one here; tests/device/test_other_accelerator.py
trains on real ones."""

import pytest
import torch
from refused import faults_of
from torch import nn

from runner.device.module_map import spread
from runner.errors import RunnerError

CPU, META = torch.device("cpu"), torch.device("meta")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(12))
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x)
        return {"answer": self.head(x)}


def lies(model):
    return {name for name, value in model.state_dict().items() if value.device == META}


@pytest.mark.parametrize(
    ("devices", "elsewhere"),
    [
        ({"head": "meta"}, {"head.weight", "head.bias"}),
        ({"encoder": "meta", "encoder.1": "cpu"}, {f"encoder.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}),
        ({"blocks.1?": "meta", "blocks.11": "cpu"}, {"blocks.10.weight", "blocks.10.bias"}),
        ({"*": "meta", "head": "cpu"}, {name for name in Net().state_dict() if not name.startswith("head")}),
    ],
)  # fmt: skip
def test_the_longest_path_decides(devices, elsewhere):
    model = Net()
    sizes = spread(model, CPU, devices)
    assert lies(model) == elsewhere
    assert sizes[META] == sum(v.nbytes for k, v in model.state_dict().items() if k in elsewhere)
    assert sum(sizes.values()) == sum(value.nbytes for value in model.state_dict().values())


def test_what_passes_a_border_is_copied_and_no_more():
    """Three blocks of a list on the second device: once there, and once back."""
    model, seen = Net(), []
    spread(model, CPU, {"blocks.2": "meta", "blocks.3": "meta", "blocks.4": "meta"})
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output.device))
    for block in model.blocks[2:5]:
        block.register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
        block.register_forward_hook(lambda module, args, output: seen.append(output.device))
    model.blocks[5].register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
    with pytest.raises(NotImplementedError, match="meta"):  # of what has no numbers there is no copy
        model(torch.ones(5, 2))
    assert seen == [CPU, *[META] * 6]


def test_the_path_is_the_persons_where_layers_stand_before_the_model():
    whole = nn.Module()
    whole.before, whole.model = nn.Linear(2, 2), Net()
    spread(whole, CPU, {"head": "meta"}, prefix="model.")
    assert lies(whole) == {"model.head.weight", "model.head.bias"}


def test_mistakes_are_told_all_at_once():
    first, second = faults_of(spread, Net(), CPU, {"haed": "meta", "block.*": "meta"})
    assert (first.asked, first.fix) == ("placement.map={haed: meta}", "head")
    assert "it has encoder, blocks, head" in second.problem
    tied = Net()
    tied.head.weight = tied.blocks[0].weight
    with pytest.raises(RunnerError, match=r"blocks\.0\.weight and head\.weight are one tensor, on cpu and meta"):
        spread(tied, CPU, {"head": "meta"})
    assert not lies(tied), "nothing was moved"
