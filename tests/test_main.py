"""The start of `python -m runner` and of the script `runner`."""

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from runner import __main__
from runner.version import PACKAGES


class Importing(ModuleType):
    """A package whose import is interrupted by Ctrl-C."""

    def __getattr__(self, name):
        if name == "main":
            raise KeyboardInterrupt
        raise AttributeError(name)


def test_early_ctrl_c_prints_no_traceback(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "runner.cli", Importing("runner.cli"))
    monkeypatch.setattr(sys, "argv", ["runner", "--version"])
    assert __main__.main() == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("words", [[], ["devices", "--json"]])
def test_uninstalled_checkout_names_missing_package(words, own_folder):
    """Like a Python without packages: -S ignores them."""
    command = [sys.executable, "-S", "-m", "runner", *words]
    said = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(PACKAGES)}, capture_output=True, text=True)
    assert said.returncode == 2 and "Traceback" not in said.stderr
    (message, source, advice) = said.stderr.splitlines()
    assert message == "error: this Python has no hydra, which the runner imports"
    assert source == "  --> python -m runner"
    assert advice == f"help: run `{sys.executable} -m pip install -e {PACKAGES}`"
    if "--json" in words:
        assert f"help: {json.loads(said.stdout)['faults'][0]['help']}" == advice
    else:
        assert not said.stdout


def test_missing_other_module_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "runner.cli", None)
    with pytest.raises(ModuleNotFoundError, match="runner"):
        __main__.main()
