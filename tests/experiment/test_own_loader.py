"""A user's DataLoader or IterableDataset: compared with manual loops, resumed in the middle of an epoch, and refused."""

import importlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hand_loop import steps_of
from members import trained_alone
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from runner import cli
from runner.data.loading.order import EPOCH, mixed
from runner.device import backends
from runner.tracking.journal import read_points

MINE = '''
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

NUM, BATCH = 60, 8


def rows(seed=0):
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(NUM, 4, generator=drawn)
    return inputs, (inputs.sum(1) > 0).long()


def doubled(items):
    inputs, targets = zip(*items)
    return torch.stack(inputs) * 2, torch.stack(targets)


def weighted():
    """Its own sampler and its own collate."""
    sampler = WeightedRandomSampler(torch.arange(NUM) + 1.0, 50)
    train = DataLoader(TensorDataset(*rows()), batch_size=BATCH, sampler=sampler, collate_fn=doubled)
    return {"train": train, "val": DataLoader(TensorDataset(*rows(1)), batch_size=25)}


def own_generator():
    return DataLoader(TensorDataset(*rows()), BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))


def drawing(items):
    torch.rand(3), random.random(), np.random.rand()
    return torch.utils.data.default_collate(items)


def own_generator_drawing():
    loader = own_generator()
    return DataLoader(loader.dataset, BATCH, shuffle=True, generator=loader.generator, collate_fn=drawing)


class Evens(Sampler):
    """Batches of sizes of their own, of which epoch says the order."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 3

    def __iter__(self):
        order = torch.randperm(NUM, generator=torch.Generator().manual_seed(self.epoch))
        return (part.tolist() for part in order.split([10, 30, 20]))


def batches():
    return DataLoader(TensorDataset(*rows()), batch_sampler=Evens())


class Stream(IterableDataset):
    """Draws from each of the generators of the process."""

    def __len__(self):
        return 50

    def __iter__(self):
        for _ in range(50):
            inputs = torch.randn(4) + random.random() + float(np.random.rand())
            yield inputs, (inputs.sum() > 4).long()


def stream():
    return Stream()


class Counted(IterableDataset):
    """Goes on from where it stands, and says where that is."""

    at = 0

    def __len__(self):
        return NUM

    def __iter__(self):
        inputs, targets = rows()
        while self.at < NUM:
            self.at += 1
            yield inputs[self.at - 1], targets[self.at - 1]
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def counted():
    return Counted()


class Stateful(DataLoader):
    """Says where it stands, as torchdata's StatefulDataLoader does; reads_of: the rows that were read, of all of them."""

    reads_of = []

    def __init__(self):
        super().__init__(TensorDataset(*rows()), batch_size=BATCH)
        self.next = self.known = 0

    def __iter__(self):
        self.next, self.known = self.known, 0
        order = torch.randperm(NUM, generator=torch.Generator().manual_seed(3))
        for part in order.split(BATCH)[self.next:]:
            self.next += 1
            self.reads_of.append(part.tolist())
            inputs, targets = self.dataset.tensors
            yield inputs[part] + torch.rand(()), targets[part]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.known = state["next"]


def stateful():
    return Stateful()


class Endless(Stream):
    """As Stream, but nobody says how long it is."""

    __len__ = None


def endless():
    return Endless()


def endless_loader():
    return DataLoader(Endless(), batch_size=BATCH)


class StatefulEndless(Stateful):
    __len__ = None


def stateful_endless():
    return StatefulEndless()


class Nothing(Endless):
    def __iter__(self):
        return iter(())


def nothing():
    return Nothing()


def endless_val():
    return {"train": rows(), "val": Endless()}


class Immense(Stream):
    def __len__(self):
        return 10**12


def immense():
    return Immense()


class Short(Stream):
    def __iter__(self):
        return (pair for pair, _ in zip(super().__iter__(), range(20)))


def short():
    return Short()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2))
'''
QUIET = ["device=cpu", "tracking.enabled=false", "task.plots=false", "model=mine", "train.num_epochs=3"]


def losses_of(folder, metric="train/loss"):
    return [value for _, value in read_points(Path(folder))[metric]]


@pytest.fixture
def mine(own_folder, monkeypatch):
    """Import the user's module, with a configuration for each of its loaders."""
    Path("mine.py").write_text(MINE)
    importlib.invalidate_caches()
    module = importlib.import_module("mine")
    Path("conf/data").mkdir(parents=True)
    Path("conf/model").mkdir()
    for name in re.findall(r"^def (\w+)\(\):", MINE, re.MULTILINE):
        Path(f"conf/data/{name}.yaml").write_text(f"_target_: mine.{name}\n")
    Path("conf/model/mine.yaml").write_text("_target_: mine.Net\n")
    return module


def trained(folder, name, num_steps=None, *more):
    """Train, or resume, and return the losses of these steps, and the model's state."""
    words = [f"data._target_=mine.{name}", "data.limit=null", "model=mine", "task.plots=false"]
    words += ["train.batch_size=8", "train.num_epochs=3", f"train.num_steps={num_steps or 'null'}"]
    (run,) = trained_alone(folder, [*words, *more], [[]])
    return [value for (name, _), value in sorted(run.listener.points.items()) if name == "train/loss"], run.state()


def by_hand(loader, *, sets=()):
    """Train in a plain loop. sets: Generators of the loader, with their first seeds."""

    def batches():
        for epoch in range(3):
            seed = mixed(0, EPOCH, epoch)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            for generator, first in sets:
                generator.manual_seed(mixed(first, EPOCH, epoch))
            if hasattr(loader.batch_sampler, "set_epoch"):
                loader.batch_sampler.set_epoch(epoch)
            yield from loader

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    return [loss for loss, _ in steps_of(model, batches())], model


