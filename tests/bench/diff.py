"""Planted differences, one by one, and whether `diff` names each and nothing else; how long it and `watch` take for many points.

`python tests/bench/diff.py`: runs of a person's own model and table, each beside the first one. Everything in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from page import add_write, section
from rich.console import Console

from runner import cli
from runner.tools.diff import Diff, diff, opened
from runner.tools.watch import WatchedRun
from runner.tracking import journal as journals
from runner.tracking.journal import Journal
from runner.tracking.journal_reader import read_events

BASE = Path("outputs/base/run")
MODEL = "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))\n"
WORDS = ("model=net", "data=arrays", "data.path=mine.npz", "device=cpu", "train.num_epochs=2", "train.batch_size=32")
QUIET = ("task.plots=false", "tracking.enabled=false")


def train(folder: Path, *words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        if cli.main([*WORDS, *QUIET, *words, f"hydra.run.dir={folder}"]):
            sys.exit(f"a run has failed: {words}")


def said(*words: str) -> Callable[[Path], None]:
    return lambda folder: train(folder, *words)


def of_a_row(folder: Path) -> None:
    write_rows(changed=1e-3)
    train(folder)
    write_rows()


def of_a_file(name: str, old: str, new: str) -> Callable[[Path], None]:
    """A change in a person's own code; git tells of files that it knows."""

    def make(folder: Path) -> None:
        text = Path(name).read_text()
        Path(name).write_text(text.replace(old, new))
        sys.modules.pop(Path(name).stem, None)
        train(folder)
        Path(name).write_text(text)
        sys.modules.pop(Path(name).stem, None)

    return make


def noted(line: str, new: str) -> Callable[[Path], None]:
    """A line of environment.txt as another machine would have written it."""

    def make(folder: Path) -> None:
        shutil.copytree(BASE, folder)
        file = folder / "environment.txt"
        file.write_text(
            "".join(f"{new}\n" if each.startswith(line) else each for each in file.read_text().splitlines(True))
        )

    return make


def on_a_gpu(folder: Path) -> None:
    shutil.copytree(BASE, folder)
    (start,) = [event for event in read_events(folder) if event.pop("kind") == "start"]
    with Journal(folder) as journal:
        journal.event("start", **start | {"tags": start["tags"] | {"device": "cuda:0", "device_name": "NVIDIA H100"}})


#: what is planted, how, and the names that are to be told, all of them
PLANTED: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "seed": (said("seed=1"), {"seed"}),
    "learning rate": (said("optimizer.lr=0.01"), {"optimizer.lr"}),
    "batch size": (said("train.batch_size=16"), {"train.batch_size"}),
    "precision": (said("train.precision=bf16"), {"train.precision"}),
    "threads": (said("backends.cpu.num_threads=2"), {"backends.cpu.num_threads", "threads"}),
    "another optimizer": (said("optimizer=sgd"), {"optimizer"}),
    "a number in one row of the data": (of_a_row, {"data"}),
    "own model, a file that git does not know": (of_a_file("my_nets.py", "ReLU", "GELU"), {"my_nets.py"}),
    "own code, not committed": (of_a_file("helper.py", "a = 1", "a = 2"), {"code", "helper.py"}),
    "torch": (noted("torch==", "torch==2.12.1"), {"torch"}),
    "numpy": (noted("numpy==", "numpy==1.26.4"), {"numpy"}),
    "machine": (noted("# machine: ", "# machine: Another CPU, 64 cores"), {"machine"}),
    "device": (on_a_gpu, {"device"}),
    "nothing": (lambda folder: train(folder), set()),
}


def write_rows(changed: float = 0.0) -> None:
    rows = np.random.default_rng(0).normal(size=(90, 4))
    rows[7, 2] += changed
    np.savez("mine.npz", x=rows, y=np.arange(90) % 3)


def begin() -> None:
    """The person's folder, and the run that all others stand beside."""
    write_rows()
    Path("my_nets.py").write_text(MODEL)
    Path("helper.py").write_text("a = 1\n")
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/net.yaml").write_text("_target_: my_nets.Net\n")
    Path(".gitignore").write_text("outputs\n")
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "helper.py"], ["commit", "-qm", "first"]):
        subprocess.run(["git", *name, *words], check=True, capture_output=True)
    train(BASE)


def beside(*folders: Path) -> Diff:
    with opened([str(each) for each in folders], uri="sqlite:///mlflow.db") as originals:
        return diff(originals)


def many_points(folder: Path, num_steps: int, *, seed: int) -> None:
    """A run with two metrics a step, in windows of 100 steps."""
    shutil.copytree(BASE, folder)
    shutil.rmtree(folder / "journal")
    draw, steps = np.random.default_rng(seed), np.arange(1, num_steps + 1)
    values = np.exp(-3 * steps / num_steps)[:, None] + draw.random((num_steps, 2)) / 10
    starts = [event for event in read_events(BASE) if event.pop("kind") == "start"]
    with Journal(folder) as journal:
        journal.event("start", **starts[0])
        for first in range(0, num_steps, 100):
            part = slice(first, first + 100)
            journal.points(("train/loss", "train/accuracy"), steps[part], steps[part], values[part])
        journal.event("end", status="FINISHED", end_ms=1)


@contextlib.contextmanager
def in_a_folder() -> Iterator[None]:
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        sys.path.insert(0, name)
        try:
            yield
        finally:
            os.chdir(before)


def seconds(call: Callable[[], object], repeats: int) -> str:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return f"{statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f})"


def opened_at_once(folder: Path, width: int, height: int) -> object:
    target, console = WatchedRun(folder), Console(width=width, height=height)
    target.read()
    return console.render_lines(target.draw(width, height, plain=False), console.options.update(height=height))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    add_write(parser)
    given = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    with in_a_folder(), section("diff.py", write=given.write):
        begin()
        print(f"{machine}; n = {given.repeats}, median (least to greatest)\n")
        print("| planted | told | as it is to be |\n|---|---|---|")
        for number, (name, (make, expected)) in enumerate(PLANTED.items()):
            make(folder := Path(f"outputs/{number}/run"))
            found = beside(BASE, folder)
            told = {each.what for each in (*found.configuration, *found.made_with)}
            print(f"| {name} | {', '.join(sorted(told)) or 'nothing'} | {'yes' if told == expected else 'NO'} |")
        journals._sync = lambda _: None  # type: ignore[assignment]  # 20,000 waits for the disk
        many_points(a := Path("outputs/a/run"), 50_000, seed=0)
        many_points(b := Path("outputs/b/run"), 50_000, seed=1)
        many_points(long := Path("outputs/long/run"), 500_000, seed=2)
        print("\n| after imports | |\n|---|---|")
        print(f"| `diff`, two runs of 100,000 points | {seconds(lambda: beside(a, b), given.repeats)} |")
        for width, height in ((80, 24), (200, 50)):
            took = seconds(lambda size=(width, height): opened_at_once(long, *size), given.repeats)  # type: ignore[misc]
            print(f"| `watch`, a million points, {width} x {height} | {took} |")


if __name__ == "__main__":
    main()
