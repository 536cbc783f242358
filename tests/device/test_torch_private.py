"""The private names of torch: all are in one place, and exist in the installed torch."""

import re
import subprocess
import sys

import pytest

from runner.device import torch_private
from runner.errors import RunnerError
from runner.version import HERE

#: except torch._dynamo in imports, checks, texts and comments
PRIVATE = re.compile(
    r"\b(?:torch|nn|autograd|_C)(?:\.\w+)*\._(?!_|dynamo\b)[A-Za-z]\w*|from torch[\w.]*\._[\w.]* import"
)
ALLOWED = {
    "device/torch_private.py": "the one place",
    "tools/plan/simulator/torch_parts.py": "what is replaced in torch while a device is simulated",
}


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_torch_has_it(name):
    assert getattr(torch_private, name) is not None


def test_moved_private_torch_name_is_reported(monkeypatch):
    monkeypatch.setitem(torch_private.NAMES, "gone", ("torch._C._no_such_name", "a test"))
    with pytest.raises(RunnerError, match=r"no torch\._C\._no_such_name, which is needed for: a test"):
        _ = torch_private.gone
    with pytest.raises(AttributeError):
        _ = torch_private.never_heard_of


def test_no_other_module_names_one():
    found = {}
    for file in HERE.rglob("*.py"):
        lines = [line.partition("  #")[0] for line in file.read_text().splitlines() if not line.strip().startswith("#")]
        hits = [hit for line in lines for hit in PRIVATE.findall(line)]
        if hits and file.relative_to(HERE).as_posix() not in ALLOWED:
            found[file.relative_to(HERE).as_posix()] = hits
    assert not found


#: steps with a hook and changed settings, first without torch._dynamo, then with it
OPTIMIZERS = """
import sys, torch
from runner.device.torch_private import optimizers_without_dynamo, step_without_dynamo

def steps(make, take):
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(4, 3), []
    optimizer = make(model.parameters())
    optimizer.register_step_post_hook(lambda *given: seen.append(torch.is_grad_enabled()))
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        take(optimizer)
        optimizer.zero_grad()
    other = make(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    return [each.detach().clone() for each in model.parameters()], seen

o = torch.optim
kinds = [o.Adam, o.AdamW, o.SGD, o.RMSprop, o.Adagrad, o.NAdam, lambda given: o.Adam(given, fused=True)]
with optimizers_without_dynamo():
    found = [steps(make, step_without_dynamo) for make in kinds]
assert "torch._dynamo" not in sys.modules
expected = [steps(make, lambda optimizer: optimizer.step()) for make in kinds]
assert "torch._dynamo" in sys.modules
for (weights, hooks), (others, other_hooks) in zip(found, expected, strict=True):
    assert hooks == other_hooks == [True] * 3
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
"""


def test_optimizers_without_dynamo_take_the_same_steps():
    done = subprocess.run([sys.executable, "-c", OPTIMIZERS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
