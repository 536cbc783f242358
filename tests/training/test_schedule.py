"""The built-in schedules."""

import math

import pytest
import torch

from runner.training.schedule import Schedule, warmup_cosine


def test_warmup_cosine_rises_then_falls():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = warmup_cosine(optimizer, num_steps=100, warmup_fraction=0.1, final_fraction=0.2)
    rates = []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_cyclic_rates_are_halved():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    cyclic = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, step_size_up=4, cycle_momentum=False)
    Schedule(cyclic).scale(0.5)
    rates = []
    for _ in range(8):
        optimizer.step()
        cyclic.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert (max(rates), min(rates)) == (pytest.approx(0.25), pytest.approx(0.05))
