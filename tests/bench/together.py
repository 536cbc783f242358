"""Compare jobs trained together with the same jobs trained separately: python tests/bench/together.py [--kills 50] [--only TABLE ...]

equal: each member's last weights and all its points compared with a separate run of the same overrides, after some epochs: all
members together, in float32 and with a rounding of 1e-16; the number of members that is chosen here; and, to show the effect of
rounding only, a separate run with two threads compared with one thread. kills: a group is killed at a random moment of its
training and resumed, and ends with the weights and points of an uninterrupted group. memory: groups under a limit of 2 GiB of
address space in addition to that of the process before them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import ROOT, add_write, section

sys.path.insert(0, str(ROOT / "tests" / "support"))

from members import Run, built, members_of, trained_alone, trained_together

from runner.config.compose import composer
from runner.device import Choice
from runner.device.host_memory import _sizes
from runner.experiment.context import RunContext
from runner.sweep.jobs.run_together import PlannedRun, run_together
from runner.tracking.journal_reader import read_series
from runner.training.stacked.check import check_alike

ALL = ["model.dropout=0.2", "scheduler=cosine", "train.clip_grad_norm=0.5", "train.ema_decay=0.99"]
AUGMENT = ["data.augment={crop:1,cutout:2}"]
EQUAL = ["data.limit=null", "train.batch_size=128", "backends.cpu.num_threads=1"]
SEEDS = [[f"seed={seed}"] for seed in range(8)]
#: by name: the overrides of a run on the digits
MODELS = {
    "MLP": ["model=mlp"],
    "MLP: dropout, cosine, clipping, EMA": ["model=mlp", *ALL],
    "CNN": ["model=cnn"],
    "CNN: the same, augmentation": ["model=cnn", *ALL, *AUGMENT],
    "ViT": ["model=vit", "model.width=32", "model.depth=2", "model.num_heads=4"],
    "ViT: the same, augmentation": [
        "model=vit",
        "model.width=32",
        "model.depth=2",
        "model.num_heads=4",
        *ALL,
        *AUGMENT,
    ],
    "transformer, signals of 32": [
        "data=synthetic",
        "data.num_rows=2000",
        "data.shape=[2,32]",
        "model=transformer",
        "model.width=32",
        "model.depth=2",
    ],
    "ResNet, SGD": ["model=resnet", "optimizer=sgd", "data.limit=400"],
    "ResNet, Adam": ["model=resnet", "data.limit=400"],
}
DEEP = ["tracking.enabled=false", "device=cpu", "backends.cpu.num_threads=1", "task.plots=false"]
KILLED = [
    "data=digits",
    "model=mlp",
    "model.hidden_sizes=[32]",
    *ALL,
    "train.num_epochs=20",
    "train.checkpoint_every_steps=9",
]
#: a process trains as many seeds of these as the limit allows
LARGE = {
    "MLP 64-4096-4096-10": ["data=digits", "model=mlp", "model.hidden_sizes=[4096,4096]"],
    "MLP 64-512-512-10": ["data=digits", "model=mlp", "model.hidden_sizes=[512,512]"],
    "CNN, 64 and 128 channels, batch 512": [
        "data=digits",
        "model=cnn",
        "model.channels=[64,128]",
        "train.batch_size=512",
    ],
    "ViT, width 256, depth 6": ["data=digits", "model=vit", "model.width=256", "model.depth=6", "model.num_heads=4"],
    "ResNet, batch 256": ["data=digits", "model=resnet", "train.batch_size=256"],
    "MLP 40-256-256-10 on MNIST-1D": ["experiment=mnist1d_mlp"],
}
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=["equal", "kills", "memory"], default=["equal", "kills", "memory"])
    add_write(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tables = {"equal": lambda: _equal(given.epochs), "kills": lambda: _kills(given.kills), "memory": _memory}
    for name in given.only:
        with section(f"together.py {name}", write=given.write):
            tables[name]()


def _equal(epochs: int) -> None:
    print(
        f"| {len(SEEDS)} members, {epochs} epoch(s) | together, float64: weights | together, float32: weights | points | "
        "as chosen here: weights | points | equal to the bit | alone, 2 threads beside 1: weights | points |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, words in MODELS.items():
        with tempfile.TemporaryDirectory() as made:
            _equal_row(name, [*EQUAL, f"train.num_epochs={epochs}", *words], Path(made))
    print("\nThe largest of all members, relative: of a tensor's weights by its norm, of a point by its size.\n")


def _equal_row(name: str, words: Sequence[str], folder: Path) -> None:
    exact, exact_together = (
        trained(folder / trained.__name__, words, SEEDS, in_float64=True)
        for trained in (trained_alone, trained_together)
    )
    alone = trained_alone(folder / "alone", words, SEEDS)
    num = check_alike(members_of(*built(folder / "chosen", words, SEEDS)), is_asked=True).num_together
    found = [
        _differences(alone, other)
        for other in (
            trained_together(folder / "together", words, SEEDS),
            trained_together(folder / "chosen", words, SEEDS, num),
            trained_alone(folder / "threads", [*words, "backends.cpu.num_threads=2"], SEEDS),
        )
    ]
    (weights, points, _), (chosen, chosen_points, equal), (threads, threads_points, _) = found
    print(
        f"| {name} | {_differences(exact, exact_together)[0]:.0e} | {weights:.0e} | {points:.0e} | "
        f"{num}: {chosen:.0e} | {chosen_points:.0e} | {equal} | {threads:.0e} | {threads_points:.0e} |",
        flush=True,
    )


def _differences(alone: Sequence[Run], together: Sequence[Run]) -> tuple[float, float, int]:
    weights = points = 0.0
    equal = 0
    for one, other in zip(alone, together, strict=True):
        mine, theirs = one.state()["model"], other.state()["model"]
        assert one.heard.points.keys() == other.heard.points.keys()
        for name, value in mine.items():
            distance = (value.double() - theirs[name].double()).norm() / (value.double().norm() + 1e-9)
            weights = max(weights, float(distance))
        for key, value in one.heard.points.items():
            points = max(points, abs(other.heard.points[key] - value) / (abs(value) + 1e-3))
        equal += all(torch.equal(value, theirs[name]) for name, value in mine.items())
    return weights, points, equal


def _kills(count: int) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        configs = _configs(KILLED, 6)
        began = time.monotonic()
        assert _forked(lambda: _run(configs, folder / "whole")) == 0
        seconds = time.monotonic() - began
        apart: dict[str, list[float]] = {}
        most = 0
        for number in range(count):
            moment = rng.uniform(0, seconds)
            killed = folder / str(number)
            ended = _forked(lambda killed=killed: _run(configs, killed), kill_after=moment)
            at = [_kept(killed, member, "step") for member in range(len(configs))]
            while ended != 0:
                ended = _forked(lambda killed=killed: _run(configs, killed))
            circumstance = "checkpoints of one step" if min(at) == max(at) else "checkpoints of two steps: in turn"
            apart.setdefault(circumstance, []).append(_apart(folder / "whole", killed, num=len(configs)))
            most = max(most, *at)
            shutil.rmtree(killed)
    print(
        f"{count} kills (SIGKILL) of a group of 6 at random moments of its {seconds:.1f} s, with checkpoints of up to {most}\n"
        "steps, then resumed, beside the same that nobody killed:\n"
    )
    print("| | kills | the same weights and points to the bit | the others, relative |\n|---|---|---|---|")
    for circumstance, found in sorted(apart.items()):
        rest = f"{max(found):.0e}" if any(found) else ""
        print(f"| {circumstance} | {len(found)} | {found.count(0.0)} | {rest} |")


def _configs(words: Sequence[str], count: int) -> list[Any]:
    compose = composer([])
    return [compose([*DEEP, *words, f"seed={seed}"]) for seed in range(count)]


def _run(configs: Sequence[Any], folder: Path) -> None:
    from omegaconf import open_dict

    jobs = []
    for number, cfg in enumerate(configs):
        own = folder / str(number)
        if _summary(own).get("status") == "finished":
            continue
        own.mkdir(parents=True, exist_ok=True)
        with open_dict(cfg):
            cfg.pop("hydra", None)
        jobs.append(PlannedRun(cfg, own, RunContext(device=Choice("cpu", "as asked", "cpu"))))
    while jobs:
        found = run_together(jobs)
        wrong = [summary for summary in found.values() if summary.status != "finished"]
        assert not wrong, wrong
        jobs = [job for number, job in enumerate(jobs) if number not in found]


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "summary.json").read_text()))
    except OSError:
        return {}


def _forked(function: Callable[[], None], *, kill_after: float | None = None) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            log = os.open(os.environ.get("TOGETHER_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            function()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kept(folder: Path, member: int, key: str) -> int:
    try:
        return int(torch.load(folder / f"{member}/checkpoints/last.pt", weights_only=True)[key])
    except (OSError, KeyError):
        return 0


def _apart(whole: Path, other: Path, *, num: int) -> float:
    most = 0.0
    for number in range(num):
        one, two = (
            torch.load(folder / str(number) / "checkpoints/last.pt", weights_only=True) for folder in (whole, other)
        )
        for name, value in one["model"].items():
            distance = (value.double() - two["model"][name].double()).norm() / (value.double().norm() + 1e-9)
            most = max(most, float(distance))
        mine, theirs = (read_series(folder / str(number)) for folder in (whole, other))
        for name, (steps, _, values) in mine.items():
            if name.startswith(("train/", "val/", "test/")):
                found = theirs.get(name)
                if found is None or not np.array_equal(steps, found[0]):
                    return float("inf")
                most = max(most, float(np.max(np.abs(values - found[2]) / (np.abs(values) + 1e-3))))
    return most


def _memory() -> None:
    print("| 16 seeds under a limit of 2 GiB | how it ended | groups, and what was chosen |")
    print("|---|---|---|")
    for name, words in LARGE.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            configs = _configs([*words, "train.num_steps=4", "tracking.log_model=false"], 16)
            code = _forked(lambda configs=configs, folder=folder: _limited(configs, folder))
            ended = [_summary(folder / str(number)).get("status", "none") for number in range(16)]
            said = [line for path in sorted(folder.glob("*/console.log")) for line in path.read_text().splitlines()]
            chosen = sorted(
                {line.partition("batch:")[2].split("(")[0].strip() for line in said if "compute together" in line}
            )
            fewer = sum("out of memory" in line for line in said)
        counts = ", ".join(f"{ended.count(state)} {state}" for state in dict.fromkeys(ended))
        print(
            f"| {name} | {counts}{'' if code == 0 else f', process {code}'} | {'; '.join(chosen)}; {fewer} out of memory |",
            flush=True,
        )


def _limited(configs: Sequence[Any], folder: Path) -> None:
    most = _sizes()["VmSize"] + 2 * GIB
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _run(configs, folder)


if __name__ == "__main__":
    main()
