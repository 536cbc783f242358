"""Import the scripts of this folder, whose names other modules could have, too."""

import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent
FOLDERS = (BENCH, BENCH / "peers", BENCH / "gpu")


@pytest.fixture
def bench(monkeypatch):
    """Import a module of tests/bench; all are removed from sys.modules afterwards."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]
