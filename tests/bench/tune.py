"""What `tune` finds, beside the full grid of the same settings: `python tests/bench/tune.py digits_mlp spiral --seconds 20`.

Each point of the grid is held against the run as it is, in turns, as long as tune takes for one. All in one process, in the
current folder, on this machine's CPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
import warnings
from pathlib import Path

import torch
from page import ROOT, add_write, section

from runner.device import probe
from runner.experiment.check import check
from runner.experiment.compose_run import composed
from runner.plan.command import planned
from runner.plan.tune import tune
from runner.plan.tune_options import in_words
from runner.plan.tune_search import Search

KEYS = {
    "backends.cpu.num_threads": [1, 2],
    "train.compile": [False, True],
    "backends.cpu.channels_last": [True, False],
    "data.residency": ["device", "stream"],
    "micro": [1, 2],
}


def settings_of(point: dict, cfg) -> dict:
    """micro: parts of a batch, with the same total."""
    parts = point.pop("micro", 1)
    more = {"train.batch_size": cfg.train.batch_size // parts, "train.accumulate_steps": parts} if parts > 1 else {}
    return {**point, **more}


def whole_seconds(search: Search, ratio: float, setup: float) -> float:
    return setup + ratio * search.step_seconds * search.num_steps


def grid(words: list[str], keys: dict, *, seconds: float) -> dict[str, float]:
    """By settings, "" for the run as it is: the seconds of the whole run's steps, with what is compiled before."""
    cfg, _ = composed([], [*words, "tracking.enabled=false"])
    search = Search(cfg, torch.device(check(cfg, probe()).here), seconds, lambda row: None)
    search.begin(planned(cfg))
    for values in itertools.product(*keys.values()):
        torch._dynamo.reset()
        search._end = time.monotonic() + 1e9
        settings = settings_of(dict(zip(keys, values, strict=True)), cfg)
        search.settings, search.holder, search.ratio = {}, search.usual, 1.0
        search._try(settings)
        if search.holder is not search.usual:
            search.holder.close()
    search.close()
    found = {"": whole_seconds(search, 1.0, 0.0)}
    for row in search.rows:
        if row.ratio is not None:
            setup = (
                (row.setup_seconds or 0.0) - search.usual.setup_seconds if row.settings.get("train.compile") else 0.0
            )
            found[in_words(row.settings)] = whole_seconds(search, row.ratio, setup)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="+")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", nargs="+", default=list(KEYS), help="of the grid: others stay as they are")
    add_write(parser)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    keys = {name: KEYS[name] for name in given.keys}
    warnings.simplefilter("ignore")
    with section("tune.py", write=given.write), tempfile.TemporaryDirectory() as folder:
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, shared with others\n")
        print(
            "| experiment | tune takes | step's time by the run's as it is | best of the grid | share of the best | tune, s | grid, s |"
        )
        print("|---|---|---|---|---|---|---|", flush=True)
        for name in given.experiments:
            words = [f"experiment={name}", "device=cpu"]
            (Path(folder) / "tests").exists() or (Path(folder) / "tests").symlink_to(ROOT / "tests")
            os.chdir(folder)
            chosen = tune([], words, seconds=given.seconds)
            began = time.monotonic()
            points = grid(words, keys, seconds=given.seconds)
            took = time.monotonic() - began
            best = min(points, key=lambda point: points[point])
            words_of = set(in_words(chosen["settings"]).split())
            alike = [point for point in points if words_of <= set(point.split())]  # first what leaves the rest as it is
            own = points[alike[0] if words_of and alike else ""]
            least = points[best]
            print(
                f"| {name} | {in_words(chosen['settings']) or 'the run as it is'} | {chosen['ratio']:.2f} |"
                f" {best or 'the run as it is'} | {least / own:.2f} | {chosen['seconds']:.0f} | {took:.0f} |",
                flush=True,
            )


main()
