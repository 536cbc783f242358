"""Imported by the process that a search's jobs are forked from: their first report takes 10 ms then, not half a second."""

import tempfile
from pathlib import Path

from runner.sweep.study import FILE, make_study, open_storage

with tempfile.TemporaryDirectory() as folder:  # the first use of a database sets up what all later ones share
    make_study(open_storage(Path(folder) / FILE, is_new=True), ["minimize"], None)
