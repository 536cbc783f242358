"""What `explain` says of planted causes of a NaN and of planted spikes, on a device each: `python tests/bench/explain.py --device cpu`.

Devices that are not here are pretended (tests/support/simulated.py), with the CPU's numbers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from page import add_write, section

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parents[1])]
from planted_nans import CAUSES, SPIKES, Cause, explained, wrong_of_cause, wrong_of_spike  # noqa: E402
from simulated import run_simulated  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu,cuda:1,mps", help="devices, with commas")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    add_write(parser)
    given = parser.parse_args()
    os.environ["RUNNER_CACHE"] = tempfile.mkdtemp(prefix="explain-cache-")
    with section("explain.py", write=given.write):
        print(
            "| planted | device | step | said | line | row | try | seconds | right |\n|---|---|---|---|---|---|---|---|---|"
        )
        num_right, num = 0, 0
        for device in given.device.split(","):
            for kind, cases in (("cause", CAUSES), ("spike", SPIKES)):
                for index, case in enumerate(cases):
                    if given.only not in case.name:
                        continue
                    wrong = _row(device, kind, index, case)
                    num, num_right = num + 1, num_right + (not wrong)
        print(f"\n{num_right} of {num} are named with all that was to be said.")


def _row(device: str, kind: str, index: int, case) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_simulated(device, explained, kind, index, cwd=Path(folder))
        except AssertionError as error:
            print("|", case.name, "|", device, "| | | | | | |", " ".join(str(error).split())[-600:], "|")
            return ["it failed"]
    wrong = wrong_of_cause(case, found) if isinstance(case, Cause) else wrong_of_spike(case, found)
    one = found["operation"] or {"name": f"loss {found['loss']:.4g}", "phase": "a spike", "line": ""}
    rows = ", ".join(str(row["in_data"]) for row in found["rows"][:1])
    cells = [case.name, device, found["step"], f"{one['name']}, {one['phase']}", one["line"], rows, found["try"]]
    print(
        "|",
        " | ".join(map(str, cells)),
        "|",
        f"{found['seconds']:.1f} |",
        "yes" if not wrong else "; ".join(wrong),
        "|",
    )
    return wrong


if __name__ == "__main__":
    main()
