"""Runs the peers side by side, in turns, and prints a table for each size: `python tests/bench/table.py --repeats 5`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness import (
    PACKAGES,
    PEERS,
    ROOT,
    header,
    made_by,
    median_ratio,
    orders,
    parser,
    replace,
    section,
    spread,
    timed,
)

README = ROOT / "README.md"
STEPS = {"mlp": 2345, "cnn": 400, "transformer": 200}


@dataclass(frozen=True)
class Peer:
    name: str
    file: str
    variant: str = ""
    package: str = "torch"  # a required package
    only_logged: int | None = None  # None: measured with all requested intervals
    only_on: str = ""  # a kind of device; "": all
    is_slow: bool = False  # takes at most --most-steps if every step is logged


REFERENCE = Peer("hand-written limit", "limit.py")
BOTH = "compiled+graph"
LOOPS = {
    "limit": REFERENCE,
    "limit_compiled": Peer("hand-written limit, compiled", "limit.py", "compiled", only_logged=0),
    "limit_graph": Peer("hand-written limit, CUDA graphs", "limit.py", "graph", only_logged=0, only_on="cuda"),
    "limit_compiled_graph": Peer("hand-written limit, compiled and CUDA graphs", "limit.py", BOTH, only_logged=0, only_on="cuda"),
    "ours": Peer("runner", "ours.py"),
    "ours_all": Peer("runner, tracking.points=all", "ours.py", "all"),
    "ours_compiled": Peer("runner, train.compile=true", "ours.py", "compiled", only_logged=1),
    "ours_graph": Peer("runner, train.cuda_graph=true", "ours.py", "graph", only_logged=1, only_on="cuda"),
    "ours_compiled_graph": Peer("runner, train.compile=true train.cuda_graph=true", "ours.py", BOTH, only_logged=1, only_on="cuda"),
    "textbook": Peer("textbook: DataLoader, item(), log_metrics", "textbook.py", is_slow=True),
    "lightning": Peer("Lightning", "with_lightning.py", package="lightning", is_slow=True),
    "transformers": Peer("Hugging Face Trainer", "with_transformers.py", package="accelerate", is_slow=True),
}  # fmt: skip
#: the loops of README's table, and their logging intervals in steps
SHORT, SHORT_EVERY = ("limit", "ours", "ours_all", "textbook", "lightning", "transformers"), (1, 50)

NOTES = """A step is without the first 50 (of ours, 100), told apart as the first steps. Memory is of the process, its largest; of
ours, of its larger one, as a second one publishes. The loss is of the first 2,048 rows, after the training."""

Result = dict[str, float]
Row = tuple[Peer, int]  # a peer, and its logging interval in steps


def measure(file: str, words: dict[str, object], *, threads: int = 1) -> Result:
    """Run one peer in a separate process with a new store. words: Its flags without the dashes."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"threads": threads, "store": f"{folder}/mlflow.db", **words}
        command = [sys.executable, str(PEERS / file), *(f"--{name}={value}" for name, value in flags.items())]
        seconds, output = timed(command, Path(folder), threads=threads)
    return {"process_seconds": seconds, **json.loads(output.strip().splitlines()[-1])}


def main() -> None:
    given = arguments()
    peers = [LOOPS[name] for name in given.peers]
    found = tuple(p.package for p in peers if find_spec(p.package))
    machine = header(given.repeats, given.threads, packages=(*PACKAGES, *found))
    for size in STEPS if given.size == "all" else (given.size,):
        rows = [row for every in given.log_every for row in rows_of(peers, every, given.device)]
        turns = [turn(order, size, given) for order in orders([(REFERENCE, 0), *rows], given.repeats)]
        some = [] if given.peers == list(LOOPS) else [",".join(given.peers)]
        with section(" ".join(["table.py", size, *some]), write=given.write):
            print(machine)
            print(f"{size}, {given.device}, {given.steps or STEPS[size]} steps:\n")
            print("\n".join(table(rows, turns)))
            for peer in peers:
                if not find_spec(peer.package):
                    print(f"| {peer.name} | | not installed |" + " |" * 7)
            print("\n" + NOTES + "\n", flush=True)
        if given.write and size == "mlp" and (shown := short(turns)):
            replace(README, "table.py readme", "\n".join([f"{made_by()}; {machine.strip()}.", "", *shown]))


