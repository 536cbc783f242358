"""Imported by the process that jobs are forked from: what takes each of them seconds is there already, 4 s once."""

import numpy as np
import torch._dynamo  # any optimizer imports it: 1.5 s
from matplotlib.mathtext import MathTextParser

import runner.experiment.run
import runner.sweep.jobs.run_job  # noqa: F401
from runner.experiment.plots.curves import draw_curves
from runner.experiment.provenance import environment
from runner.sweep.launchers.worker import folder_for_now
from runner.tracking.model_graph import write_graph

environment()  # kept
with folder_for_now() as folder:  # the first picture of a process reads its fonts: 0.4 s
    steps = np.arange(1, 3)
    draw_curves({"train/loss": (steps, steps, 1.0 / steps)}, folder, title="warm")
    MathTextParser("agg").parse("$10^{-3}$")  # a logarithmic axis makes a parser: 0.03 s
    # the first export imports more: 0.25 s. It asks whether CUDA is there, which begins it, and what is forked of a process
    # that has begun it can use no GPU: each sweep failed on an H100 (torch 2.11)
    torch.cuda.is_available, is_available = lambda: False, torch.cuda.is_available
    write_graph(folder, torch.nn.Linear(1, 1), torch.rand(2, 1), requirements=[])
    torch.cuda.is_available = is_available
