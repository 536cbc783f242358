"""What many logged points cost our runs, one table: `python tests/bench/points.py`. A million take about 4 minutes a turn.

Two points a step, loss and accuracy. They are sent by a process of its own: its CPU seconds are what a point costs beside
the training, its start and a new store included (some 5 s, which a thousand points can't hide).
"""

from __future__ import annotations

import argparse
import statistics

from page import add_write, section
from table import header, measure, step_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    counts = lambda text: [int(float(part)) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--points", type=counts, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    add_write(parser)
    given = parser.parse_args()
    turns = [
        {count: measure("ours.py", {"steps": count // 2}, threads=given.threads) for count in given.points}
        for _ in range(given.repeats)
    ]
    with section("points.py", write=given.write):
        print(header(given.repeats, given.threads))
        print(
            "| points | stored | µs a step | lowest to highest | µs a point beside | last step to end, s | peak memory, MiB |"
        )
        print("|---|---|---|---|---|---|---|")
        for count in given.points:
            runs = [turn[count] for turn in turns]
            steps = [step_us(run) for run in runs]
            beside = statistics.median(run["publisher_cpu_seconds"] / run["points"] * 1e6 for run in runs)
            after = statistics.median(run["seconds_after_last_step"] for run in runs)
            memory = statistics.median(run["peak_memory_bytes"] / 2**20 for run in runs)
            stored = min(run["points"] for run in runs)
            spread = f"{min(steps):,.0f} to {max(steps):,.0f}"
            print(
                f"| {count:,} | {stored:,} | {statistics.median(steps):,.0f} | {spread} | {beside:,.0f} | {after:.1f} "
                f"| {memory:,.0f} |"
            )


main()
