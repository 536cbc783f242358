"""Small runs by name: `python rank_cases.py FOLDER` trains each by 1, 2 and 4 processes, in FOLDER/1, FOLDER/2 and FOLDER/4."""

import importlib
import os
import sys
from functools import partial
from pathlib import Path

import shortcuts

from runner.config.compose import composer

DIGITS = "data=digits model=mlp device=cpu tracking.enabled=false train.batch_size=100 train.num_epochs=2"
SMALL = f"{DIGITS} data.limit=60 metrics.pull_every=7"
SENTENCES = Path(__file__).parents[1] / "support/language/sentences.txt"
CASES = {
    "resident": f"{DIGITS} metrics.pull_every=5 optimizer=adam",
    "streamed": f"{DIGITS} data.residency=stream metrics.every=4 metrics.pull_every=8",
    "accumulated": f"{DIGITS} train.accumulate_steps=4 train.ema_decay=0.9 train.clip_grad_norm=0.3",
    "one row left": f"{SMALL} train.batch_size=47",  # of 48: a batch with fewer rows than processes
    "three rows, metrics": f"{SMALL} train.batch_size=3 train.eval_batch_size=7 scheduler=cosine task.metrics=[f1,auroc]",
    "stopped early": f"{DIGITS} optimizer.lr=0.003 train.num_epochs=3 "
    "train.early_stopping={metric:val/accuracy,mode:min,patience:1}",
    "norms": f"{SMALL} model=cnn train.num_epochs=1",
}
CASES |= {
    "accumulated in parts": f"{CASES['accumulated']} placement.strategy=fsdp",
    "one row left, in parts": f"{CASES['one row left']} placement.strategy=fsdp optimizer=sgd optimizer.momentum=0.9",
    "language in parts": f"data=text data.path={SENTENCES} data.context_length=32 data.limit=200 model=gpt model.width=32 "
    "model.depth=2 task=language device=cpu tracking.enabled=false metrics.pull_every=3 train.num_epochs=1 "
    "placement.strategy=fsdp",
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
        done = run(CASES[name].split(), folder=root / name)
        assert done["status"] == "finished", done["error"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
