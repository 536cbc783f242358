"""What `explain` says of planted causes of a NaN and of planted spikes, on each device: `python tests/bench/explain.py --device cpu`.

Devices that are not here are pretended (tests/support/simulated.py), with the CPU's numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from page import add_write, section

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parents[1])]
from planted_nans import CAUSES, SPIKES, Cause, Spike, explained, wrong_of_cause, wrong_of_spike  # noqa: E402
from simulated import run_simulated  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu,cuda:1,mps", help="devices, with commas")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    add_write(parser)
    given = parser.parse_args()
    devices = given.device.split(",")
    cases = [("cause", index, case) for index, case in enumerate(CAUSES)]
    cases += [("spike", index, case) for index, case in enumerate(SPIKES)]
    with section("explain.py", write=given.write):
        print("| planted | what is said | row | to try |", " | ".join(devices), "|")
        print("|---|---|---|---|" + "---|" * len(devices))
        is_right = [_row(devices, *one) for one in cases if given.only in one[2].name]
        num = sum(map(sum, is_right))
        print(f"\n{num} of {len(is_right) * len(devices)} are named with all that was to be said.")


def _row(devices: list[str], kind: str, index: int, case: Cause | Spike) -> list[bool]:
    found, wrong = [], []
    for device in devices:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run_simulated(device, explained, kind, index, cwd=Path(folder)))
        of_case = wrong_of_cause(case, found[-1]) if isinstance(case, Cause) else wrong_of_spike(case, found[-1])
        wrong.append("; ".join(of_case))
    one, rows = found[0]["operation"], [row["place"] or str(row["in_data"]) for row in found[0]["rows"][:1]]
    what = f"{one['name']} at {one['line']}, {one['phase']}" if one else f"loss {found[0]['loss']:.4g}"
    said = f"step {found[0]['step']}: {what}"
    print("|", " | ".join([case.name, said, "".join(rows), found[0]["try"], *(each or "yes" for each in wrong)]), "|")
    return [not each for each in wrong]


if __name__ == "__main__":
    main()
