"""Shapes that were told once are told again: the same results, in memory of their own."""

import threading

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runner.plan.simulator import shapes
from runner.plan.simulator.tensor import Pretence

aten = torch.ops.aten


def on_meta(*size, dtype=torch.float32):
    return torch.empty(size, dtype=dtype, device="meta")


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def called(func, *args, **kwargs):
    with Called() as seen:
        result = shapes.run(func, *args, **kwargs)
    return result, func.name() in seen.names


def test_a_result_is_told_again_in_memory_of_its_own():
    one, asked = called(aten.mul.Tensor, on_meta(3, 5), on_meta(5))
    other, asked_again = called(aten.mul.Tensor, on_meta(3, 5), on_meta(5))
    assert asked and not asked_again
    assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_what_differs_is_asked_anew():
    called(aten.mul.Tensor, on_meta(3, 7), on_meta(7))
    for args in [
        (on_meta(7, 3).T, on_meta(7)),
        (on_meta(3, 7), on_meta(1)),
        (on_meta(3, 7, dtype=torch.float64), on_meta(7)),
    ]:
        result, is_asked = called(aten.mul.Tensor, *args)
        expected = torch.ops.aten.mul.Tensor(*args)
        assert is_asked
        assert (result.stride(), result.dtype) == (expected.stride(), expected.dtype)
    assert called(aten.add.Tensor, on_meta(3, dtype=torch.int64), 1)[0].dtype == torch.int64
    assert called(aten.add.Tensor, on_meta(3, dtype=torch.int64), 1.0)[0].dtype == torch.float32
    assert called(aten.add.Tensor, on_meta(3, dtype=torch.int64), True)[0].dtype == torch.int64


def test_what_shares_memory_or_writes_into_it_is_always_asked():
    for _ in range(2):
        given = on_meta(4, 3)
        for func, args in [
            (aten._unsafe_view.default, [[12]]),
            (aten.view.default, [[12]]),
            (aten.add_.Tensor, [given]),
        ]:
            result, is_asked = called(func, given, *args)
            assert is_asked and result.untyped_storage()._cdata == given.untyped_storage()._cdata


def test_a_number_of_the_host_is_always_asked():
    """torch takes a Python number that became a tensor for less than a tensor: float64 of one leaves float32."""
    for _ in range(2):
        assert called(aten.mul.Tensor, on_meta(3), torch.tensor(2.0, dtype=torch.float64))[1]


def test_a_backward_pass_is_of_its_thread():
    pretence = Pretence()
    pretence.running_backward = 1
    seen = []

    def read():
        seen.append(pretence.running_backward)
        pretence.running_backward = 0

    reader = threading.Thread(target=read)
    reader.start()
    reader.join()
    assert seen == [0] and pretence.running_backward == 1
