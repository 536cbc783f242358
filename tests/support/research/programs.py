"""Well-known training programs on small seeded data: parts for the runner, and the hand-written loop that each replaces.

The programs are those of pytorch/examples and of papers that every tutorial has; the code is written here. A loop returns the
loss of each step.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Seeded(nn.Module):
    """Has the same initial weights in every instance."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.make()


def stepped(optimizer, loss) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# mnist: a CNN, nll_loss, Adadelta, the rate falls by a factor of 0.7 after each epoch


class Digits(Seeded):
    def make(self) -> None:
        self.conv1, self.conv2, self.fc = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def digits():
    x, y = torch.randn(136, 1, 12, 12, generator=seeded()), torch.randint(10, (136,), generator=seeded(1))
    return {
        "train": DataLoader(TensorDataset(x[:100], y[:100]), 32),
        "val": DataLoader(TensorDataset(x[100:], y[100:]), 32),
    }


def nll(model, batch):
    return F.nll_loss(model(batch[0]), batch[1])


def mnist_loop():
    model, losses = Digits(), []
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(3):
        losses += [stepped(optimizer, F.nll_loss(model(x), y)) for x, y in digits()["train"]]
        scheduler.step()
    return losses


MNIST = """
model._target_=programs.Digits data._target_=programs.digits task=own task.function._target_=programs.nll
optimizer._target_=torch.optim.Adadelta optimizer.lr=1.0 scheduler._target_=torch.optim.lr_scheduler.StepLR
scheduler.step_size=1 scheduler.gamma=0.7 train.num_epochs=3
"""

# word_language_model: an LSTM that carries its hidden state from batch to batch, clipped gradients


