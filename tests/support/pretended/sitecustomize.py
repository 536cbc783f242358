"""Simulate the device named by PRETENDED_DEVICE: Python imports this file at its start, e.g., in a sweep's jobs."""

import os
import sys

if "runner.sweep.launchers.worker" in sys.orig_argv and "PRETENDED_DEVICE" in os.environ:
    from runner.tools.plan.simulator import simulated_device

    kept = simulated_device(os.environ["PRETENDED_DEVICE"])  # for the whole process, and its forks
    kept.__enter__()
