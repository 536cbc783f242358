"""Models for plan and guard: with a misplaced tensor, without an error, and with operations that depend on values.

A line that ends with `# <- name` is the one that must be reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

ROWS, WIDTH, CLASSES = 8, 6, 3


def numbers(*shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))


def whole(most, *shape):
    return torch.randint(most, (ROWS, *shape), generator=torch.Generator().manual_seed(0))


def rows():
    return numbers(WIDTH), whole(CLASSES)


def classify(model, batch):
    inputs, targets = batch
    return {"loss": F.cross_entropy(model(inputs), targets)}


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.linear(x)


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


class Positions(Linear):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, CLASSES)

    def forward(self, x):
        positions = torch.arange(WIDTH)
        return self.linear(x) + self.embedding(positions).mean(0)  # <- positions


class NoDevice(Linear):
    def forward(self, x):
        noise = torch.zeros(CLASSES)
        return super().forward(x) + noise  # <- no device


class Double(Linear):
    def forward(self, x):
        shift = torch.full((CLASSES,), 0.1, dtype=torch.float64, device=x.device)  # <- float64
        return super().forward(x) + shift.float()


class Item(Linear):
    def forward(self, x):
        return super().forward(x) / x.detach().abs().max().item()  # <- item


class Reassigned(Linear):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x):
        self.mean = torch.zeros(CLASSES)
        return self.linear(x) - self.mean  # <- re-assigned


def masked_loss():
    mask = torch.ones(ROWS)

    def task(model, batch):
        inputs, targets = batch
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        return {"loss": (losses * mask).mean()}  # <- closure

    return task


def loss_by_numpy(model, batch):
    inputs, targets = batch
    logits = model(inputs)
    right = (logits.argmax(-1) == targets).cpu().numpy().mean()  # <- numpy
    return {"loss": F.cross_entropy(logits, targets), "right": torch.full((), float(right))}


class Bag:
    """A part of a batch that is not a dict, list, tuple or dataclass, so the runner does not look into it."""

    def __init__(self, tensors):
        self.tensors = tensors


def bag():
    x, y = rows()
    return {"inputs": x, "bag": Bag([y])}


def classify_bag(model, batch):
    return {"loss": F.cross_entropy(model(batch["inputs"]), batch["bag"].tensors[0])}  # <- bag


@dataclass(frozen=True)
class Case:
    """make_task: Returns the task. kind, path, device: Of the expected finding; its line is the marked one.

    waits: The marks of lines that read the device or wait for it; "torch" for lines in torch's code.
    """

    name: str
    make: Callable[[], nn.Module]
    path: str = ""
    kind: str = "mixed devices"
    device: str = "cuda:1"
    make_task: Callable[[], Any] = lambda: classify
    batch: Callable[[], Any] = rows
    waits: tuple[str, ...] = ()


WRONG = [
    Case("attribute", lambda: nn.Sequential(nn.Identity(), Attribute()), path="model.1.scale"),
    Case("plain list", PlainList, path="model.layers[0].weight"),
    Case("positions", Positions, path="positions"),
    Case("no device", NoDevice, path="noise"),
    Case("float64", Double, kind="dtype", device="mps"),
    Case("item", Item, kind="host read"),
    Case("re-assigned", Reassigned, path="model.mean"),
    Case("closure", Linear, path="mask", make_task=masked_loss),
    Case("numpy", Linear, kind="host read", make_task=lambda: loss_by_numpy),
    Case("bag", Linear, path="batch['bag'].tensors[0]", make_task=lambda: classify_bag, batch=bag),
]


# models without an error


class Sound(Linear):
    """Buffers that are written in place, numbers on the host, which torch copies, and new tensors on the batch's device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.embedding = nn.Embedding(WIDTH, CLASSES)
        self.temperature = torch.tensor(2.0)

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        y = super().forward(x) / self.temperature + self.embedding(positions).mean(0) + x.new_zeros(CLASSES)
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return (y - self.mean).masked_fill(y < -100.0, 0.0)


def classify_dict(model, batch):
    logits = model(batch["inputs"])
    losses = F.cross_entropy(logits, batch["targets"], reduction="none", label_smoothing=0.1)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == batch["targets"]).float().mean()
    return {"loss": (losses * batch["mask"]).sum() / batch["mask"].sum(), "accuracy": accuracy}


def as_dict():
    x, y = rows()
    return {"inputs": x, "targets": y, "mask": torch.ones(ROWS)}


SOUND = [Case("sound", Sound), Case("a dict with a mask", Linear, make_task=lambda: classify_dict, batch=as_dict)]


# architectures that plan was not written for