def arguments() -> argparse.Namespace:
    options = parser(__doc__, repeats=5)
    options.add_argument("--size", choices=(*STEPS, "all"), default="mlp")
    options.add_argument("--steps", type=int, help=f"by default {STEPS}")
    options.add_argument("--most-steps", type=int, default=300, help="of a slow peer that logs each step")
    options.add_argument("--log-every", type=lambda text: [int(part) for part in text.split(",")], default=[1, 50, 0])
    options.add_argument("--peers", type=lambda text: text.split(","), default=list(LOOPS))
    options.add_argument("--device", default="cpu")
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    if unknown := [name for name in given.peers if name not in LOOPS]:
        options.error(f"--peers {','.join(unknown)}: it takes {', '.join(LOOPS)}")
    return given


def rows_of(peers: list[Peer], every: int, device: str) -> list[Row]:
    there = [peer for peer in peers if device.startswith(peer.only_on) and find_spec(peer.package)]
    return [(peer, every) for peer in there if peer.only_logged in (None, every)]


def turn(order: list[Row], size: str, given: argparse.Namespace) -> dict[Row, Result]:
    """Measure each row once. An error is printed and the row left out, except for the limit that logs nothing."""
    results = {}
    for peer, every in order:
        steps = given.steps or STEPS[size]
        if peer.is_slow and every == 1:
            steps = min(steps, given.most_steps)
        words = {"size": size, "steps": steps, "log-every": every, "device": given.device, "variant": peer.variant}
        try:
            result = results[peer, every] = measure(peer.file, words, threads=given.threads)
            print(f"{size}, {peer.name}, {logged((peer, every))}: {step_us(result):,.0f} µs a step", file=sys.stderr)
        except RuntimeError as error:
            if (peer, every) == (REFERENCE, 0):
                raise
            print(f"{peer.name}, {words}: {error}", file=sys.stderr)
    return results


def table(rows: list[Row], turns: list[dict[Row, Result]]) -> list[str]:
    """Return the lines of a table, with medians over the turns."""
    lines = [
        "| loop | logged | µs a step, median | lowest to highest | times the limit that logs nothing, median of the turns "
        "| points stored | loss at the end | first steps, s | outside training, s | memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not all(row in found for found in turns):
            lines.append(f"| {row[0].name} | {logged(row)} | failed |" + " |" * 7)
            continue
        results = [found[row] for found in turns]
        steps = [step_us(result) for result in results]
        ratio = median_ratio(steps, [step_us(found[REFERENCE, 0]) for found in turns])
        cells = [
            row[0].name,
            logged(row),
            spread(steps, ",.0f"),
            f"{ratio:.2f}",
            f"{results[-1]['points']:,}",
            f"{statistics.median(result['loss'] for result in results):.3f}",
            f"{statistics.median(r['seconds'] - (r['seconds_steady'] or 0) for r in results):.2f}",
            f"{statistics.median(r['process_seconds'] - r['seconds'] for r in results):.1f}",
            f"{statistics.median(result['peak_memory_bytes'] for result in results) / 2**20:,.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def short(turns: list[dict[Row, Result]]) -> list[str]:
    """Return README's table, or nothing if a row was not measured in every turn."""
    if not all((LOOPS[name], every) in found for name in SHORT for every in SHORT_EVERY for found in turns):
        return []
    heads = [f"µs per step, {logged((REFERENCE, every))} logged | points in MLflow" for every in SHORT_EVERY]
    lines = [f"| loop | {' | '.join(heads)} |", "|---|" + "---|---|" * len(SHORT_EVERY)]
    for peer in map(LOOPS.__getitem__, SHORT):
        cells = [peer.name]
        for every in SHORT_EVERY:
            results = [found[peer, every] for found in turns]
            steps = [step_us(result) for result in results]
            cells.append(f"{statistics.median(steps):,.0f} ({min(steps):,.0f} to {max(steps):,.0f})")
            cells.append(f"{results[-1]['points']:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def logged(row: Row) -> str:
    return {0: "nothing", 1: "every step"}.get(row[1], f"every {row[1]} steps")


def step_us(result: Result) -> float:
    if result["seconds_steady"] is None:
        return result["seconds"] / result["num_steps"] * 1e6
    return result["seconds_steady"] / result["num_steps_steady"] * 1e6


if __name__ == "__main__":
    main()
