"""Everything about devices: what the machine has, which device a run gets and why, and what each kind can do.

Names most used are exported here: choose(), resolve() and parse() for `device=`, probe() for the machine.
"""

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