class Packed(nn.Module):
    """The lengths are on the host, as a list."""

    def __init__(self, width=48):
        super().__init__()
        self.embedding = nn.Embedding(100, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.lstm = nn.LSTM(2 * width, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        lengths = [max(1, tokens.shape[1] - row) for row in range(tokens.shape[0])]
        embedded = self.embedding(tokens)
        packed = rnn.pack_padded_sequence(embedded, lengths, True, enforce_sorted=False)  # <- packing
        padded, _ = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)  # <- unpacking
        return self.head(self.lstm(padded)[0].mean(1))


class Rotary(nn.Module):
    """A decoder in today's style: rotated queries, grouped heads, RMSNorm, SwiGLU, tied weights."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(100, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv = nn.Linear(width, width + width, bias=False)
        self.gate, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        frequencies = 1e4 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens):
        rows, steps = tokens.shape
        x = self.embedding(tokens)
        angles = torch.outer(torch.arange(steps, device=x.device), self.frequencies)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k, v = self.qkv(self.norms[0](x)).split([64, 32, 32], -1)
        q, k, v = (part.view(rows, steps, -1, 16).transpose(1, 2) for part in (q, k, v))
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.float().unflatten(-1, (-1, 2))) * turn).flatten(3).to(v.dtype)
            for part in (q, k)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + h.transpose(1, 2).reshape(rows, steps, -1)
        gate, up = self.gate(self.norms[1](x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return F.linear(x, self.embedding.weight).mean(1)


class Functional(nn.Module):
    """Gradients inside the model: an inner training step for each row, and a derivative with respect to the input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.energy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        weights = dict(self.inner.named_parameters())

        def loss(weights, row):
            return (torch.func.functional_call(self.inner, weights, (row,)) - row).square().mean()

        def adapted(row):
            grads = torch.func.grad(loss)(weights, row)
            moved = {name: weights[name] - 0.1 * grads[name] for name in weights}
            return torch.func.functional_call(self.inner, moved, (row,))

        h = torch.func.vmap(adapted)(x)
        with torch.enable_grad():
            h = h if h.requires_grad else h.requires_grad_()
            (force,) = torch.autograd.grad(self.energy(h).sum(), h, create_graph=self.training)
        return self.head(h - force)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(4, 16, 3, padding=1)
        self.drops = nn.ModuleList(
            [nn.Dropout(), nn.Dropout1d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.RReLU(), nn.Softplus()]
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.lift(x)
        for drop in self.drops:
            x = drop(x)
        if self.training:
            keep = torch.empty(len(x), 1, 1, device=x.device).bernoulli_(0.9)
            x = x * keep / 0.9 + torch.randn_like(x) * 0.1 + torch.rand_like(x)
            x = x[torch.randperm(len(x), device=x.device)]
        return F.gumbel_softmax(self.head(F.glu(torch.cat((x, x), 1), 1).mean(-1)), tau=0.5)


class Lion(torch.optim.Optimizer):
    """Updates by the sign of a mean (Chen et al. 2023), written like a user's optimizer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter.add_(mean.lerp(parameter.grad, 1 - first).sign_(), alpha=-group["lr"])
                mean.lerp_(parameter.grad, 1 - second)


class Scaled(Linear):
    """Reads a value, and only computes with it."""

    def forward(self, x):
        most = x.abs().max().item()  # <- scaled
        return super().forward(x / (2 * most) + 1 / most)


#: for plans only: the guard would report the waits
UNUSUAL = [
    Case("packed", Packed, batch=lambda: (whole(100, 32), whole(CLASSES)), waits=("packing", "unpacking")),
    Case("decoder", Rotary, batch=lambda: (whole(100, 64), whole(CLASSES))),
    Case("functional", Functional, batch=lambda: (numbers(16), whole(CLASSES))),
    Case("dropping", Dropping, batch=lambda: (numbers(4, 64), whole(CLASSES))),
    Case("scaled", Scaled, waits=("scaled",)),
    Case("lion", Linear),
    Case("adafactor", Linear, waits=("torch",)),
]
OPTIMIZERS = {"lion": "judged.Lion", "adafactor": "torch.optim.Adafactor"}


# operations that depend on values: functions of a model's inputs and outputs


def branch(x, y):
    if x.sum() > 0:  # <- branch
        return -y
    return y


def wait(x, y):
    while y.norm() > 1:  # <- while
        y = y / 2
    return y


def count_up(x, y):
    for _ in range(x.argmax() % 3):  # <- range
        y = y / 2
    return y


def size(x, y):
    width = int(x[0, 0].abs() * 8) + 1  # <- size
    return torch.ones(width, device=x.device).mean()


def mask(x, y):
    return y[y[:, 0] > 0].mean()  # <- mask


def nonzero(x, y):
    return y.flatten()[torch.nonzero(y.flatten() > 0)].mean()  # <- nonzero


def unique(x, y):
    return torch.unique((y * 8).round().detach()).mean()  # <- unique


def select(x, y):
    return torch.masked_select(y, y > 0).mean()  # <- masked_select


def repeat(x, y):
    return x.repeat_interleave((x[:, 0] > 0).long() + 1, 0).mean()  # <- repeat


def count(x, y):
    return torch.bincount(x.argmax(1)).float().mean()  # <- bincount


def where(x, y):
    rows, columns = torch.where(x > 0)  # <- where
    return x[rows, columns].mean()


def pack(x, y):
    lengths = (x > 0).sum(1).clamp(min=1).cpu()
    return rnn.pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False).data.mean()  # <- lengths


class ByValues(Linear):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = super().forward(x)
        return y + self.change(x, y)


#: by the mark of the line that must be reported, with the name of the operation in the report
BY_VALUES = {
    "branch": (branch, "bool(tensor)"),
    "while": (wait, "bool(tensor)"),
    "range": (count_up, "a tensor used as an index"),
    "size": (size, "int(tensor)"),
    "mask": (mask, "tensor[mask]"),
    "nonzero": (nonzero, "nonzero()"),
    "unique": (unique, "unique()"),
    "masked_select": (select, "masked_select()"),
    "repeat": (repeat, "repeat_interleave()"),
    "bincount": (count, "bincount()"),
    "where": (where, "torch.where(mask)"),
    "lengths": (pack, "pack_padded_sequence()"),
}


def case_of(name):
    if name in BY_VALUES:
        return Case(name, lambda: ByValues(BY_VALUES[name][0]))
    return next(case for case in (*WRONG, *SOUND, *UNUSUAL) if case.name == name)


def model(name):
    """Return a case's model, for conf/model/judged.yaml."""
    return case_of(name).make()


def task(name):
    return case_of(name).make_task()


def data(case):
    """Return arrays, or a Dataset whose collate_fn creates the task's batches."""
    batch = case_of(case).batch
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
