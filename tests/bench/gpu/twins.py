"""Hand-written loops of the models that parts.py measures: resident data, fused optimizer, no logging, no checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: steps that compile, choose kernels and fill caches
WARM_STEPS = 20


@dataclass(frozen=True)
class Measured:
    """Seconds of a whole training, and of a step after the first ones."""

    seconds: float
    step_seconds: float


def train_gpt(
    model: nn.Module, *, vocab_size: int, context_length: int, batch_size: int, num_steps: int, is_compiled: bool
) -> Measured:
    """Train on random tokens in bf16 by AdamW with clipped gradients."""
    device = next(model.parameters()).device
    tokens = torch.randint(vocab_size, (2**20,), device=device)
    places = torch.arange(context_length + 1, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)

    def loss_of(rows: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(rows[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    loss_function = torch.compile(loss_of) if is_compiled else loss_of

    def step(_: int) -> None:
        starts = torch.randint(len(tokens) - context_length, (batch_size, 1), device=device)
        loss_function(tokens[starts + places]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return _timed(step, num_steps, device)


def train_cifar(
    model: nn.Module, *, shape: list[int], num_rows: int, batch_size: int, num_epochs: int, is_compiled: bool
) -> Measured:
    """Train on random images, flipped and moved by up to 2 pixels, by SGD with a cosine schedule and averaged weights."""
    device = next(model.parameters()).device
    images, targets = torch.rand(num_rows, *shape, device=device), torch.randint(10, (num_rows,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.85, weight_decay=5e-4, nesterov=True, fused=True)
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    num_batches = math.ceil(num_rows / batch_size)
    num_steps = num_batches * num_epochs
    order = torch.arange(num_rows, device=device)
    columns = torch.arange(shape[-1], device=device)

    def augment(x: Tensor) -> Tensor:
        n = len(x)
        x = torch.where(torch.rand(n, 1, 1, 1, device=device) < 0.5, x.flip(-1), x)
        padded = F.pad(x, (2, 2, 2, 2))
        rows = torch.randint(5, (n, 1), device=device) + columns
        cols = torch.randint(5, (n, 1), device=device) + columns
        index = torch.arange(n, device=device)[:, None, None]
        found: Tensor = padded.movedim(1, -1)[index, rows[:, :, None], cols[:, None, :]].movedim(-1, 1)
        return found

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(model(augment(x)), y, label_smoothing=0.2)
        return loss

    loss_function = torch.compile(loss_of) if is_compiled else loss_of

    def step(number: int) -> None:
        nonlocal order
        place = number % num_batches
        if place == 0:
            order = torch.randperm(num_rows, device=device)
        rows = order[place * batch_size : (place + 1) * batch_size]
        warm_up = num_steps // 10
        part = (number + 1) / warm_up if number < warm_up else 1 - (number - warm_up) / (num_steps - warm_up)
        rate = part if number < warm_up else 0.5 * (1 - math.cos(math.pi * part))
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * rate
        loss_function(images[rows], targets[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(averaged, list(model.parameters()), 0.05)

    return _timed(step, num_steps, device)


def _timed(step: Callable[[int], None], num_steps: int, device: torch.device) -> Measured:
    warm = min(WARM_STEPS, num_steps // 2)
    began = warmed = time.perf_counter()
    for number in range(num_steps):
        if number == warm:
            _wait(device)
            warmed = time.perf_counter()
        step(number)
    _wait(device)
    end = time.perf_counter()
    return Measured(end - began, (end - warmed) / (num_steps - warm))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
