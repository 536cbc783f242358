"""Imports for the process that jobs are forked from, which would take 4 s in each job."""

from contextlib import suppress

import numpy as np
import torch._dynamo  # noqa: F401  # any optimizer imports it: 1.5 s
from matplotlib.mathtext import MathTextParser

import runner.experiment.run
import runner.sweep.jobs.run_job  # noqa: F401
from runner.device import torch_private
from runner.errors import RunnerError
from runner.experiment.plots.curves import draw_curves
from runner.experiment.provenance import environment
from runner.sweep.launchers.worker import folder_for_now

environment()  # cached
with folder_for_now() as folder:  # the first plot of a process reads fonts: 0.4 s
    steps = np.arange(1, 3)
    draw_curves({"train/loss": (steps, steps, 1.0 / steps)}, folder, title="warm")
    MathTextParser("agg").parse("$10^{-3}$")  # a logarithmic axis makes a parser: 0.03 s
with suppress(RunnerError):  # the first export imports these: 1.4 s
    # not an export: it queries the GPU, which a forked process could not use afterwards (torch 2.13)
    torch_private.export_trace  # noqa: B018
    torch_private.export_package  # noqa: B018
