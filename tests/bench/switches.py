"""What each switch of ours costs a step of the small MLP, all others off: `python tests/bench/switches.py`."""

from __future__ import annotations

import argparse
import statistics

from page import add_write, section
from table import Result, header, measure, orders, step_us

TRACKED, UNTRACKED = {"log-every": 1}, {"log-every": 0}
OFF = "placement.guard=off train.checkpoint_every_seconds=null"
ALL_OFF = "all off"
#: name in the table, flags of ours.py, words of our command line beside those that turn all off
SWITCHES: dict[str, tuple[dict[str, object], str]] = {
    ALL_OFF: (UNTRACKED, ""),
    "all off, again": (UNTRACKED, ""),  # what differs from the first is the machine's noise
    "tracking": (TRACKED, ""),
    "tracking, its publisher stands still": (TRACKED | {"variant": "paused"}, ""),
    "all off, another process computes": (UNTRACKED | {"variant": "busy"}, ""),
    "guard, first_step": (UNTRACKED, "placement.guard=first_step"),
    "progress bar, in a terminal": (UNTRACKED | {"variant": "terminal"}, ""),
    "a checkpoint each second": (UNTRACKED, "train.checkpoint_every_seconds=1"),
    "metrics.every=10": (UNTRACKED, "metrics.every=10"),
    "metrics.pull_every=10": (UNTRACKED, "metrics.pull_every=10"),
    "metrics.pull_every=1000": (UNTRACKED, "metrics.pull_every=1000"),
    "tracking, metrics.every=10": (TRACKED, "metrics.every=10"),
    "tracking, metrics.pull_every=10": (TRACKED, "metrics.pull_every=10"),
    "tracking, metrics.pull_every=1000": (TRACKED, "metrics.pull_every=1000"),
}


def run(name: str, *, steps: int, threads: int) -> Result:
    flags, words = SWITCHES[name]
    return measure("ours.py", {"steps": steps, **flags, "words": f"{OFF} {words}"}, threads=threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=9380)
    parser.add_argument("--threads", type=int, default=1)
    add_write(parser)
    given = parser.parse_args()
    turns = [
        {name: run(name, steps=given.steps, threads=given.threads) for name in order}
        for order in orders(SWITCHES, given.repeats)
    ]
    with section("switches.py", write=given.write):
        print(header(given.repeats, given.threads))
        print(
            "| on | µs a step, median | lowest to highest | times all off, medians | times all off, lowest | first steps, s |"
        )
        print("|---|---|---|---|---|---|")
        off = [step_us(turn[ALL_OFF]) for turn in turns]
        for name in SWITCHES:
            steps = [step_us(turn[name]) for turn in turns]
            ratio, of_lowest = statistics.median(steps) / statistics.median(off), min(steps) / min(off)
            first = statistics.median(turn[name]["seconds"] - (turn[name]["seconds_steady"] or 0) for turn in turns)
            spread = f"{min(steps):,.0f} to {max(steps):,.0f}"
            print(
                f"| {name} | {statistics.median(steps):,.0f} | {spread} | {ratio:.2f} | {of_lowest:.2f} | {first:.2f} |"
            )


main()