def weighted_by_hand(module):
    backends.seed_everything(0)
    return by_hand(module.weighted()["train"])


HANDS = {
    "weighted": weighted_by_hand,
    "own_generator": lambda module: by_hand(loader := module.own_generator(), sets=[(loader.generator, 7)]),
    "batches": lambda module: by_hand(module.batches()),
    "stream": lambda module: by_hand(DataLoader(module.Stream(), batch_size=8)),
    "counted": lambda module: by_hand(DataLoader(module.Counted(), batch_size=8)),
    "stateful": lambda module: by_hand(module.Stateful()),
}
#: without a length, each repetition is like an epoch of the loader with one
HANDS |= {"endless": HANDS["stream"], "endless_loader": HANDS["stream"], "stateful_endless": HANDS["stateful"]}


#: stopped in the first epoch, or where the second has begun
STOPPED = dict.fromkeys(HANDS, 2) | dict.fromkeys(("own_generator", "stream", "stateful", "stateful_endless"), 8)


@pytest.mark.parametrize(("name", "num_steps"), list(STOPPED.items()))
def test_resumed_run_is_a_loop_by_hand(mine, tmp_path, name, num_steps):
    expected, model = HANDS[name](mine)
    assert len(set(expected)) == len(expected) > 8
    in_all = len(expected) if "endless" in name else None
    losses, _ = trained(tmp_path, name, num_steps)
    mine.Stateful.reads_of.clear()
    rest, state = trained(tmp_path, name, in_all)
    assert losses + rest == expected
    assert all(map(torch.equal, state["model"].values(), model.state_dict().values()))
    if name == "stateful":  # checks read its first batch; batches of the first part are not read again
        assert len(mine.Stateful.reads_of) <= 2 + len(rest)


def test_loader_validates_with_its_split(mine, capfd):
    assert cli.main([*QUIET, "data=weighted", "hydra.run.dir=run"]) == 0
    said = capfd.readouterr().out + Path("run/runner.log").read_text()
    assert "weighted: 50 train, 60 val examples; streamed (your DataLoader, batches of 8;" in said
    inputs, targets = mine.rows(1)
    model = mine.Net()
    model.load_state_dict(torch.load("run/checkpoints/last.pt", weights_only=True)["model"])
    with torch.no_grad():
        expected = float(F.cross_entropy(model(inputs), targets))
    assert losses_of("run", "val/loss")[-1] == pytest.approx(expected, rel=1e-6)
    assert cli.main(["evaluate", "run", "train.eval_batch_size=7"]) == 0


def test_a_length_may_be_any_number(mine, tmp_path):
    """A loader without an end can report any length: nothing allocates memory per row."""
    assert trained(tmp_path, "immense", 2)[0] == HANDS["stream"](mine)[0][:2]


def test_own_loader_draws_do_not_change_training(mine, tmp_path):
    words = ["model=mlp", "model.hidden_sizes=[8]", "model.dropout=0.5"]
    losses = [trained(tmp_path / name, name, 8, *words)[0] for name in ("own_generator", "own_generator_drawing")]
    assert losses[0] == losses[1]


def test_two_processes_share_each_batch(mine, own_folder, warm):
    words = [*QUIET, "data=weighted", "train.num_processes=2", "hydra.run.dir=shared"]
    with warm.command(own_folder, *words) as command:
        output, _ = command.communicate()
    assert command.returncode == 0, output
    assert losses_of("shared") == pytest.approx(weighted_by_hand(mine)[0], rel=1e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["data=endless"],
            ["data=endless", "Endless has no length", "train.num_steps=1000", "define __len__ in Endless"],
        ),
        (["data=endless_val"], ["data=endless_val, val", "help: define __len__ in Endless"]),
        (["data=nothing", "train.num_steps=3"], ["Nothing gives no rows"]),
        (
            ["data=stream", "data.limit=10", "data.fold=1", "data.num_folds=3"],
            ["data.limit=10", "data.fold=1/3", "chooses its rows itself", "data.fold=null"],
        ),
        (["data=stream", "data.sampler=balanced"], ["data.sampler=balanced", "data.sampler=null"]),
        (
            ["data=weighted", "data.residency=device", "data.num_workers=1"],
            ["data.residency=device", "data.residency=auto", "data.num_workers=1", "DataLoader(..., num_workers=...)"],
        ),
        (
            ["data=stream", "data.num_workers=2"],
            ["data.num_workers=2", "each process would read all", "data.num_workers=0", "get_worker_info()"],
        ),
        (["data=stream", "model=mlp"], ["has no out_features", "help: set model.out_features=... to the value itself"]),
    ],
)
def test_own_loader_unsupported_settings_are_refused(mine, capfd, words, told):
    assert cli.main([*QUIET, *words]) == 2
    said = capfd.readouterr().err.replace("`", "")
    assert all(word in said for word in told), said


def test_own_loader_ending_early_is_named(mine, capfd):
    assert cli.main([*QUIET, "data=short", "train.batch_size=8"]) == 1
    assert "epoch 1 ended after batch 3" in capfd.readouterr().out


def test_own_loader_plan_divides_batch_by_processes(mine, warm_programs, capfd):
    assert cli.main(["plan", *QUIET, "data=weighted", "train.num_processes=4", "--json"]) == 0
    said = capfd.readouterr()
    plan = json.loads(said.out)
    (inputs,) = (each for each in plan["placement"] if each["name"] == "batch[0]")
    assert plan["residency"].startswith("streamed")
    assert inputs["shape"] == [2, 4] and plan["batch_size"] == plan["step"]["batch_size"] == 8
    assert "one of 4 processes, with 2 rows of each batch" in said.err
