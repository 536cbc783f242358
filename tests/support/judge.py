"""Plans of the judged models on one device, in a process of its own (tests/support/simulated.py)."""

from __future__ import annotations

import warnings
from dataclasses import asdict

from judged import SOUND, WRONG

from runner.config.compose import composed_with, composer
from runner.inspection.costs import Speeds
from runner.plan.simulator import simulated_device
from runner.plan.worker import look

REQUEST = {
    "speeds": asdict(Speeds()),
    "usable_bytes": None,
    "precisions": [],
    "seconds": 0,
    "is_brief": False,
    "processes": {},
}


def judge(_, device_name):
    warnings.simplefilter("ignore")
    found = {}
    with simulated_device(device_name, has_numbers=False) as device:
        whole = composed_with(composer([]), ["model=judged", "task=judged", "data=judged", "data.num_workers=0"])
        for case in (*WRONG, *SOUND):
            cfg = whole.copy()
            cfg.model.name = cfg.task.name = cfg.data.case = case.name
            found[case.name] = look(cfg, device, REQUEST)
    return found
