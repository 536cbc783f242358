"""The name of a device that this machine lacks goes in; torch behaves as if it were there, until the process ends."""

from runner.plan.simulator.device import simulated_device
from runner.plan.simulator.tensor import SimulatedTensor, pretence

__all__ = ["SimulatedTensor", "pretence", "simulated_device"]
