"""The operation that caused a value that is not finite: by its inputs, without intended infinities, in forward, backward and update."""

import math

import pytest
import torch
from torch import nn

from runner.device import layers
from runner.inspection.operations import observe
from runner.inspection.tensor_names import TensorNames
from runner.tools.explain.not_finite import NotFiniteObserver, Range, is_finite, range_of, rows_not_finite


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, -math.inf]))

    def forward(self, call, rows):
        return call(rows * self.scale, self)


def watched(call, rows, *, backward=False):
    """Return the cause in the result, or in the gradient of the scale."""
    net, names = Net(), TensorNames()
    names.model(net)
    names.batch(rows)
    observer = NotFiniteObserver(net, names)
    with observe(observer):
        observer.in_task = True
        found = net(call, rows)
        observer.in_task = False
        if backward:
            found.sum().backward()
    return observer.cause_of(net.scale.grad if backward else found)


def rows(value=0.0):
    return torch.tensor([[1.0, 2.0, 3.0], [1.0, value, 3.0]])


def line_of(origin):
    """Return its line in this file."""
    file, _, number = origin.line.rpartition(":")
    assert file.endswith("test_not_finite.py")
    return int(number)


def test_first_nonfinite_operation_is_found():
    record = watched(lambda x, net: (x.log() * 0 + 1).relu().sum(), rows())
    assert (record.name, record.origin().name) == ("sum", "log")
    origin = record.origin()
    assert (origin.phase, origin.module) == ("forward", "Net")
    assert line_of(origin) == test_first_nonfinite_operation_is_found.__code__.co_firstlineno + 1
    assert [(seen.argument, seen.made[0], seen.range.least) for seen in origin.inputs] == [("self", "mul", 0.0)]
    assert (origin.output.range.num_inf, origin.rows_not_finite.tolist()) == (1, [False, True])


def test_earlier_of_two_causes_is_named():
    origin = watched(lambda x, net: (x - 1).log() + x.log(), rows()).origin()
    assert [seen.made[0] for seen in origin.inputs] == ["sub"]


MEANT = {
    "masked": lambda x, net: x.masked_fill(x > 1, -math.inf),
    "full": lambda x, net: torch.full((3, 3), -math.inf).triu(1)[:2] + x,
    "a buffer": lambda x, net: x + net.mask,
    "where": lambda x, net: torch.where(x > 1, x, -math.inf),
}


@pytest.mark.parametrize("name", MEANT)
def test_literal_infinity_is_not_the_cause(name):
    def call(x, net):
        scores = MEANT[name](x, net)
        weights = scores.softmax(1)  # this part of the scores is finite
        return (weights * x).sum(1) + (scores - scores).sum(1)  # this part is not

    origin = watched(call, rows()).origin()
    assert (origin.name, origin.output.range.num_inf) == ("sub", 0)


def test_fully_masked_row_begins_in_softmax():
    origin = watched(lambda x, net: x.masked_fill(x == x, -math.inf).softmax(1) * x, rows()).origin()
    assert (origin.name, origin.inputs[0].made[0]) == ("softmax", "masked_fill")


def test_nonfinite_batch_value_begins_at_use():
    origin = watched(lambda x, net: x + 1, rows(math.inf)).origin()
    assert (origin.name, [seen.name for seen in origin.inputs]) == ("mul", ["batch", "model.scale"])


def test_uninitialized_memory_is_ignored():
    def call(x, net):
        found = torch.empty_like(x)
        found.copy_(x.log())
        return found

    assert watched(call, rows()).origin().name == "log"


def test_backward_operation_has_forward_line():
    record = watched(lambda x, net: torch.where(x > 0, x.sqrt(), 0.0), rows(), backward=True)
    origin = record.origin()
    assert (origin.phase, origin.node, origin.is_own_function) == ("backward", "SqrtBackward0", False)
    assert line_of(origin) == test_backward_operation_has_forward_line.__code__.co_firstlineno + 1


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] / ctx.saved_tensors[0].abs()


def test_an_own_function_has_its_own_line():
    origin = watched(lambda x, net: Own.apply(x), rows(), backward=True).origin()
    assert (origin.node, origin.is_own_function) == ("OwnBackward", True)
    assert line_of(origin) == Own.backward.__code__.co_firstlineno + 2


def test_onednn_product_has_forward_line(monkeypatch):
    monkeypatch.setattr(layers, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(layers, "MIN_SHARED_NUMBERS", 0)
    layer = nn.Linear(3, 4)
    nn.init.constant_(layer.weight, 3e38)
    layers.take_onednn(layer, requested=True)
    origin = watched(lambda x, net: layer(x * 0), rows(), backward=True).origin()
    assert (origin.name, origin.phase, origin.module) == ("linear_pointwise", "backward", "Net.Linear")
    assert not origin.is_own_function
    line = test_onednn_product_has_forward_line.__code__.co_firstlineno + 6
    assert line_of(origin) == line


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_update_names_parameter_and_old_value(how):
    net, names = Net(), TensorNames()
    net.other = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam(net.parameters(), eps=0.0, **how)
    names.model(net)
    observer = NotFiniteObserver(net, names)
    with observe(observer):
        ((net.scale * 2).sum() + 0 * net.other.sum()).backward()
        optimizer.step()
    assert observer.cause_of(net.scale) is None
    origin = observer.cause_of(net.other).origin()
    assert origin.phase == "optimizer"
    assert {seen.shape for seen in origin.inputs} <= {(2,), ()}


def test_forward_trace_keeps_only_sizes():
    net, names = Net(), TensorNames()
    observer = NotFiniteObserver(net, names)
    modes = torch.utils._python_dispatch._len_torch_dispatch_stack()
    with observe(observer):
        observer.in_task = True
        net(lambda x, _: x * 100, rows())
    assert max(observer.largest).value == 300.0
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == modes


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_the_range_is_of_what_is_finite(dtype):
    tensor = torch.tensor([[1.0, -2.0], [NAN, INF], [-INF, 0.5]]).to(dtype)
    assert range_of(tensor) == Range(-2.0, 1.0, 6, num_nan=1, num_inf=2)
    assert rows_not_finite(tensor).tolist() == [False, True, True]
    assert not is_finite(tensor)
    assert range_of(tensor[:1]) == Range(-2.0, 1.0, 2)
    assert is_finite(tensor[:1])


def test_what_holds_no_floating_numbers_has_none():
    for tensor in (torch.arange(3), torch.empty(0, 3), torch.tensor(True), torch.eye(2).to_sparse()):
        assert range_of(tensor) is None
        assert is_finite(tensor)


def test_entirely_nonfinite_tensor_has_no_range():
    assert range_of(torch.tensor([NAN, INF])) == Range(None, None, 2, 1, 1)
    assert rows_not_finite(torch.tensor(NAN)).tolist() == []
    assert rows_not_finite(torch.tensor([0.0, NAN])).tolist() == [False, True]
