"""Models with an error in the placement of their tensors, and models without, for tests of plan and guard.

A line that ends with `# <- name` is the one that must be reported. The zoo has larger models without an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, CLASSES = 8, 6, 3


def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def classify(model, batch):
    inputs, targets = batch
    return {"loss": F.cross_entropy(model(inputs), targets)}


class Net(nn.Module):
    """A body, followed by the head's changes."""

    def __init__(self, head=None):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = head or nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)


# models with an error


class Attribute(Linear):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(CLASSES)

    def forward(self, x):
        return self.scale * self.linear(x)  # <- attribute


class PlainList(nn.Module):
    def __init__(self):
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
        self.layers = [layer.requires_grad_(False) for layer in layers]  # parameters with gradients are refused earlier
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)  # <- plain list
        return x + self.bias


class NoDevice(Linear):
    def forward(self, x):
        noise = torch.zeros(CLASSES)
        return self.linear(x) + noise  # <- no device


class Sample:
    """A batch that is not a dict, list, tuple or dataclass, so the runner does not look into it."""

    def __init__(self, inputs, target):
        self.inputs, self.target = inputs, target


def classify_sample(model, batch):
    return {"loss": F.cross_entropy(model(batch["inputs"]), batch["sample"].target)}  # <- target


def masked_loss():
    mask = torch.ones(ROWS)

    def task(model, batch):
        inputs, targets = batch
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        return {"loss": (losses * mask).mean()}  # <- closure

    return task


class Double(Linear):
    def forward(self, x):
        shift = torch.full((CLASSES,), 0.1, dtype=torch.float64, device=x.device)  # <- float64
        return self.linear(x) + shift.float()


class Item(Linear):
    def forward(self, x):
        return self.linear(x) / x.detach().abs().max().item()  # <- item


def loss_by_numpy(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    right = (logits.argmax(-1) == targets).cpu().numpy().mean()  # <- numpy
    return {"loss": F.cross_entropy(logits, targets), "right": torch.full((), float(right))}


class Reassigned(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        self.mean = torch.zeros(CLASSES)
        return self.linear(x) - self.mean  # <- re-assigned


class Frozen(Linear):
    def __init__(self):
        super().__init__()
        self.start = self.linear.weight.detach().clone()

    def forward(self, x):
        return self.linear(x) - F.linear(x, self.start)  # <- frozen copy


class Positions(Linear):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, CLASSES)

    def forward(self, x):
        positions = torch.arange(WIDTH)
        return self.linear(x) + self.embedding(positions).mean(0)  # <- positions


class Bag:
    def __init__(self, tensors):
        self.tensors = tensors


def classify_bag(model, batch):
    inputs, targets = batch["inputs"], batch["bag"].tensors
    return {"loss": F.cross_entropy(model(inputs), targets[0]) + 0 * targets[1].sum()}  # <- collate


def sample():
    x, y = rows()
    return {"inputs": x, "sample": Sample(x, y)}


def bag():
    x, y = rows()
    return {"inputs": x, "bag": Bag([y, torch.ones(ROWS)])}


@dataclass(frozen=True)
class Wrong:
    """kind and path: Of the finding; its line is the marked one."""

    name: str
    make: object
    kind: str = "mixed devices"
    path: str = ""
    device: str = "cuda:1"
    task: object = lambda: classify
    batch: object = rows


WRONG = [
    Wrong("attribute", lambda: Net(nn.Sequential(Attribute())), path="model.head.0.scale"),
    Wrong("plain list", PlainList, path="model.layers[0].weight"),
    Wrong("no device", NoDevice, path="noise"),
    Wrong("target", Net, path="batch['sample'].target", task=lambda: classify_sample, batch=sample),
    Wrong("closure", Net, path="mask", task=masked_loss),
    Wrong("float64", Double, kind="dtype", device="mps"),
    Wrong("item", Item, kind="host read"),
    Wrong("numpy", Net, kind="host read", task=lambda: loss_by_numpy),
    Wrong("re-assigned", Reassigned, path="model.mean"),
    Wrong("frozen copy", Frozen, path="model.start"),
    Wrong("positions", Positions, path="positions"),
    Wrong("collate", Net, path="batch['bag'].tensors[0]", task=lambda: classify_bag, batch=bag),
]


# models without an error


class Buffered(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(CLASSES))

    def forward(self, x):
        return self.linear(x) * self.scale


class OnDevice(Linear):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, CLASSES)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        return self.linear(x) + self.embedding(positions).mean(0) + x.new_zeros(CLASSES)


class Masked(Linear):
    def forward(self, x):
        y = self.linear(x)
        return y.masked_fill(y < -100.0, 0.0)


class Counting(Linear):
    """Adds a number on the host, which torch copies automatically."""

    def __init__(self):
        super().__init__()
        self.temperature = torch.tensor(2.0)

    def forward(self, x):
        return self.linear(x) / self.temperature / math.sqrt(WIDTH)


class Running(Linear):
    """Writes a buffer in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y - self.mean


def classify_dict(model, batch):
    logits = model(batch["inputs"])
    losses = F.cross_entropy(logits, batch["targets"], reduction="none", label_smoothing=0.1)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == batch["targets"]).float().mean()
    return {"loss": (losses * batch["mask"]).sum() / batch["mask"].sum(), "accuracy": accuracy}


def as_dict():
    x, y = rows()
    return {"inputs": x, "targets": y, "mask": torch.ones(ROWS)}


@dataclass(frozen=True)
class Sound:
    name: str
    make: object
    task: object = lambda: classify
    batch: object = rows


SOUND = [
    Sound("buffer", Buffered),
    Sound("made on the device", OnDevice),
    Sound("masked fill", Masked),
    Sound("a number", Counting),
    Sound("running mean", Running),
    Sound("a dict with a mask", Net, task=lambda: classify_dict, batch=as_dict),
]


def _case(name):
    return next(case for case in (*WRONG, *SOUND) if case.name == name)


def model(name):
    """Return a case's model, for conf/model/judged.yaml."""
    return _case(name).make()


def task(name):
    return _case(name).task()


def data(case):
    """Return arrays, or a Dataset whose collate_fn creates the task's batches."""
    batch = _case(case).batch
    if batch is rows:
        x, y = rows()
        return {"train": (x.repeat(4, 1), y.repeat(4)), "val": (x, y)}
    return {"train": Given(batch), "val": Given(batch)}


class Given(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index

    def collate_fn(self, _):
        return self.batch()


def marked_line(name: str) -> str:
    """Return `judged.py:42`, the line that ends with `# <- name`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (index for index, line in enumerate(lines, 1) if line.endswith(f"# <- {name}"))
    return f"{Path(__file__).name}:{number}"
