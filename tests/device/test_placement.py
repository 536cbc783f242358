from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from simulated import run_simulated
from torch import nn

from runner.device.placement import (
    _needing_gradient,
    copied,
    legal_dtype,
    map_tensors,
    move,
    num_bytes,
    num_rows,
    place,
    tensors,
)

CPU, META, MPS = torch.device("cpu"), torch.device("meta"), torch.device("mps")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Batch:
    x: Any
    name: str = "batch"
    made: int = field(default=0, init=False)

    def __post_init__(self):
        self.made += 1


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any = None


def one():
    return torch.ones(3, 2)


TREES = {
    "tensor": one,
    "dict": lambda: {"x": one(), "n": 1},
    "ordered dict": lambda: OrderedDict(x=one()),
    "default dict": lambda: defaultdict(list, x=one()),
    "library's dict": lambda: UserDict(x=one()),
    "list": lambda: [one(), "text"],
    "tuple": lambda: (one(), None),
    "named tuple": lambda: Pair(one(), 1.5),
    "torch's named tuple": lambda: one().max(0),
    "dataclass": lambda: Batch(one()),
    "frozen dataclass": lambda: Frozen(one()),
    "nested": lambda: {"a": [Pair(one(), {"b": Frozen(one(), (one(),))})]},
}
LEAVES = [None, 3, "text", np.ones(2), {1, 2}, Batch, nn.ReLU()]


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_move_keeps_classes_and_unchanged_objects(tree):
    tree = tree()
    assert move(tree, CPU) is tree
    assert map_tensors(tree, lambda tensor: tensor) is tree
    moved = move(tree, META)
    assert type(moved) is type(tree)
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert {tensor.device for tensor in tensors(tree)} == {CPU}, "the original tree does not change"


def test_move_keeps_everything_except_tensors():
    for leaf in LEAVES:
        assert move(leaf, META) is leaf
        assert move([leaf, one()], META)[0] is leaf
    still = [torch.ones(1, device=META)]
    assert move({"moves": one(), "still": still}, META)["still"] is still
    assert move(defaultdict(list, x=one()), META).default_factory is list
    moved = move(Batch(one(), "first"), META)
    assert (moved.made, moved.name) == (1, "first")


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_move_refuses_unsafe_asynchronous_copies(kind):
    with pytest.raises(ValueError, match=f"not safe towards {kind}"):
        move(one(), torch.device(kind), non_blocking=True)


@pytest.mark.parametrize(
    ("dtype", "on_mps"),
    [
        (torch.float64, torch.float32),
        (torch.complex128, torch.complex64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.int64, torch.int64),
        (torch.bool, torch.bool),
    ],
)
def test_doubles_become_floats_without_float64(dtype, on_mps):
    assert legal_dtype(dtype, MPS) == on_mps
    assert legal_dtype(dtype, torch.device("mps:0")) == on_mps
    assert all(legal_dtype(dtype, torch.device(kind)) == dtype for kind in ("cpu", "cuda:1", "xpu"))


def test_module_moves_whole_and_stays_same():
    model = nn.Sequential(nn.Linear(2, 3, dtype=torch.float64), nn.BatchNorm1d(3))
    assert place(model, CPU) is model
    assert model[0].weight.dtype == torch.float64
    place(model, META)
    assert {value.device for value in model.state_dict().values()} == {META}


def double_to(device):
    """Return the types of a batch and a module in double on a device without doubles."""
    batch = move({"x": torch.ones(2, dtype=torch.float64), "n": torch.ones(2, dtype=torch.int64)}, device)
    model = nn.Linear(2, 2, dtype=torch.float64)
    model.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    weight = model.weight
    place(model, device)
    kinds = [str(tensor.dtype) for tensor in (*batch.values(), model.weight, model.scale)]
    return (
        kinds,
        sorted({tensor.device.type for tensor in (*batch.values(), model.weight, model.scale)}),
        weight is model.weight,
    )


def test_doubles_on_a_pretended_mac():
    kinds, devices, same = run_simulated("mps", double_to)
    assert kinds == ["torch.float32", "torch.int64", "torch.float32", "torch.float32"]
    assert devices == ["mps"]
    assert same


def test_bytes_and_rows():
    tree = {"x": torch.ones(5, 4), "more": [Pair(torch.ones(5, dtype=torch.int64), None)]}
    assert num_bytes(tree) == 5 * 4 * 4 + 5 * 8
    assert num_rows(tree) == 5
    assert num_rows({"n": 3}) == num_rows(torch.ones(())) == num_bytes(None) == 0
    assert [tuple(tensor.shape) for tensor in tensors(tree)] == [(5, 4), (5,)]


def norm_above_frozen(device):
    """For a LayerNorm above frozen weights, return which inputs needed a gradient, the weights' gradients, and torch's values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.LayerNorm(4))
    rows, targets = torch.randn(5, 3), torch.randn(5, 4)
    nn.functional.mse_loss(model(rows), targets).backward()
    expected = [parameter.grad.tolist() for parameter in model[1].parameters()]
    model.zero_grad(set_to_none=True)
    place(place(model, device), device)
    seen = []
    model[1].register_forward_hook(lambda layer, given, output: seen.append(given[0].requires_grad))
    nn.functional.mse_loss(model(move(rows, device)), move(targets, device)).backward()
    found = [parameter.grad.cpu().tolist() for parameter in model[1].parameters()]
    with torch.no_grad():
        model(move(rows, device))
    model[1].requires_grad_(False)
    model(move(rows, device))
    return seen, len(model[1]._forward_pre_hooks), expected, found, list(model.state_dict())


def test_norm_weights_get_gradients_on_mps():
    """They are wrong on MPS if the norm's input needs no gradient."""
    for device, needed in (("mps", True), ("cuda:1", False)):
        seen, hooks, expected, found, names = run_simulated(device, norm_above_frozen)
        assert (seen, hooks) == ([needed, False, False], int(needed))
        assert found == expected and names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_tensor_with_gradient_is_kept():
    layer = nn.LayerNorm(4)
    x = torch.zeros(2, 4, requires_grad=True)
    assert _needing_gradient(layer, (x,)) is None and _needing_gradient(layer, ()) is None
    changed = []
    torch.func.grad(lambda x: changed.append(_needing_gradient(layer, (x.detach(),))) or x.sum())(torch.zeros(2, 4))
    assert changed == [None]
    compiled = torch.compile(nn.Sequential(layer), backend="eager", fullgraph=True)
    layer.register_forward_pre_hook(_needing_gradient)
    compiled(torch.zeros(2, 4)).sum().backward()


def test_copied_recurrent_weights_are_flattened_again(monkeypatch):
    """On CUDA they would be copied into one block at each call, with a warning."""
    laid_out = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer, **given: laid_out.append(layer))
    model = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 3))
    laid_out.clear()
    copy = copied(model)
    assert laid_out == [copy[1]]
    assert copy[1].weight_hh_l0 is not model[1].weight_hh_l0
    assert copy[1].weight_hh_l0.equal(model[1].weight_hh_l0)
