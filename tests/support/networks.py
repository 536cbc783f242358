"""Networks like those of users, for plans of their memory; each has the inputs and outputs of the data."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else nn.Identity()

    def forward(self, x):
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.short(x)).relu()


class ResNet(nn.Module):
    """For images, (B, 3, 32, 32)."""

    def __init__(self, outputs, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, outputs)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    """For sequences of numbers, (B, T, D)."""

    def __init__(self, size, outputs, width=64, heads=4, depth=3):
        super().__init__()
        self.lift = nn.Linear(size, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.layers(self.lift(x)).mean(1))


class Lstm(nn.Module):
    """For sequences of numbers, (B, T, D)."""

    def __init__(self, size, outputs, width=64):
        super().__init__()
        self.lstm = nn.LSTM(size, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Own(nn.Module):
    """Parts that no library has: gates, a memory that is read by attention, shared weights."""

    def __init__(self, size, outputs, width=96, slots=32):
        super().__init__()
        self.encode = nn.Linear(size, width)
        self.gate = nn.Linear(width, width)
        self.memory = nn.Parameter(torch.randn(slots, width) * 0.1)
        self.register_buffer("mean", torch.zeros(width))
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        h = F.silu(self.encode(x)).mean(1) - self.mean
        for _ in range(3):
            read = F.scaled_dot_product_attention(h[:, None, None], self.memory[None, None], self.memory[None, None])
            h = h + torch.sigmoid(self.gate(h)) * read[:, 0, 0]
        if self.training:
            self.mean.lerp_(h.detach().mean(0), 0.01)
        return self.head(h)
