"""Imported by the process that a search's jobs are forked from: their first report takes 10 ms then, not half a second."""

from runner.sweep.study import FILE, make_study, open_storage
from runner.sweep.worker import folder_for_now

with folder_for_now() as folder:  # the first use of a database sets up what all later ones share
    make_study(open_storage(folder / FILE, is_new=True), ["minimize"], None)
