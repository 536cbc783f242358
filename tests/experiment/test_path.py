"""The path from Enter to loss.backward(), as listed in runner/README.md."""

import ast
import os
import re
import sys
from pathlib import Path

import runner
from runner.__main__ import main

PACKAGE = Path(runner.__file__).parent
PAGE = (PACKAGE / "README.md").read_text().partition("## From the command line to backward()")[2].partition("\n## ")[0]
LISTED = re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)`", PAGE, re.MULTILINE)
WORDS = ["device=cpu", "data=synthetic", "data.num_rows=40", "model=mlp", "train.num_steps=2", "tracking.enabled=false"]


def lines_of(file, name):
    """Return the lines of a function; for one inside another function, only its lines."""
    node = ast.parse((PACKAGE / file).read_text())
    found = set()
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
        if isinstance(node, ast.FunctionDef):
            found = found or {(file, line) for line in range(node.lineno, node.end_lineno + 1)}
    return found


def test_path_is_short_enough_to_read():
    lines = set().union(*(lines_of(*each) for each in LISTED))
    assert len(LISTED) >= 10 and len({file for file, _ in LISTED}) <= 12 and len(lines) <= 1000


def test_run_calls_listed_functions_in_order(own_folder, monkeypatch):
    called = {}

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            file = os.path.relpath(frame.f_code.co_filename, PACKAGE)
            called.setdefault((file, frame.f_code.co_qualname.replace("<locals>.", "")))

    monkeypatch.setattr(sys, "argv", ["runner", *WORDS])
    sys.setprofile(note)
    try:
        assert main() == 0
    finally:
        sys.setprofile(None)
    assert [each for each in called if each in LISTED] == LISTED
