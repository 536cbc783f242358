"""Runs the peers side by side, in turns, and prints a table for each size: `python tests/bench/table.py --repeats 5`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from page import ROOT, add_write, made_by, replace, section

T = TypeVar("T")
HERE, README = Path(__file__).parent, ROOT / "README.md"
STEPS = {"mlp": 2345, "cnn": 400, "transformer": 200}
PACKAGES = ("torch", "mlflow", "numpy")


@dataclass(frozen=True)
class Peer:
    name: str
    file: str
    package: str = "torch"  # a required package
    variant: str = ""
    only_logged: int | None = None  # None: measured with all requested intervals
    only_on: str = ""  # a kind of device; "": all
    is_slow: bool = True  # takes at most --most-steps if every step is logged


REFERENCE = Peer("hand-written limit", "limit.py", is_slow=False)
PEERS = {
    "limit": REFERENCE,
    "limit_compiled": Peer("hand-written limit, compiled", "limit.py", variant="compiled", only_logged=0),
    "limit_graph": Peer("hand-written limit, CUDA graphs", "limit.py", variant="graph", only_logged=0, only_on="cuda"),
    "limit_compiled_graph": Peer(
        "hand-written limit, compiled and CUDA graphs",
        "limit.py",
        variant="compiled+graph",
        only_logged=0,
        only_on="cuda",
    ),
    "ours": Peer("runner", "ours.py", is_slow=False),
    "ours_all": Peer("runner, tracking.points=all", "ours.py", variant="all", is_slow=False),
    "ours_compiled": Peer("runner, train.compile=true", "ours.py", variant="compiled", only_logged=1, is_slow=False),
    "ours_graph": Peer(
        "runner, train.cuda_graph=true", "ours.py", variant="graph", only_logged=1, only_on="cuda", is_slow=False
    ),
    "ours_compiled_graph": Peer(
        "runner, train.compile=true train.cuda_graph=true",
        "ours.py",
        variant="compiled+graph",
        only_logged=1,
        only_on="cuda",
        is_slow=False,
    ),
    "ours_two": Peer(
        "runner, train.num_processes=2", "ours.py", variant="two", only_logged=1, only_on="cpu", is_slow=False
    ),
    "textbook": Peer("textbook: DataLoader, item(), log_metrics", "textbook.py"),
    "lightning": Peer("Lightning", "with_lightning.py", "lightning"),
    "transformers": Peer("Hugging Face Trainer", "with_transformers.py", "accelerate"),
}
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
        command = [sys.executable, str(HERE / file), *(f"--{name}={value}" for name, value in flags.items())]
        began = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment(threads), cwd=folder, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{file} failed:\n{done.stdout}{done.stderr}")
        return {"process_seconds": time.perf_counter() - began, **json.loads(done.stdout.strip().splitlines()[-1])}


def environment(threads: int) -> dict[str, str]:
    """Return the environment without banners and telemetry, and with the number of threads for all libraries."""
    quiet = {"PYTHONWARNINGS": "ignore", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)}


def main() -> None:
    given = arguments()
    peers = [PEERS[name] for name in given.peers]
    found = tuple(p.package for p in peers if find_spec(p.package))
    machine = header(given.repeats, given.threads, packages=(*PACKAGES, *found))
    for size in STEPS if given.size == "all" else (given.size,):
        rows = [row for every in given.log_every for row in rows_of(peers, every, given.device)]
        turns = [turn(order, size, given) for order in orders([(REFERENCE, 0), *rows], given.repeats)]
        some = [] if given.peers == list(PEERS) else [",".join(given.peers)]
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=(*STEPS, "all"), default="mlp")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, help=f"by default {STEPS}")
    parser.add_argument("--most-steps", type=int, default=300, help="of a slow peer that logs each step")
    parser.add_argument("--log-every", type=lambda text: [int(part) for part in text.split(",")], default=[1, 50, 0])
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    add_write(parser)
    given = parser.parse_args()
    if unknown := [name for name in given.peers if name not in PEERS]:
        parser.error(f"--peers {','.join(unknown)}: it takes {', '.join(PEERS)}")
    return given


def rows_of(peers: list[Peer], every: int, device: str) -> list[Row]:
    return [
        (peer, every)
        for peer in peers
        if peer.only_logged in (None, every) and device.startswith(peer.only_on) and find_spec(peer.package)
    ]


def orders(names: Iterable[T], repeats: int) -> list[list[T]]:
    """Return the order of each turn: each starts with another peer, as the first one of a turn was measured too slow (issue 7)."""
    each = list(dict.fromkeys(names))
    starts = [number * len(each) // repeats for number in range(repeats)]
    return [each[start:] + each[:start] for start in starts]


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
        ratios = [step_us(found[row]) / step_us(found[REFERENCE, 0]) for found in turns]
        cells = [
            row[0].name,
            logged(row),
            f"{statistics.median(steps):,.0f}",
            f"{min(steps):,.0f} to {max(steps):,.0f}",
            f"{statistics.median(ratios):.2f}",
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
    if not all((PEERS[name], every) in found for name in SHORT for every in SHORT_EVERY for found in turns):
        return []
    heads = [f"µs per step, {logged((REFERENCE, every))} logged | points in MLflow" for every in SHORT_EVERY]
    lines = [f"| loop | {' | '.join(heads)} |", "|---|" + "---|---|" * len(SHORT_EVERY)]
    for peer in map(PEERS.__getitem__, SHORT):
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


def header(repeats: int, threads: int, *, packages: tuple[str, ...] = PACKAGES) -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(packages))
    machine = f"{platform.machine()}, {os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}"
    return f"{machine}; {versions}; {threads} thread(s); n = {repeats}, in turns\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
