"""Exceptions from a user's model are reported in the user's terms and lines, with a fix if there is one."""

import errno

import pytest
import torch
from torch import nn

from runner import cli
from runner.config.instantiate import build
from runner.errors import RunnerError
from runner.models.preprocessing import Prepared
from runner.training.result import words_of


def raised(call):
    with pytest.raises(Exception) as told:
        call()
    return words_of(told.value)


def test_error_names_torch_layer_without_runner_lines():
    model = Prepared(nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2)))
    words = raised(lambda: model(torch.rand(5, 2)))
    assert "(5x3 and 4x2) (test_failure.py:" in words and words.endswith(" in model.1)")
    assert "prepared.py" not in words


def test_a_vocabulary_that_is_too_small():
    words = raised(lambda: nn.Embedding(128, 4)(torch.tensor([3, 256])))
    assert "help: use a larger `vocab_size`" in words


def test_an_operation_that_a_mac_lacks():
    def lacks():
        raise NotImplementedError("The operator 'aten::x' is not currently implemented for the MPS device. If ...")

    assert "help: run `export PYTORCH_ENABLE_MPS_FALLBACK=1` before the command" in raised(lacks)


def test_too_many_open_files_name_the_limit():
    def opens():
        raise OSError(errno.EMFILE, "Too many open files")

    assert "help: run `ulimit -n 4096` before the command, or use `data.num_workers=0`" in raised(opens)


def test_a_loss_without_a_way_back():
    layer = nn.Linear(2, 2)
    assert "help: use torch operations" in raised(lambda: layer(torch.ones(1, 2)).detach().sum().backward())
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
class Moves(nn.Module):
    def __init__(self, i):
        super().__init__()
        self.layer = nn.Linear(i, 2).to("cuda")
"""


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("NoSuper", r"call `super\(\).__init__\(\)` before the first line that sets something \(failing_nets.py:5\)"),
        ("Typo", "correct failing_nets.py:9"),
        ("Exits", "correct failing_nets.py:15"),
        ("Argument", "set `model.i` to other values"),
        ("Moves", r"remove `.cuda\(\)` and `.to\(...\)`: `device=` places the model and each batch"),
    ],
)
def test_a_constructor_that_fails(own_folder, name, write):
    (own_folder / "failing_nets.py").write_text(NETS)
    node = {"_target_": f"failing_nets.{name}", "i": 3}
    for around in (node, {"_target_": "runner.models.Prepared", "model": node}):
        with pytest.raises(RunnerError, match=f"(?s)--> model._target_=failing_nets.{name}.*help: .*{write}"):
            build(around, key="model")


FORWARDS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, outputs)
    def forward(self, x):
        return self.last(self.first(x))
class InPlace(Net):
    def forward(self, x):
        x = self.first(x).exp()
        x += 1
        return self.last(x)
class Slice(Net):
    def forward(self, x):
        x = self.first(x).relu()
        gate = x.sigmoid()
        y = gate * x
        gate[:, 0] = 0
        return self.last(y)
class Moves(Net):
    def forward(self, x):
        return self.last(self.first(x.cuda()))
class Numbers(Net):
    def forward(self, x):
        return self.last(self.first(x.long()))
class NoModule:
    def __init__(self, inputs, outputs): ...
def gradients(model, batch):
    x = batch[0].requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return {"loss": found.square().mean()}

def derivatives(model, batch):
    assert torch.is_grad_enabled()
    return gradients(model, batch)

derivatives.needs_grad = True
"""
NET = ["data=iris", "device=cpu", "tracking.enabled=false", "~model", "+model.inputs=4", "+model.outputs=3"]


@pytest.mark.parametrize(
    ("words", "exit_code", "said"),
    [
        ("+model._target_=forwards.InPlace", 1, "forwards.py:13 changes a tensor in place (add_)"),
        ("+model._target_=forwards.Slice", 1, "forwards.py:20 changes a tensor in place (fill_)"),
        ("+model._target_=forwards.Moves", 1, "help: remove `.cuda()` and `.to(...)`: `device=` places the model"),
        ("+model._target_=forwards.Numbers", 1, "its input has integers; help: use `x.float()` before it"),
        ("+model._target_=forwards.NoModule", 2, "makes a `NoModule`, which is not a `torch.nn.Module`"),
        (
            "+model._target_=forwards.Net task._target_=forwards.gradients",
            2,
            "help: use `task=own task.function._target_=forwards.gradients`",
        ),
        (
            "+model._target_=forwards.Net task=own task.function._target_=forwards.gradients",
            1,
            "this task needs gradients; help: set `needs_grad = True`",
        ),
        ("+model._target_=forwards.Net task=own task.function._target_=forwards.derivatives", 0, "finished"),
    ],
)
def test_run_of_wrong_code_names_the_fix(own_folder, capsys, words, exit_code, said):
    (own_folder / "forwards.py").write_text(FORWARDS)
    assert cli.main([*NET, *words.split(), "train.num_steps=2", "hydra.run.dir=run"]) == exit_code
    found = capsys.readouterr()
    assert said in found.out + found.err
