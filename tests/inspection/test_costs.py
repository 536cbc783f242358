"""The costs of a block of operations, compared with a count by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from runner.device.hardware import Speeds
from runner.inspection.costs import Costs
from runner.inspection.operations import observe

CPU = torch.device("cpu")
FLOAT = 4


def counted(call, **settings):
    costs = Costs(CPU, **settings)
    costs.phase, costs.part = "forward", "activations"
    with observe(costs):
        kept = call(costs)
    return costs, kept


def test_memory_is_what_lives_and_its_peak_is_kept():
    def call(costs):
        a = torch.ones(1000)
        b = a + 1
        del a
        c = b * 2
        del b
        return c

    costs, _ = counted(call)
    assert costs.now == {"activations": 1000 * FLOAT}
    assert costs.peak.num_bytes == 2000 * FLOAT


def test_views_and_writes_in_place_take_nothing():
    def call(costs):
        a = torch.zeros(100, 10)
        a.view(-1)[3:].add_(1)
        return a.t().expand(3, 10, 100)

    costs, kept = counted(call)
    assert costs.peak.num_bytes == 1000 * FLOAT
    del kept
    assert costs.now == {}


def test_a_training_step_by_part():
    model = nn.Linear(20, 30, bias=False)
    costs = Costs(CPU)
    costs.belongs(model.parameters(), "weights")
    costs.hold("data set", 500)
    costs.phase, costs.part = "forward", "activations"
    model.weight.register_post_accumulate_grad_hook(lambda weight: costs.belongs([weight.grad], "gradients"))
    with observe(costs):
        loss = model(torch.ones(5, 20)).square().sum()
        loss.backward()
    del loss
    assert costs.now == {"weights": 600 * FLOAT, "data set": 500, "gradients": 600 * FLOAT}
    assert costs.peak.phase == "backward"
    assert costs.flops == {"forward": 2 * 5 * 20 * 30, "backward": 2 * 5 * 20 * 30}  # no gradient for the inputs
    assert costs.peak.parts["temporaries"] > 0


def test_time_at_the_roofline_takes_the_slower_side_of_each_operation():
    speeds = Speeds({"fp32": 1e9}, memory_bytes_per_second=1e6)

    def call(costs):
        left, right = torch.ones(100, 100), torch.ones(100, 100)
        costs.forget_work()
        return left @ right, left + right

    costs, _ = counted(call, speeds=speeds)
    product, addition = 2e6 / 1e9, 3 * 10_000 * FLOAT / 1e6
    assert costs.num_kernels == 2
    assert costs.compute_seconds == pytest.approx(product)
    assert costs.memory_seconds == pytest.approx(2 * addition)
    # the product moves the same number of bytes, and computes in less time
    assert costs.roofline_seconds == pytest.approx(2 * addition)


def test_convolutions_may_have_their_own_speed():
    speeds = Speeds({"fp32": 1e6, "tf32": 4e6}, memory_bytes_per_second=1e12)

    def seconds(**settings):
        convolve = partial(torch.conv2d, torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2))
        return counted(lambda _: convolve(), speeds=speeds, **settings)[0].compute_seconds

    assert seconds(cudnn_tf32=True) == pytest.approx(seconds(tf32=True)) == pytest.approx(seconds() / 4)


def test_speeds_by_type():
    speeds = Speeds({"fp32": 1.0, "tf32": 2.0, "bf16": 3.0})
    assert speeds.flops_of(torch.float32, tf32=False) == 1
    assert speeds.flops_of(torch.float32, tf32=True) == 2
    assert speeds.flops_of(torch.bfloat16, tf32=False) == 3
    assert speeds.flops_of(torch.float16, tf32=False) == 1  # unknown: the slowest
    assert Speeds().flops_of(torch.float32, tf32=False) is None
