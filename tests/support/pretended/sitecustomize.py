"""On the path of a process that Python starts: jobs of a sweep then find the device that PRETENDED_DEVICE names."""

import os
import sys

if "runner.sweep.launchers.worker" in sys.orig_argv and "PRETENDED_DEVICE" in os.environ:
    from runner.plan.simulator import simulated_device

    kept = simulated_device(os.environ["PRETENDED_DEVICE"])  # for the life of the process, and of those it forks
    kept.__enter__()
