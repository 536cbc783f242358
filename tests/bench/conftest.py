"""The scripts of this folder, which have names that others could have, too."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of tests/bench; all are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]
