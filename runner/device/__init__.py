"""A policy and a description of the machine go in; one device and the reason for it come out, or why there is none."""

from runner.device.choose import Choice, choose, parse, resolve
from runner.device.hardware import Driver, Gpu, Hardware, diagnose, probe
from runner.device.precision import check_precision, precisions

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
