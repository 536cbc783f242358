import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from runner.optim import AveragedWeights, make_optimizer, warmup_cosine


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_the_fused_kernel_is_taken_where_nobody_says_otherwise():
    assert (
        make_optimizer(partial(torch.optim.Adam, lr=0.1), model(), device=torch.device("cpu")).defaults["fused"] is True
    )


@pytest.mark.parametrize("asked", [{"fused": False}, {"foreach": True}])
def test_what_yaml_says_of_the_kernel_wins(asked):
    optimizer = make_optimizer(partial(torch.optim.Adam, **asked), model(), device=torch.device("cpu"))
    assert all(optimizer.defaults[name] == value for name, value in asked.items())
    assert optimizer.defaults["fused"] is not True


def test_an_optimizer_without_a_fused_kernel_is_made_plainly():
    assert isinstance(make_optimizer(torch.optim.Rprop, model(), device=torch.device("cpu")), torch.optim.Rprop)


def test_frozen_parameters_stay_out():
    net = model()
    net[0].requires_grad_(False)
    optimizer = make_optimizer(torch.optim.SGD, net, device=torch.device("cpu"))
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_warmup_cosine_rises_then_falls_to_its_end():
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
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


def test_averaged_weights_follow_the_formula_and_copy_counts():
    net = model()
    average = AveragedWeights(net, decay=0.9)
    expected = copy.deepcopy(net.state_dict())
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
            net[1].num_batches_tracked.add_(1)
        average.update()
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                expected[name] += 0.1 * (value - expected[name])
            else:
                expected[name] = value.clone()
    for name, value in average.model.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
