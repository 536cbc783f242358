"""What a checkpoint costs the loop, and how long a run takes to end: `python tests/bench/checkpoint.py --repeats 5`.

The pause is what CheckpointWriter.keep() takes, beside it torch.save of the same state where the loop waits for it. Then real runs
of the same size are sent a SIGTERM; from there to their exit everything is saved, drawn and handed to the tracker.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from page import add_write, section
from table import header
from torch import nn

from runner.training.background import Background
from runner.training.checkpoint import CheckpointWriter

WIDTH, FEATURES = 1024, 64
DEPTHS = {10: 2, 100: 24, 400: 95}  # by MB of parameters: layers of WIDTH


def state_of(depth: int) -> dict[str, object]:
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, FEATURES)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def pauses(depth: int, repeats: int) -> tuple[list[float], float, float]:
    """Return the seconds of each keep(), of which the first allocates memory, and the medians of writing and of torch.save with fsync."""
    state, kept, written, waited = state_of(depth), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        background = Background()
        keeper = CheckpointWriter(Path(folder), background)
        for _ in range(repeats + 1):
            began = time.perf_counter()
            keeper.keep("last", state)
            kept.append(time.perf_counter() - began)
            background.wait()
            written.append(time.perf_counter() - began - kept[-1])
            began = time.perf_counter()
            with (Path(folder) / "plain.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            waited.append(time.perf_counter() - began)
        background.close()
    return kept, statistics.median(written), statistics.median(waited)


def seconds_to_end(depth: int) -> float:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the publisher may still be running
        words = [
            "data=synthetic",
            f"data.num_features={FEATURES}",
            "model=mlp",
            f"model.hidden_sizes=[{','.join([str(WIDTH)] * (depth + 1))}]",
            "train.num_epochs=100000",
            "train.checkpoint_every_seconds=5",
            "device=cpu",
            "hydra.run.dir=run",
        ]
        process = subprocess.Popen([sys.executable, "-m", "runner", *words], cwd=folder, stdout=subprocess.DEVNULL)
        while not (Path(folder) / "run" / "checkpoints" / "last.pt").exists():
            time.sleep(0.05)
            if process.poll() is not None:
                sys.exit("the run ended by itself")
        time.sleep(1)
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        seconds = time.perf_counter() - began
        if code != 143:
            sys.exit(f"the run ended with {code}")
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    add_write(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with section("checkpoint.py", write=given.write):
        print(header(given.repeats, 1))
        print(
            "| parameters | with Adam | pause, first | pause, later | written beside in | torch.save, waited for | SIGTERM to exit |"
        )
        print("|---|---|---|---|---|---|---|")
        for size, depth in DEPTHS.items():
            (first, *later), written, waited = pauses(depth, given.repeats)
            ends = sorted(seconds_to_end(depth) for _ in range(min(3, given.repeats)))
            times = [first, statistics.median(later), written, waited]
            shown = " | ".join(f"{seconds:.3f} s" for seconds in times)
            print(
                f"| {size} MB | {3 * size} MB | {shown} | {ends[len(ends) // 2]:.1f} s (to {ends[-1]:.1f} s) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
