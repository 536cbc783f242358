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


def endless_beside():
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


class Long(Stream):
    def __iter__(self):
        return (pair for _ in range(2) for pair in super(Long, self).__iter__())


def long():
    return Long()


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 2))
'''
QUIET = ["device=cpu", "tracking.enabled=false", "task.plots=false", "model=mine", "train.num_epochs=3"]


@pytest.fixture
def mine(own_folder, monkeypatch):
    """Import the user's module, with a configuration for each of its loaders."""
    Path("mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(own_folder))
    importlib.invalidate_caches()
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    module = importlib.import_module("mine")
    Path("conf/data").mkdir(parents=True)
    Path("conf/model").mkdir()
    for name in re.findall(r"^def (\w+)\(\):", MINE, re.MULTILINE):
        Path(f"conf/data/{name}.yaml").write_text(f"_target_: mine.{name}\n")
    Path("conf/model/mine.yaml").write_text("_target_: mine.Net\n")
    return module


def trained(folder, *words):
    assert cli.main([*QUIET, *words, f"hydra.run.dir={folder}"]) == 0
    return losses_of(folder), torch.load(Path(folder, "checkpoints/last.pt"), weights_only=True)


def losses_of(folder, metric="train/loss"):
    return [value for _, value in read_points(Path(folder))[metric]]


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
}


@pytest.mark.parametrize("name", HANDS)
def test_a_run_is_a_loop_by_hand(mine, name):
    losses, state = trained("run", f"data={name}", "train.batch_size=8")
    expected, model = HANDS[name](mine)
    assert losses == expected and len(set(losses)) == len(losses)
    assert all(map(torch.equal, state["model"].values(), model.state_dict().values()))


def test_own_loader_validation_split_is_used(mine):
    trained("run", "data=weighted")
    inputs, targets = mine.rows(1)
    model = mine.Net()
    model.load_state_dict(torch.load("run/checkpoints/last.pt", weights_only=True)["model"])
    with torch.no_grad():
        expected = float(F.cross_entropy(model(inputs), targets))
    assert losses_of("run", "val/loss")[-1] == pytest.approx(expected, rel=1e-6)
    assert cli.main(["evaluate", "run", "train.eval_batch_size=7"]) == 0


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [("weighted", 2), ("own_generator", 8), ("batches", 2), ("stream", 8), ("counted", 2), ("stateful", 8)],
)
def test_resume_within_epoch_equals_whole_run(mine, name, num_steps):
    words = [f"data={name}", "train.batch_size=8"]
    losses, whole = trained("whole", *words)
    trained("parts", *words, f"train.num_steps={num_steps}")
    mine.Stateful.reads_of.clear()
    assert cli.main(["resume", "parts", "train.num_steps=null"]) == 0
    found, state = losses_of("parts"), torch.load("parts/checkpoints/last.pt", weights_only=True)
    assert found == losses and len(losses) == {"batches": 9, "stateful": 24, "counted": 24}.get(
        name, 24 if "own" in name else 21
    )
    assert all(map(torch.equal, state["model"].values(), whole["model"].values()))
    if name == "stateful":  # two checks read its first batch; on resume, consumed batches are not read again
        assert len(mine.Stateful.reads_of) == 2 + 24 - num_steps


@pytest.mark.parametrize(
    ("name", "like", "num_steps"),
    [("endless", "stream", 21), ("endless_loader", "stream", 21), ("stateful_endless", "stateful", 24)],
)
def test_loader_without_a_length_repeats_bitwise(mine, name, like, num_steps):
    """Each repetition is like an epoch of a loader with a length, wherever the run was stopped."""
    words = ["train.batch_size=8", f"train.num_steps={num_steps}"]
    losses, whole = trained("known", f"data={like}", *words)
    assert trained("whole", f"data={name}", *words)[0] == losses and len(losses) == num_steps
    part = 2 if name == "endless" else 8
    trained("part", f"data={name}", words[0], f"train.num_steps={part}")
    assert cli.main(["resume", "part", words[1]]) == 0
    state = torch.load("part/checkpoints/last.pt", weights_only=True)
    assert losses_of("part") == losses
    assert all(map(torch.equal, state["model"].values(), whole["model"].values()))


def test_a_length_may_be_any_number(mine):
    """A loader without an end can report any length: nothing allocates memory per row."""
    assert (
        trained("run", "data=immense", "train.num_steps=2", "train.batch_size=8")[0]
        == trained("two", "data=endless", "train.num_steps=2", "train.batch_size=8")[0]
    )


def test_own_loader_draws_do_not_change_training(mine):
    words = ["model=mlp", "model.hidden_sizes=[8]", "model.dropout=0.5"]
    assert trained("one", "data=own_generator", *words)[0] == trained("two", "data=own_generator_drawing", *words)[0]


def test_two_processes_share_each_batch(mine, own_folder, warm):
    losses, _ = trained("alone", "data=weighted")
    words = [*QUIET, "data=weighted", "train.num_processes=2", "hydra.run.dir=shared"]
    with warm.command(own_folder, *words) as command:
        output, _ = command.communicate()
    assert command.returncode == 0, output
    assert losses_of("shared") == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["data=endless"],
            ["data=endless", "Endless has no length", "train.num_steps=1000", "define __len__ in Endless"],
        ),
        (["data=endless_beside"], ["data=endless_beside, val", "help: define __len__ in Endless"]),
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


def test_own_loader_beyond_length_gives_warning(mine, capfd):
    trained("run", "data=long", "train.batch_size=8")
    told = (
        "warning: Long has more than its length of 7 batches: the others are left out of each epoch; define `__len__`"
    )
    assert capfd.readouterr().out.count(told) == 1


def test_its_plan_reads_as_the_run_does(mine, warm_programs, capfd):
    assert cli.main(["plan", *QUIET, "data=weighted"]) == 0
    said = capfd.readouterr().out
    assert "streamed (your DataLoader, batches of 8;" in said and "8 in fp32; the largest" in said


def test_own_loader_plan_divides_batch_by_processes(mine, warm_programs, capfd):
    assert cli.main(["plan", *QUIET, "data=weighted", "train.num_processes=4", "--json"]) == 0
    said = capfd.readouterr()
    plan = json.loads(said.out)
    (inputs,) = (each for each in plan["placement"] if each["name"] == "batch[0]")
    assert inputs["shape"] == [2, 4] and plan["batch_size"] == plan["step"]["batch_size"] == 8
    assert "one of 4 processes, with 2 rows of each batch" in said.err


def test_own_loader_rows_are_printed(mine, capfd):
    trained("run", "data=weighted", "model=mlp", "model.hidden_sizes=[4]")
    said = capfd.readouterr().out + Path("run/runner.log").read_text()
    assert "weighted: 50 train, 60 val examples; streamed (your DataLoader, batches of 8;" in said
