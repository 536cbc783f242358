"""The private names of torch: all of them in one place, and there in the torch that is installed."""

import re

import pytest

from runner.device import torch_private
from runner.errors import RunnerError
from runner.version import HERE

#: torch._dynamo alone is named where it is imported early or looked for: in texts, comments and imports
PRIVATE = re.compile(
    r"\b(?:torch|nn|autograd|_C)(?:\.\w+)*\._(?!_|dynamo\b)[A-Za-z]\w*|from torch[\w.]*\._[\w.]* import"
)
ALLOWED = {
    "device/torch_private.py": "the one place",
    "plan/simulator/torch_parts.py": "what is replaced in torch while a device is simulated",
}


@pytest.mark.parametrize("name", torch_private.NAMES)
def test_torch_has_it(name):
    assert getattr(torch_private, name) is not None


def test_what_a_release_has_moved_is_told_by_its_name(monkeypatch):
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
