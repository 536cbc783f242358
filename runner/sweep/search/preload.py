"""Imports for the process that a search's jobs are forked from: their first report takes 10 ms, not half a second."""

from runner.sweep.launchers.worker import folder_for_now
from runner.sweep.search.study import FILE, make_study, open_storage

with folder_for_now() as folder:  # the first use of a database sets up what all later ones share
    make_study(open_storage(folder / FILE, is_new=True), ["minimize"], None)
