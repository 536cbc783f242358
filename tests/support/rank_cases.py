"""Small runs by name: `python rank_cases.py FOLDER` trains each by 1, 2 and 4 processes, in FOLDER/1, FOLDER/2 and FOLDER/4."""

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import shortcuts

from runner.config.compose import composer

DIGITS = (
    "data=digits",
    "model=mlp",
    "device=cpu",
    "tracking.enabled=false",
    "train.batch_size=100",
    "train.num_epochs=2",
)
SMALL = (*DIGITS, "data.limit=60", "metrics.pull_every=7")
CASES = {
    "resident": (*DIGITS, "metrics.pull_every=5", "optimizer=adam"),
    "streamed": (*DIGITS, "data.residency=stream", "metrics.every=4", "metrics.pull_every=8"),
    "accumulated": (*DIGITS, "train.accumulate_steps=4", "train.ema_decay=0.9", "train.clip_grad_norm=0.3"),
    "one row left": (*SMALL, "train.batch_size=47"),  # of 48: a batch with fewer rows than processes
    "three rows, metrics": (
        *SMALL,
        "train.batch_size=3",
        "train.eval_batch_size=7",
        "scheduler=cosine",
        "task.metrics=[f1,auroc]",
    ),
    "stopped early": (
        *DIGITS,
        "optimizer.lr=0.003",
        "train.early_stopping={metric:val/accuracy,mode:min,patience:1}",
        "train.num_epochs=3",
    ),
    "norms": (*SMALL, "model=cnn", "train.num_epochs=1"),
}
PARTS = "placement.strategy=fsdp"
CASES |= {
    "accumulated in parts": (*CASES["accumulated"], PARTS),
    "one row left, in parts": (*CASES["one row left"], PARTS, "optimizer=sgd", "optimizer.momentum=0.9"),
    "language in parts": (
        *("data=text", f"data.path={Path(__file__).parent / 'language' / 'sentences.txt'}", "data.context_length=32"),
        *(
            "model=gpt",
            "model.width=32",
            "model.depth=2",
            "task=language",
            "device=cpu",
            "tracking.enabled=false",
            "data.limit=200",
            "metrics.pull_every=3",
        ),
        *("train.num_epochs=1", PARTS),
    ),
}
#: the cases for more than two processes
FEW = ("accumulated", "one row left", "one row left, in parts")


#: imports of the runs in addition to the runner
HEAVY = ("torch.distributed.run", "torchmetrics.classification", "runner.distributed.sharding", "runner.experiment.run")


def main(root: Path) -> None:
    """Run as one of the processes, or start torchrun, whose processes are forked where possible (forked_programs)."""
    if "RANK" in os.environ:
        train(root / os.environ["WORLD_SIZE"])
        return
    shortcuts.compose_once()
    for name in HEAVY:
        importlib.import_module(name)
    composer([])([])
    from torch.distributed.run import main as torchrun

    for num in (4, 2):
        torchrun(["--standalone", "--nproc-per-node", str(num), __file__, str(root)])
    train(root / "1")


def train(root: Path) -> None:
    from runner import run
    from runner.distributed import sharding
    from runner.distributed.environment import rank_here
    from runner.distributed.group import Group, join
    from runner.experiment import processes, session

    session.illustrate = lambda *args, **more: []  # plots take longer than the training
    sharding.Shards = partial(sharding.Shards, block=1000)  # small models have blocks, too
    place = rank_here(os.environ)
    if place is not None:
        import torch

        group = join(place, backend="gloo", device=torch.device("cpu"))
        Group.leave = lambda self: None  # the next case uses the group
        # waits for all processes, like the real function
        processes.join = lambda place, choice: (group.all_reduce_max([0.0]), group)[1]
    for name in CASES if place is None or place.num == 2 else FEW:
        done = run([*CASES[name]], folder=root / name)
        assert done["status"] == "finished", done["error"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
