"""Make torch behave as if a missing device were available, until the process ends. For `plan` and tests."""

from runner.tools.plan.simulator.device import simulated_device
from runner.tools.plan.simulator.tensor import SimulatedTensor, pretence

__all__ = ["SimulatedTensor", "pretence", "simulated_device"]
