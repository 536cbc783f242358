"""How `python -m runner` and the script `runner` begin."""

import sys
from types import ModuleType

from runner import __main__


class Importing(ModuleType):
    """A package that somebody interrupts while it is imported."""

    def __getattr__(self, name):
        if name == "main":
            raise KeyboardInterrupt
        raise AttributeError(name)


def test_ctrl_c_in_the_first_moments_is_no_traceback(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "runner.cli", Importing("runner.cli"))
    monkeypatch.setattr(sys, "argv", ["runner", "--version"])
    assert __main__.main() == 130
    assert capfd.readouterr() == ("", "")
