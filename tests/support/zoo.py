"""Architectures that plan was not written for, each with a model, a batch on the host and a task, and plan's expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

ROWS, CLASSES = 8, 10
GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape):
    return torch.randn(ROWS, *shape, generator=GENERATOR)


def whole(most, *shape):
    return torch.randint(most, (ROWS, *shape), generator=GENERATOR)


def classes():
    return whole(CLASSES)


def classify(model, batch):
    inputs, targets = batch
    return {"loss": F.cross_entropy(model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets)}


# ---- attention and recurrence


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


# ---- functions


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


# ---- optimizers


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


class Wide(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x):
        return self.layers(x)


class Scaled(Wide):
    """Reads a value, and only computes with it."""

    def forward(self, x):
        most = x.abs().max().item()  # <- scaled
        return super().forward(x / (2 * most) + 1 / most)


# ---- control flow that depends on values


class Branching(Wide):
    def forward(self, x):
        if x.sum() > 0:  # <- branch
            x = -x
        return super().forward(x)


class Nonzero(Wide):
    def forward(self, x):
        y = super().forward(x)
        return y + y.flatten()[torch.nonzero(y.flatten() > 0)].mean()  # <- nonzero


class SizeOf(Wide):
    def forward(self, x):
        width = int(x[0, 0].abs() * 8) + 1  # <- size
        return super().forward(x) + torch.ones(width, device=x.device).mean()


class Masking(Wide):
    def forward(self, x):
        y = super().forward(x)
        good = y[y[:, 0] > 0]  # <- mask
        return y + good.mean()


class Unique(Wide):
    def forward(self, x):
        y = super().forward(x)
        return y + torch.unique((y * 8).round().detach()).mean()  # <- unique


class Waiting(Wide):
    def forward(self, x):
        y = x
        while y.norm() > 1:  # <- while
            y = y / 2
        return super().forward(y)


class Ranging(Wide):
    def forward(self, x):
        for _ in range(x.argmax() % 3):  # <- range
            x = x / 2
        return super().forward(x)


class Selecting(Wide):
    def forward(self, x):
        y = super().forward(x)
        return y + torch.masked_select(y, y > 0).mean()  # <- masked_select


class Repeating(Wide):
    def forward(self, x):
        counts = (x[:, 0] > 0).long() + 1
        return super().forward(x) + x.repeat_interleave(counts, 0).mean()  # <- repeat


class Counting(Wide):
    def forward(self, x):
        return super().forward(x) + torch.bincount(x.argmax(1)).float().mean()  # <- bincount


class Where(Wide):
    def forward(self, x):
        rows, columns = torch.where(x > 0)  # <- where
        return super().forward(x) + x[rows, columns].mean()


class Experts(Wide):
    """A mixture in its most common form: each expert receives its rows."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(-1)  # <- experts
            out = out.index_add(0, rows, expert(x[rows]))
        return super().forward(out)


class Padded(Wide):
    """The lengths are on the device."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 64, batch_first=True)

    def forward(self, x):
        lengths = (x > 0).sum(1).clamp(min=1).cpu()
        packed = rnn.pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False)  # <- lengths
        return super().forward(self.gru(packed)[1][0])


# ---- the table


def vectors():
    return numbers(64), classes()


@dataclass(frozen=True)
class Case:
    """waits: The marks of lines that read the device or wait for it; "torch" for lines in torch's code.

    The name of a case of BY_VALUES is the mark of the line that must be reported.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any] = vectors
    task: Callable[..., Any] = classify
    optimizer: str = "adam"
    waits: tuple[str, ...] = ()


SOUND = [
    Case("packed", Packed, lambda: (whole(100, 32), classes()), waits=("packing", "unpacking")),
    Case("decoder", Rotary, lambda: (whole(100, 64), classes())),
    Case("functional", Functional, lambda: (numbers(16), classes())),
    Case("dropping", Dropping, lambda: (numbers(4, 64), classes())),
    Case("scaled", Scaled, waits=("scaled",)),
    Case("lion", Wide, optimizer="lion"),
    Case("adafactor", Wide, optimizer="adafactor", waits=("torch",)),
]

BY_VALUES = [
    Case("branch", Branching),
    Case("mask", Masking),
    Case("nonzero", Nonzero),
    Case("unique", Unique),
    Case("size", SizeOf),
    Case("while", Waiting),
    Case("range", Ranging),
    Case("masked_select", Selecting),
    Case("repeat", Repeating),
    Case("bincount", Counting),
    Case("where", Where),
    Case("experts", Experts),
    Case("lengths", Padded),
]

OPTIMIZERS = {"adam": "torch.optim.Adam", "adafactor": "torch.optim.Adafactor", "lion": "zoo.Lion"}


def words(optimizer, precision):
    """Return the overrides of a run, except for its case."""
    groups = [f"{group}=zoo" for group in ("model", "task", "data")]
    return [*groups, f"optimizer=zoo_{optimizer}", f"train.precision={precision}", "data.num_workers=0"]


def write_conf(folder):
    for group in ("model", "task", "data"):
        name = "case" if group == "data" else "name"
        (folder / "conf" / group).mkdir(parents=True, exist_ok=True)
        (folder / "conf" / group / "zoo.yaml").write_text(f"_target_: zoo.{group}\n{name}: ???\n")
    (folder / "conf" / "optimizer").mkdir(exist_ok=True)
    for name, target in OPTIMIZERS.items():
        text = f"_target_: {target}\n_partial_: true\nlr: 0.001\n".replace(", ", "\n")
        (folder / "conf" / "optimizer" / f"zoo_{name}.yaml").write_text(text)


def case_of(name):
    return next(case for case in (*SOUND, *BY_VALUES) if case.name == name)


def model(name):
    """Return a case's model, for conf/model/zoo.yaml."""
    return case_of(name).make()


def task(name):
    return case_of(name).task


def data(case):
    return {"train": Given(case_of(case).batch), "val": Given(case_of(case).batch)}


class Given(torch.utils.data.Dataset):
    """Its collate_fn creates the task's batches."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return index

    def collate_fn(self, _):
        return self.batch()


def marked_line(name: str) -> str:
    """Return `zoo.py:42`, the line that ends with `# <- name`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (index for index, line in enumerate(lines, 1) if line.endswith(f"# <- {name}"))
    return f"{Path(__file__).name}:{number}"
