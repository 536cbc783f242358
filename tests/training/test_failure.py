"""What a person's model raised is told in their words and lines, and where it can be, with a mend."""

import pytest
import torch
from torch import nn

from runner.config.instantiate import build
from runner.errors import RunnerError
from runner.models.with_preprocessing import Prepared
from runner.training.failure import words_of


def raised(call):
    with pytest.raises(Exception) as told:
        call()
    return words_of(told.value)


def test_a_layer_of_torchs_is_named_and_no_line_of_ours():
    model = Prepared(nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2)))
    words = raised(lambda: model(torch.rand(5, 2)))
    assert "(5x3 and 4x2) (test_failure.py:" in words and words.endswith(" in model.1)")
    assert "prepared.py" not in words


def test_a_vocabulary_that_is_too_small():
    words = raised(lambda: nn.Embedding(128, 4)(torch.tensor([3, 256])))
    assert "from 3 to 256, and this nn.Embedding has 128 rows; write: a vocabulary of 257 or more" in words


def test_an_operation_that_a_mac_lacks():
    def lacks():
        raise NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device. If ...")

    assert "write: export PYTORCH_ENABLE_MPS_FALLBACK=1 before the command" in raised(lacks)


def test_a_loss_without_a_way_back():
    layer = nn.Linear(2, 2)
    assert "write: torch operations" in raised(lambda: layer(torch.ones(1, 2)).detach().sum().backward())
    assert "would train nothing" in raised(lambda: layer(torch.ones(1, 2)).numpy())


NETS = """
from torch import nn
class NoSuper(nn.Module):
    def __init__(self, i):
        self.layer = nn.Linear(i, 2)
class Typo(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.layer = nn.Linear(j, 2)
class Argument(nn.Module):
    def __init__(self, i):
        raise ValueError("i is even")
class Exits(nn.Module):
    def __init__(self, i):
        raise SystemExit
"""


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("NoSuper", r"super\(\).__init__\(\) before the first line that sets something \(failing_nets.py:5\)"),
        ("Typo", "the same once failing_nets.py:9 is mended"),
        ("Exits", "the same once failing_nets.py:15 is mended"),
        ("Argument", "other values for model.i"),
    ],
)
def test_a_constructor_that_fails(own_folder, name, write):
    (own_folder / "failing_nets.py").write_text(NETS)
    node = {"_target_": f"failing_nets.{name}", "i": 3}
    for around in (node, {"_target_": "runner.models.Prepared", "model": node}):
        with pytest.raises(RunnerError, match=f"(?s)asked: model._target_=failing_nets.{name}.*write: {write}"):
            build(around, key="model")
