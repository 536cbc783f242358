"""Well-known training programs on small seeded data: parts and overrides for the runner, and the loop that they replace."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Seeded(nn.Module):
    """Has the same initial weights in every instance."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.make()


class Digits(Seeded):
    """A CNN (pytorch/examples, mnist)."""

    def make(self):
        self.conv1, self.conv2, self.fc = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc(x.flatten(1)), dim=1)


def digits():
    x, y = torch.randn(136, 1, 12, 12, generator=seeded()), torch.randint(10, (136,), generator=seeded(1))
    train, val = TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:])
    return {"train": DataLoader(train, 32), "val": DataLoader(val, 32)}


def nll(model, batch):
    return F.nll_loss(model(batch[0]), batch[1])


class Words(Seeded):
    """An LSTM that carries its hidden state from batch to batch (pytorch/examples, word_language_model)."""

    def make(self):
        self.embedding, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 16), nn.Linear(16, 20)
        self.hidden = None

    def reset_state(self):
        self.hidden = None

    def forward(self, x):
        outputs, hidden = self.lstm(self.embedding(x), self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return self.out(outputs)


def words():
    """Return blocks of 5 tokens of each of 4 texts, in order; for validation, of 2 texts."""
    blocks = {}
    for name, num_texts in {"train": 4, "val": 2}.items():
        text = torch.randint(20, (51, num_texts), generator=seeded(num_texts))
        pairs = [(text[at : at + 5], text[at + 1 : at + 6]) for at in range(0, 50, 5)]
        blocks[name] = DataLoader(pairs, batch_size=None)
    return blocks


def next_word(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Vae(Seeded):
    """Noise in forward, which an evaluation must not use up, and a summed loss."""

    def make(self):
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
    outputs, mean, log_variance = model(batch[0])
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return F.binary_cross_entropy(outputs, batch[0], reduction="sum") + divergence


class Curve(Seeded):
    """A physics-informed network: u' = cos(x), u(0) = 0."""

    def make(self):
        self.body = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(x)


def places():
    train, val = torch.linspace(-3, 3, 40)[:, None], torch.rand(10, 1, generator=seeded())
    return {"train": DataLoader(train, 20), "val": DataLoader(val, 10)}


def residual(model, x):
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope - x.cos()).square().mean() + model(torch.zeros(1, 1)).square().sum()


residual.needs_grad = True


def loop(model, data, task, make_optimizer, *, num_epochs, clip=None, gamma=1.0):
    """Train by hand. Returns the loss of each step."""
    losses, optimizer = [], make_optimizer(model.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1, gamma=gamma)
    for _ in range(num_epochs):
        getattr(model, "reset_state", lambda: None)()
        for batch in data()["train"]:
            loss = task(model, batch)
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return losses


#: the overrides of a run, and the arguments of the loop
PROGRAMS = {
    "mnist": (
        "model._target_=programs.Digits data._target_=programs.digits task.function._target_=programs.nll "
        "optimizer._target_=torch.optim.Adadelta optimizer.lr=1.0 train.num_epochs=3 "
        "scheduler._target_=torch.optim.lr_scheduler.StepLR scheduler.step_size=1 scheduler.gamma=0.7",
        partial(loop, Digits(), digits, nll, partial(torch.optim.Adadelta, lr=1.0), num_epochs=3, gamma=0.7),
    ),
    "word_language_model": (
        "model._target_=programs.Words data._target_=programs.words task.function._target_=programs.next_word "
        "optimizer._target_=torch.optim.SGD optimizer.lr=5.0 train.num_epochs=2 train.clip_grad_norm=0.25 "
        "train.evaluate_every_steps=3",
        partial(loop, Words(), words, next_word, partial(torch.optim.SGD, lr=5.0), num_epochs=2, clip=0.25),
    ),
    "vae": (
        "model._target_=programs.Vae data._target_=programs.codes task.function._target_=programs.bound "
        "optimizer._target_=torch.optim.Adam optimizer.lr=0.001 train.num_epochs=3",
        partial(loop, Vae(), codes, bound, partial(torch.optim.Adam, lr=0.001), num_epochs=3),
    ),
    "pinn": (
        "model._target_=programs.Curve data._target_=programs.places task.function._target_=programs.residual "
        "optimizer._target_=torch.optim.Adam optimizer.lr=0.01 train.num_epochs=20",
        partial(loop, Curve(), places, residual, partial(torch.optim.Adam, lr=0.01), num_epochs=20),
    ),
}
