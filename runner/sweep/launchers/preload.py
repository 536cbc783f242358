"""Imported by the process that jobs are forked from: what takes each of them seconds is there already, 4 s once."""

import numpy as np
import torch._dynamo  # noqa: F401  any optimizer imports it: 1.5 s

import runner.experiment.run
import runner.sweep.jobs.run_job  # noqa: F401
from runner.experiment.plots.curves import draw_curves
from runner.experiment.provenance import environment
from runner.sweep.launchers.worker import folder_for_now

environment()  # kept
with folder_for_now() as folder:  # the first picture of a process reads its fonts: 0.4 s
    steps = np.arange(1, 3)
    draw_curves({"train/loss": (steps, steps, 1.0 / steps)}, folder, title="warm")
