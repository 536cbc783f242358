"""The source line that is reported for an operation."""

import importlib.util
import json
import sys
import sysconfig

import hydra
import pytest

from runner.device import layers
from runner.inspection import call_site


def test_pythons_own_modules_are_nobodys_where_its_paths_lead_over_a_link(monkeypatch, tmp_path):
    """With Homebrew, sysconfig says .../opt/python, and the modules say .../Cellar/python."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    spec = importlib.util.spec_from_file_location("call_site_anew", call_site.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    assert not anew.is_own(json.__file__)
    assert anew.is_own(str(tmp_path.parent / "my_models.py"))


@pytest.mark.parametrize("module", [hydra, layers])
def test_frames_that_are_nobodys(module):
    """Hydra's frames are below each run of the command line, and a layer's frames within the model's.

    A finding in torch's code used to be reported with one of their lines.
    """
    code = compile("def called(): return list(frames())", module.__file__, "exec")
    names = {"frames": call_site.frames}
    exec(code, names)
    stack = names["called"]()
    assert call_site.user_frame(stack) is sys._getframe()
    assert call_site.user_frame(stack[:1]) is None
