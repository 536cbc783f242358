"""What `tune` finds, beside the full grid: `python tests/bench/tune.py digits_mlp spiral --write`.

The full grid is the product of all that tune may set on a CPU where a run's rows lie in memory: threads, compilation,
whether a batch is taken in one part, in two or in four, where the rows lie and, where there are 2-d convolutions, whether channels lie last. Each
point is measured as tune measures one try that it does not give up: built, its first steps taken and, where they are the
same numbers, held against the run as it is for all turns of a comparison. No point is left out for what a plan says. What
is charged to the grid is that alone; tune is charged with its plan and with reading the rows, too. Each starts with no
compiled code on disk.

What tune took is then held against the grid's best five times more, twice as long each, and the median is told: the least of
many figures is too low, and what another program does to one of two cores lasts longer than one comparison. Where both are the
same settings that is 1 without a measurement.
`--keep FILE` keeps what was measured, and goes on with it; `--for SECONDS` begins nothing new after that.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from page import ROOT, add_write, section
from table import header
from torch import nn

from runner.device import probe
from runner.device.backends import is_out_of_memory
from runner.errors import RunnerError
from runner.experiment.check import check
from runner.experiment.compose_run import composed
from runner.plan.tune import LEAST_SECONDS, SHARE, Search, tune
from runner.plan.tune_measure import Candidate, Comparison, compare, is_same
from runner.plan.tune_options import in_words

THREADS, COMPILE, RESIDENCY, LAST = (
    "backends.cpu.num_threads",
    "train.compile",
    "data.residency",
    "backends.cpu.channels_last",
)
SIZE, PARTS = "train.batch_size", "train.accumulate_steps"
HOLDS = 5
Kept = dict[str, Any]  # of one experiment: num_points, tune, points, held


class Grid:
    """The points of one experiment, and the run as it is, which they are held against."""

    def __init__(self, words: list[str], seconds: float) -> None:
        self.cfg, _ = composed([], [*words, "tracking.enabled=false"])
        self.search = Search(self.cfg, torch.device(check(self.cfg, probe()).here), seconds, lambda row: None)
        self.search.read()
        self.search.begin({})
        self.seconds = max(LEAST_SECONDS, SHARE * seconds)
        self.usual = self.search.usual
        parts, train = self.usual.parts, self.cfg.train
        has_convolutions = any(isinstance(module, nn.Conv2d) for module in parts.model.modules())
        self.as_it_is: dict[str, Any] = {
            THREADS: self.usual.threads,
            COMPILE: bool(train.compile),
            RESIDENCY: "stream" if parts.train.indexed() is None else "device",
            SIZE: train.batch_size,
            PARTS: train.accumulate_steps,
        }
        keys: dict[str, list[Any]] = {THREADS: [1, os.cpu_count()], COMPILE: [False, True], RESIDENCY: ["device", "stream"]}  # fmt: skip
        if has_convolutions:
            self.as_it_is[LAST] = parts.layout.startswith("channels last")
            keys[LAST] = [False, True]
        sizes = [
            {SIZE: train.batch_size // num, PARTS: train.accumulate_steps * num}
            for num in (1, 2, 4)
            if train.batch_size % num == 0
        ]
        products = itertools.product(itertools.product(*keys.values()), sizes)
        self.points = [dict(zip(keys, values, strict=True)) | size for values, size in products]

    def named(self, settings: dict[str, Any]) -> str:
        """As the points are kept: every key, of a choice, too."""
        return json.dumps(self.as_it_is | settings, sort_keys=True)

    def built(self, settings: dict[str, Any]) -> Candidate:
        torch._dynamo.reset()
        return self.search._candidate({} if self.named(settings) == self.named({}) else settings)

    def measured(self, settings: dict[str, Any]) -> dict[str, Any]:
        """seconds: that it took; ratio: of its step to that of the run as it is, where it has the same numbers."""
        began = time.perf_counter()
        found: dict[str, Any] = {"ratio": None, "ahead": 0.0}
        try:
            candidate = self.built(settings)
        except Exception as error:
            if not isinstance(error, RunnerError) and not is_out_of_memory(error):
                raise
            return found | {"seconds": time.perf_counter() - began}
        if is_same(self.usual.losses, candidate.losses, precision=self.usual.parts.precision.name):
            found["ratio"] = compare(self.usual, candidate, seconds=self.seconds, to_the_end=True).ratio
        if settings[COMPILE]:
            found["ahead"] = candidate.setup_seconds - self.usual.setup_seconds
        candidate.close()
        return found | {"seconds": time.perf_counter() - began}

    def held(self, kept: Kept) -> dict[str, Any]:
        """The best of the grid and the run as it is, each against what tune took: whole runs, compiling counted."""
        chosen, points = kept["tune"]["settings"], {name: one for name, one in kept["points"].items() if one["ratio"]}
        step, num_steps = self.usual.step_seconds, self.search.num_steps
        best = min(points, key=lambda name: points[name]["ahead"] + points[name]["ratio"] * step * num_steps)
        found: dict[str, Any] = {"best": {key: value for key, value in json.loads(best).items() if value != self.as_it_is[key]}}  # fmt: skip
        taken = self.usual if self.named(chosen) == self.named({}) else self.built(chosen)
        for name, settings in (("share", json.loads(best)), ("of_usual", {})):
            if self.named(settings) == self.named(chosen):
                found[name] = 1.0
                continue
            other = self.built(settings) if settings else self.usual
            results = [compare(taken, other, seconds=2 * self.seconds, to_the_end=True) for _ in range(HOLDS)]
            aheads = [points.get(self.named(each), {}).get("ahead", 0.0) for each in (settings, chosen)]
            found[name] = statistics.median(_share(result, *aheads, num_steps=num_steps) for result in results)
            if other is not self.usual:
                other.close()
        if taken is not self.usual:
            taken.close()
        return found


def _share(found: Comparison, ahead: float, aheads_of_taken: float, *, num_steps: int) -> float:
    steps = found.step_seconds * num_steps
    return (ahead + steps) / (aheads_of_taken + steps / found.ratio)


def go_on(name: str, kept: Kept, seconds: float, end: float, save: Callable[[], object]) -> None:
    """Measures what is not there yet, while there is time; calls save() after each."""
    words = [f"experiment={name}", "device=cpu"]
    if "tune" not in kept:
        with _no_compiled_code(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            kept["tune"] = tune([], words, seconds=seconds)
        save()
    if "held" in kept or time.monotonic() > end:
        return
    with _no_compiled_code():
        grid = Grid(words, seconds)
        kept["num_points"] = len(grid.points)
        points = kept.setdefault("points", {})
        for settings in grid.points:
            if grid.named(settings) not in points and time.monotonic() < end:
                points[grid.named(settings)] = grid.measured(settings)
                save()
        if len(points) == kept["num_points"] and time.monotonic() < end:
            kept["held"] = grid.held(kept)
            save()
        grid.search.close()


@contextlib.contextmanager
def _no_compiled_code():
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        yield


def show(kept: dict[str, Kept]) -> None:
    print(header(1, os.cpu_count() or 1))
    print(
        "| experiment | tune takes | best of the grid | share of the best | run as it is, times what tune takes"
        " | tune, s | grid, s (points) | tune's share of the grid's time |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, one in kept.items():
        took, held = sum(point["seconds"] for point in one["points"].values()), one["held"]
        chosen, best = (
            in_words(settings) or "the run as it is" for settings in (one["tune"]["settings"], held["best"])
        )
        print(
            f"| {name} | {chosen} | {best} | {held['share']:.2f} | {held['of_usual']:.2f} | {one['tune']['seconds']:.0f} |"
            f" {took:.0f} ({len(one['points'])}) | {one['tune']['seconds'] / took:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--seconds", type=float, default=30.0, help="as tune has them")
    parser.add_argument("--keep", type=Path, help="a file with what was measured so far")
    parser.add_argument("--for", dest="most", type=float, default=1e9, help="seconds, after which nothing new begins")
    add_write(parser)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    warnings.simplefilter("ignore")
    end = time.monotonic() + given.most
    file = given.keep and given.keep.absolute()
    kept: dict[str, Kept] = json.loads(file.read_text()) if file and file.exists() else {}

    def save() -> None:
        if file:
            file.write_text(json.dumps(kept, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(ROOT / "tests")
        os.chdir(folder)
        for name in given.experiments:
            if time.monotonic() < end:
                go_on(name, kept.setdefault(name, {}), given.seconds, end, save)
        os.chdir(ROOT)
    done = {name: kept[name] for name in given.experiments if "held" in kept.get(name, {})}
    if len(done) < len(given.experiments):
        print(f"{len(done)} of {len(given.experiments)} are done")
    else:
        with section("tune.py", write=given.write):
            show(done)


main()