class Words(Seeded):
    def make(self) -> None:
        self.embedding, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 16), nn.Linear(16, 20)
        self.hidden = None

    def reset_state(self) -> None:
        self.hidden = None

    def forward(self, x):
        found, hidden = self.lstm(self.embedding(x), self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.out(found)


def words():
    """Return blocks of 5 tokens of each of 4 texts, in order; for validation, of 2 texts."""
    blocks = {}
    for name, texts in {"train": 4, "val": 2}.items():
        text = torch.randint(20, (51, texts), generator=seeded(texts))
        blocks[name] = DataLoader(
            [(text[at : at + 5], text[at + 1 : at + 6]) for at in range(0, 50, 5)], batch_size=None
        )
    return blocks


def next_word(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def word_language_model_loop():
    model, losses = Words(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    for _ in range(2):
        hidden = None
        for x, y in words()["train"]:
            found, hidden = model.lstm(model.embedding(x), hidden)
            hidden = tuple(part.detach() for part in hidden)
            loss = F.cross_entropy(model.out(found).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
    return losses


WORD_LANGUAGE_MODEL = """
model._target_=programs.Words data._target_=programs.words task=own task.function._target_=programs.next_word
optimizer._target_=torch.optim.SGD optimizer.lr=5.0 train.num_epochs=2 train.clip_grad_norm=0.25
train.evaluate_every_steps=3
"""

# regression: an endless stream of random points of a polynomial


class Polynomial(Seeded):
    def make(self) -> None:
        self.line = nn.Linear(4, 1)

    def forward(self, x):
        return self.line(x)


class Points(IterableDataset):
    def __iter__(self):
        draws = seeded()
        while True:
            x = torch.randn(32, generator=draws)
            powers = torch.stack([x**power for power in range(1, 5)], dim=1)
            yield powers, powers @ torch.tensor([[1.0], [-2.0], [0.5], [0.25]]) + 1.5


def points():
    return DataLoader(Points(), batch_size=None)


def smooth(model, batch):
    return F.smooth_l1_loss(model(batch[0]), batch[1])


def regression_loop():
    model, losses = Polynomial(), []
    for x, y in islice(points(), 60):
        loss = F.smooth_l1_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        losses.append(loss.item())
    return losses


REGRESSION = """
model._target_=programs.Polynomial data._target_=programs.points task=own
task.function._target_=programs.smooth optimizer._target_=torch.optim.SGD optimizer.lr=0.1 train.num_steps=60
"""

# vae: noise in forward, a summed loss


class Vae(Seeded):
    def make(self) -> None:
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)
        self.noise = seeded(3)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        drawn = torch.randn(mean.shape, generator=self.noise)
        return torch.sigmoid(self.decode(mean + drawn * (0.5 * log_variance).exp())), mean, log_variance


def codes():
    x = torch.rand(96, 16, generator=seeded())
    return {"train": DataLoader(TensorDataset(x[:80]), 16), "val": DataLoader(TensorDataset(x[80:]), 16)}


def bound(model, batch):
    found, mean, log_variance = model(batch[0])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return F.binary_cross_entropy(found, batch[0], reduction="sum") + divergence


def vae_loop():
    model, losses = Vae(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for _ in range(4):
        losses += [stepped(optimizer, bound(model, batch)) for batch in codes()["train"]]
    return losses


VAE = """
model._target_=programs.Vae data._target_=programs.codes task=own task.function._target_=programs.bound
optimizer._target_=torch.optim.Adam optimizer.lr=0.001 train.num_epochs=4
"""

# SimCLR: two views of each image as a list, a loss over all pairs of a batch, the rate falls by a cosine of the epochs


class Views(Seeded):
    def make(self) -> None:
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


def views():
    x = torch.randn(64, 16, generator=seeded())
    noise = torch.randn(2, 64, 16, generator=seeded(1))
    return DataLoader([[a, b] for a, b in zip(x + 0.1 * noise[0], x + 0.1 * noise[1], strict=True)], 16)


def contrast(model, views):
    found = model(torch.cat(list(views)))
    near = (found @ found.T / 0.1).masked_fill(torch.eye(len(found), dtype=torch.bool), float("-inf"))
    return F.cross_entropy(near, torch.arange(len(found)).roll(len(found) // 2))


def simclr_loop():
    model, losses = Views(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, weight_decay=1e-4)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    for _ in range(5):
        losses += [stepped(optimizer, contrast(model, batch)) for batch in views()]
        scheduler.step()
    return losses


SIMCLR = """
model._target_=programs.Views data._target_=programs.views task=own task.function._target_=programs.contrast
optimizer._target_=torch.optim.Adam optimizer.lr=0.003 optimizer.weight_decay=1.0e-4
scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingLR scheduler.T_max=5 train.num_epochs=5
"""

# PINN: the loss has derivatives of the model by its inputs: u' = cos(x), u(0) = 0


class Curve(Seeded):
    def make(self) -> None:
        self.body = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(x)


def places():
    return {
        "train": DataLoader(torch.linspace(-3, 3, 40)[:, None], 20),
        "val": DataLoader(torch.rand(10, 1, generator=seeded()), 10),
    }


def residual(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope - x.cos()).square().mean() + model(torch.zeros(1, 1)).square().sum()


residual.needs_grad = True


def pinn_loop():
    model, losses = Curve(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        losses += [stepped(optimizer, residual(model, x)) for x in places()["train"]]
    return losses


PINN = """
model._target_=programs.Curve data._target_=programs.places task=own task.function._target_=programs.residual
optimizer._target_=torch.optim.Adam optimizer.lr=0.01 train.num_epochs=30
"""

# time_sequence_prediction: float64, LBFGS on the whole set


class Waves(Seeded):
    def make(self) -> None:
        self.first, self.second, self.out = nn.LSTMCell(1, 8), nn.LSTMCell(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        first = second = None
        found = []
        for value in x.split(1, dim=1):
            first = self.first(value, first)
            second = self.second(first[0], second)
            found.append(self.out(second[0]))
        return torch.cat(found, dim=1)


def sines():
    shifts = torch.randint(-80, 80, (12, 1), generator=seeded())
    waves = torch.sin((torch.arange(12) + shifts) / 4.0).double()
    return DataLoader(TensorDataset(waves[:, :-1], waves[:, 1:]), 12)


def squares(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def time_sequence_loop():
    model, losses = Waves().double(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
    [(x, y)] = sines()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        losses.append(optimizer.step(closure).item())
    return losses


TIME_SEQUENCE = """
model._target_=programs.Waves data._target_=programs.sines task=own task.function._target_=programs.squares
optimizer._target_=torch.optim.LBFGS optimizer.lr=0.8 train.precision=fp64 train.num_epochs=2
"""
