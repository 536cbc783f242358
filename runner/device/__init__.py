"""Describes the machine, chooses a run's device and says why, and has what each kind of device can do."""

from runner.device.choose import Choice, choose, parse, resolve
from runner.device.hardware import Driver, Gpu, Hardware, diagnose, probe
from runner.device.unavailable import check_precision, precisions

__all__ = [
    "Choice",
    "Driver",
    "Gpu",
    "Hardware",
    "check_precision",
    "choose",
    "diagnose",
    "parse",
    "precisions",
    "probe",
    "resolve",
]
