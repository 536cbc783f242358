"""Plans of the judged models on one device, in one process: python tests/plan/judge.py DEVICE ANSWER.json"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

from judged import SOUND, WRONG

from runner.cli import composed_with
from runner.compose import composer, hydra_session
from runner.plan.child import look
from runner.simulated import simulated_device
from runner.watch.costs import Speeds

REQUEST = {"speeds": asdict(Speeds()), "usable_bytes": None, "precisions": [], "seconds": 0, "processes": {}}


def main():
    device_name, answer = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = {}
    with hydra_session(["runner"]), simulated_device(device_name, has_numbers=False) as device:
        for case in (*WRONG, *SOUND):
            words = [f"model.name={case.name!r}", f"task.name={case.name!r}", f"data.case={case.name!r}"]
            cfg = composed_with(
                composer([]), ["model=judged", "task=judged", "data=judged", *words, "data.num_workers=0"]
            )
            found[case.name] = look(cfg, device, REQUEST)
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
