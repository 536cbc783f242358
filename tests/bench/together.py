"""Compare jobs trained together with the same jobs trained separately: python tests/bench/together.py [--epochs 1]

Each member's last weights and all its points are compared with a separate run of the same overrides, after some epochs: all
members together, in float32 and with a rounding of 1e-16; the number of members that is chosen here; and, to show the effect of
rounding only, a separate run with two threads compared with one thread.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import ROOT, head, parser, row, section

sys.path.insert(0, str(ROOT / "tests" / "support"))

from members import built, largest_difference, members_of, trained_alone, trained_together

from runner.training.stacked.check import check_alike

ALL = ["model.dropout=0.2", "scheduler=cosine", "train.clip_grad_norm=0.5", "train.ema_decay=0.99"]
NARROW = ["model.width=32", "model.depth=2"]
SIGNALS = ["data=synthetic", "data.num_rows=2000", "data.shape=[2,32]"]
AUGMENT = ["data.augment={crop:1,rotate:10}"]
EQUAL = ["data.limit=null", "train.batch_size=128", "backends.cpu.num_threads=1"]
SEEDS = [[f"seed={seed}"] for seed in range(8)]
#: by name: the overrides of a run on the digits
MODELS = {
    "MLP": ["model=mlp"],
    "MLP: dropout, cosine, clipping, EMA": ["model=mlp", *ALL],
    "CNN": ["model=cnn"],
    "CNN: the same, augmentation": ["model=cnn", *ALL, *AUGMENT],
    "ViT": ["model=vit", *NARROW, "model.num_heads=4"],
    "ViT: the same, augmentation": ["model=vit", *NARROW, "model.num_heads=4", *ALL, *AUGMENT],
    "transformer, signals of 32": [*SIGNALS, "model=transformer", *NARROW],
    "ResNet, SGD": ["model=resnet", "optimizer=sgd", "data.limit=400"],
    "ResNet, Adam": ["model=resnet", "data.limit=400"],
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    given = options.parse_args()
    torch.set_num_threads(1)
    with section("together.py", write=given.write):
        head(f"{len(SEEDS)} members, {given.epochs} epoch(s)", "together, float64: weights", "together, float32: weights",
             "points", "as chosen here: weights", "points", "bitwise identical", "single, 2 threads and 1: weights",
             "points")  # fmt: skip
        for name in given.only:
            with tempfile.TemporaryDirectory() as folder:
                words = [*EQUAL, f"train.num_epochs={given.epochs}", *MODELS[name]]
                row(name, *_cells(words, Path(folder)))
        print("\nThe largest of all members, relative: of a tensor's weights by its norm, of a point by its size.\n")


def _cells(words: Sequence[str], folder: Path) -> list[str]:
    exact = trained_alone(folder / "exact", words, SEEDS, in_float64=True)
    exact_together = trained_together(folder / "exact together", words, SEEDS, in_float64=True)
    alone = trained_alone(folder / "alone", words, SEEDS)
    num = check_alike(members_of(*built(folder / "chosen", words, SEEDS)), is_asked=True).num_together
    together = trained_together(folder / "together", words, SEEDS)
    chosen = trained_together(folder / "as chosen", words, SEEDS, num)
    threads = trained_alone(folder / "threads", [*words, "backends.cpu.num_threads=2"], SEEDS)
    states = [(one.state()["model"], other.state()["model"]) for one, other in zip(alone, chosen, strict=True)]
    equal = sum(all(torch.equal(mine[name], theirs[name]) for name in mine) for mine, theirs in states)
    found = [f"{each:.0e}" for runs in (together, chosen, threads) for each in largest_difference(alone, runs)]
    found[2] = f"{num}: {found[2]}"
    return [f"{largest_difference(exact, exact_together)[0]:.0e}", *found[:4], str(equal), *found[4:]]


if __name__ == "__main__":
    main()
