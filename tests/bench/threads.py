"""What the CPU's threads do for a step of ours, logged each 50th step: one, all, and as many as a run takes by itself."""

from __future__ import annotations

import argparse
import os
import statistics

from page import add_write, section
from table import STEPS, header, measure, orders, step_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=os.cpu_count() or 1)
    add_write(parser)
    given = parser.parse_args()
    ways = {"1": 1, f"{given.most}": given.most, "by itself": "null"}
    with section("threads.py", write=given.write):
        print(header(given.repeats, given.most))
        print("| net | threads | µs a step, median | lowest to highest | times 1 thread, median of the turns |")
        print("|---|---|---|---|---|")
        for size, steps in STEPS.items():
            flags = {"size": size, "steps": steps, "log-every": 50}
            turns = [
                {
                    way: step_us(
                        measure(
                            "ours.py", flags | {"words": f"backends.cpu.num_threads={ways[way]}"}, threads=given.most
                        )
                    )
                    for way in order
                }
                for order in orders(ways, given.repeats)
            ]
            for way in ways:
                found = [turn[way] for turn in turns]
                ratio = statistics.median(turn[way] / turn["1"] for turn in turns)
                spread = f"{min(found):,.0f} to {max(found):,.0f}"
                print(f"| {size} | {way} | {statistics.median(found):,.0f} | {spread} | {ratio:.2f} |", flush=True)


main()
