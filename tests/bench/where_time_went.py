"""What a run says of its time, held against planted causes: is the cause named, and does the advice gain what it says?

`python tests/bench/where_time_went.py --write`; with `--switch` what the clocks cost. All runs are in one process, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from page import ROOT, add_write, section
from table import header

sys.path.insert(0, str(ROOT))

from runner.training.loop import Limits
from runner.training.step.clock import ClockedEpochs, StepClock

PARTS = """
import time
import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self, inputs=16, outputs=4, width=64, layers=2):
        super().__init__()
        sizes = [inputs, *[width] * layers]
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
        self.out = nn.Linear(width, outputs)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 0.9 + 0.1
        return self.out(x)


class Waiting(Dataset):
    def __init__(self, rows, seconds):
        made = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(rows, 16, generator=made), torch.randint(4, (rows,), generator=made)
        self.seconds = seconds

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return self.x[index], int(self.y[index])


def rows(num=4000, inputs=16):
    made = torch.Generator().manual_seed(0)
    return torch.randn(num, inputs, generator=made), torch.randint(4, (num,), generator=made)


def waiting(num=4000, seconds=5e-4):
    return Waiting(num, seconds)
"""
CONF = {
    "model/net.yaml": "_target_: my_parts.Net\ninputs: ${facts.in_features}\noutputs: 4\nwidth: 64\nlayers: 2\n",
    "data/own.yaml": "_target_: my_parts.rows\nnum: 4000\ninputs: 16\n",
    "data/waiting.yaml": "_target_: my_parts.waiting\nnum: 4000\nseconds: 5e-4\n",
}
USUAL = "model=net data=own tracking.enabled=false task.plots=false data.test_fraction=0 train.checkpoint_every_seconds=null"


#: the run whose clocks are switched, and how many steps it has
SWITCHED, SWITCH_STEPS = "model.layers=4 train.evaluate_every_steps=3000", 6000


class Planted(NamedTuple):
    """A cause, in a training of some seconds (of less than one nothing is said): the words that plant it, the kind of its advice, and the words that follow the advice, from what it writes."""

    words: str
    named: str
    follow: Callable[[str], str] = str


PLANTED = {
    "slow Dataset": Planted(
        "data=waiting data.num=1200 data.num_workers=0 train.batch_size=32 train.num_epochs=2",
        "data-bound",
        lambda write: write if "=" in write else "data=own data.num=1200",
    ),
    "huge validation": Planted("data.val_fraction=0.9 data.num=40000 train.num_epochs=40", "validation"),
    "checkpoint each step": Planted(
        "train.checkpoint_every_steps=1 train.num_epochs=40 data.val_fraction=0", "checkpoints"
    ),
}
BESIDE = ("start-up", "tracker", "finish", "other", "warm-up")


class Ran(NamedTuple):
    summary: dict[str, Any]
    wall: float  # around it
    cpu: float  # of this process, all threads

    @property
    def training(self) -> float:
        return sum(seconds for name, seconds in self.summary["time"].items() if name not in BESIDE)


def ran(words: str, folder: Path) -> Ran:
    """One run in this process."""
    from runner import run

    with contextlib.redirect_stdout(io.StringIO()):
        began, cpu = time.perf_counter(), time.process_time()
        done = run([*USUAL.split(), *words.split()], folder=folder)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    if done["status"] != "finished":
        raise SystemExit(f"{words}: {done['error']}")
    return Ran(dict(done), wall, cpu)


def causes(names: list[str], repeats: int, folder: Path) -> None:
    print("| planted | advice | share that it says | share that it gained | gained of what it says |")
    print("|---|---|---|---|---|")
    for name in names:
        planted = PLANTED[name]
        turns: list[tuple[Ran, Ran, Mapping[str, Any]]] = []
        for number in range(repeats):
            before = ran(planted.words, folder / f"{name} {number}")
            advice = before.summary["advice"] or {"kind": "none", "why": "", "write": "", "saves": 0.0, "words": ""}
            is_named = advice["kind"] == planted.named
            follow = planted.follow(advice["write"]) if is_named else ""
            after = ran(f"{planted.words} {follow}", folder / f"{name} {number} followed")
            turns.append((before, after, advice))
        says = [turn[2]["saves"] for turn in turns]
        gained = [1 - after.training / before.training for before, after, _ in turns]
        named = sum(turn[2]["kind"] == planted.named for turn in turns)
        ratio = statistics.median(gain / max(say, 1e-9) for gain, say in zip(gained, says, strict=True))
        last = turns[-1][2]
        words = f"{last['kind']} ({last['why']}): {last['write']}" if named == repeats else f"{named} of {repeats}"
        print(
            f"| {name} | {words} | {statistics.median(says):.0%} | {statistics.median(gained):.0%} | {ratio:.2f} |",
            flush=True,
        )


def switch(repeats: int, folder: Path) -> None:
    """What the clocks cost of a run. Its usual 50 or so of 6,000 steps are less than the noise of a run, so that as many
    are clocked as can be, in turns with a run of which none is."""
    usual, most = "", f"train.clocked_steps={SWITCH_STEPS}"
    ways = {"usual": usual, "most": most, "none": "train.clocked_steps=null"}
    found: dict[str, list[Ran]] = {way: [] for way in ways}
    ran(f"{SWITCHED} train.num_steps=200", folder / "first")
    for number in range(repeats):
        for way in sorted(ways, key=lambda way: (list(ways).index(way) + number) % len(ways)):
            one = ran(f"{SWITCHED} train.num_steps={SWITCH_STEPS} {ways[way]}", folder / f"{way} {number}")
            found[way].append(one)
    none = statistics.median(one.cpu for one in found["none"])
    beyond = [one.cpu - other.cpu for one, other in zip(found["most"], found["none"], strict=True)]
    clocked = {way: found[way][0].summary["step"]["clocked"] for way in ("usual", "most")}
    of_steps = max(0.0, statistics.median(beyond)) * clocked["usual"] / clocked["most"]  # below nought it is noise
    others = SWITCH_STEPS * _comparison()
    print("| of the run | CPU ms, median | share of the run |")
    print("|---|---|---|")
    print(f"| the run, {SWITCH_STEPS} steps, none clocked | {1e3 * none:.0f} | |")
    low, middle, high = (f"{1e3 * value:.0f}" for value in (min(beyond), statistics.median(beyond), max(beyond)))
    print(f"| {clocked['most']} steps clocked, beyond that | {middle} ({low} to {high}) | |")
    print(
        f"| the {clocked['usual']} that are clocked usually, by these | {1e3 * of_steps:.2f} | {of_steps / none:.3%} |"
    )
    print(f"| the comparison of each other step | {1e3 * others:.2f} | {others / none:.3%} |")
    print(f"| in all | {1e3 * (of_steps + others):.2f} | {(of_steps + others) / none:.3%} |")


def _comparison() -> float:
    bare = SimpleNamespace(epoch=lambda number, first_step=0: repeat(1, SWITCH_STEPS))
    limits = Limits(num_epochs=1, num_steps=SWITCH_STEPS)
    clock = StepClock(1, first=0, limits=limits, device=torch.device("cpu"))
    clock.due, clock.opens = SWITCH_STEPS, lambda: False  # type: ignore[method-assign]
    nobody: Any = None
    with_clock = ClockedEpochs(
        cast("Any", bare), clock, progress=cast("Any", SimpleNamespace(step=0)), one_by_one=nobody, clocked=nobody
    )
    seconds: list[list[float]] = [[], []]
    for number in range(20):
        began = time.perf_counter()
        for _ in (bare, with_clock)[number % 2].epoch(0):
            pass
        seconds[number % 2].append(time.perf_counter() - began)
    return float(min(seconds[1]) - min(seconds[0])) / SWITCH_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--switch", action="store_true", help="what the clocks cost, in the place of the causes")
    parser.add_argument("--only", help=f"some of {', '.join(PLANTED)}, with commas")
    add_write(parser)
    given = parser.parse_args()
    names = list(PLANTED) if given.only is None else given.only.split(",")
    name = f"where_time_went.py {'switch' if given.switch else given.only or ''}".rstrip()
    with tempfile.TemporaryDirectory() as where, section(name, write=given.write):
        folder = Path(where)
        (folder / "my_parts.py").write_text(PARTS)
        for file, text in CONF.items():
            (folder / "conf" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "conf" / file).write_text(text)
        os.chdir(folder)
        print(header(given.repeats, 1))
        if given.switch:
            switch(given.repeats, folder)
        else:
            causes(names, given.repeats, folder)
        os.chdir(ROOT)


main()
