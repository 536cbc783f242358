"""Compare jobs trained together with the same jobs trained separately: python tests/bench/together.py [--epochs 1]

Each member's last weights and all its points are compared with a separate run of the same overrides, after some epochs: all
members together, in float32 and with a rounding of 1e-16; the number of members that is chosen here; and, to show the effect of
rounding only, a separate run with two threads compared with one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from page import ROOT, add_write, section

sys.path.insert(0, str(ROOT / "tests" / "support"))

from members import Run, built, members_of, trained_alone, trained_together

from runner.training.stacked.check import check_alike

ALL = ["model.dropout=0.2", "scheduler=cosine", "train.clip_grad_norm=0.5", "train.ema_decay=0.99"]
AUGMENT = ["data.augment={crop:1,rotate:10}"]
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    add_write(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with section("together.py", write=given.write):
        print(
            f"| {len(SEEDS)} members, {given.epochs} epoch(s) | together, float64: weights | together, float32: weights | "
            "points | as chosen here: weights | points | bitwise identical | single, 2 threads and 1: weights | points |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for name, words in MODELS.items():
            with tempfile.TemporaryDirectory() as folder:
                _equal_row(name, [*EQUAL, f"train.num_epochs={given.epochs}", *words], Path(folder))
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
        assert one.listener.points.keys() == other.listener.points.keys()
        for name, value in mine.items():
            distance = (value.double() - theirs[name].double()).norm() / (value.double().norm() + 1e-9)
            weights = max(weights, float(distance))
        for key, value in one.listener.points.items():
            points = max(points, abs(other.listener.points[key] - value) / (abs(value) + 1e-3))
        equal += all(torch.equal(value, theirs[name]) for name, value in mine.items())
    return weights, points, equal


if __name__ == "__main__":
    main()
