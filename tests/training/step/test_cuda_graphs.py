"""Steps that need nothing from the host are bitwise identical to single steps, with a capture that repeats its calls.

On real hardware (`--device cuda:0`), the graphs are CUDA graphs.
"""

from __future__ import annotations

import gc
import random
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from steps_on_device import ADAM, SETTINGS, trained
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from runner.errors import RunnerError
from runner.training.step import on_device
from runner.training.step.cuda_graphs import STEPS_A_REPLAY, WARM_UPS, GraphSteps, cuda_graphs
from runner.training.step.fused_update import CannotTraceError
from runner.training.step.on_device import OnDevice


class RefusesReads(TorchDispatchMode):
    """Fails on a read, like a capture; also when torch uses a tensor with one number as a Python number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "it reads a number"
        return func(*args, **(kwargs or {}))


class Repeated:
    """Replaces CUDA graphs: repeats the captured calls, and counts them."""

    def __init__(self):
        self.captured = self.replayed = self.warmed = 0

    def capture(self, run):
        self.captured += 1

        def replay():
            self.replayed += 1
            with RefusesReads():
                run()

        return replay

    def warm(self, run):
        self.warmed += 1
        run()


def check(ours, expected, device, name):
    """Compare the trainings; with a schedule on a GPU, compare only the losses, approximately.

    Its rates are rounded there, and one changed prediction is a quarter of an accuracy over four rows.
    """
    if device.type == "cpu" or name != "a schedule":
        assert repr(ours) == repr(expected)  # if fp16 skips a step, its norm is NaN
    else:
        losses, wanted = (torch.tensor([row[1] for row in found["rows"]]) for found in (ours, expected))
        torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_as_step_by_step(device, name):
    repeated, settings = Repeated(), SETTINGS[name]
    check(trained(device, repeater=GraphSteps(repeated), **settings), trained(device, **settings), device, name)
    assert repeated.warmed >= WARM_UPS and repeated.replayed > 0


def test_graph_per_kind_replays_several_steps(device):
    repeated = Repeated()
    found = trained(device, repeater=GraphSteps(repeated), limits={"num_epochs": 6})
    assert found["steps"] == 6 * 38  # 37 whole batches and one of 2 rows
    assert repeated.captured == 3  # one step, several steps, and a step of the small batch
    assert repeated.warmed == 2 * WARM_UPS
    assert repeated.replayed < (found["steps"] - repeated.warmed) / STEPS_A_REPLAY * 3


def test_a_windows_rates_come_over_at_once(device, monkeypatch):
    """With 20 steps per window, two replays of 8 steps; the checkpoint has the schedule at its own step."""
    brought, settings = [], SETTINGS["a schedule"] | {"limits": {"save_every_steps": 37}}
    monkeypatch.setattr(on_device, "sent", lambda numbers, device: brought.append(len(numbers)) or numbers.to(device))
    found = trained(device, repeater=GraphSteps(Repeated()), **settings)
    at_once = list(brought)
    brought.clear()
    monkeypatch.setattr(GraphSteps, "most_calls", 1)
    assert repr(found) == repr(trained(device, repeater=GraphSteps(Repeated()), **settings))
    assert 16 not in brought and 16 in at_once and sum(at_once) == sum(brought)
    check(found, trained(device, **settings), device, "a schedule")


def test_optimizer_that_needs_host_is_refused(device):
    with pytest.raises(RunnerError) as caught:
        trained(device, repeater=GraphSteps(Repeated()), optimizer=partial(torch.optim.RMSprop, lr=0.01))
    assert "RMSprop" in str(caught.value) and "optimizer=adam" in str(caught.value)


def test_schedule_of_more_than_rates_is_refused(device):
    with pytest.raises(RunnerError) as caught:
        trained(
            device, repeater=GraphSteps(Repeated()), schedule=lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=200)
        )
    assert "moves betas" in str(caught.value) and "cycle_momentum=false" in str(caught.value)


def fail_to_capture(error):
    def capture(run):
        raise error

    repeated = Repeated()
    repeated.capture = capture
    trained(torch.device("cpu"), repeater=GraphSteps(repeated))


def test_step_that_needs_host_is_reported():
    with pytest.raises(RunnerError) as caught:
        fail_to_capture(RuntimeError("operation not permitted when stream is capturing\nmore"))
    assert "not permitted when stream is capturing;" not in str(caught.value)
    assert "operation not permitted" in str(caught.value) and "train.cuda_graph=false" in str(caught.value)
    assert f"{Path(__file__).name}:" in str(caught.value)


class FakeCuda:
    """torch.cuda's part of a capture. Like CUDA, it reports at the end of the capture that an earlier call failed, but not which one."""

    def __init__(self, monkeypatch):
        self.current = "the usual stream"
        self.device, self.captured_on = 0, []
        monkeypatch.setattr(torch.cuda, "Stream", lambda: f"a side stream of cuda:{self.device}")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, graph, *, pool, stream=None, capture_error_mode):
        assert not gc.isenabled()
        self.captured_on.append(stream)
        self.current = "the capture's stream"
        try:
            yield
        except RuntimeError:
            # torch ends the capture first, which raises before the stream is restored (torch 2.13, cuda/graphs.py)
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        self.current = "the usual stream"


class FakeGraph:
    def pool(self):
        return "a pool"

    def replay(self):
        pass


def reads():
    raise RuntimeError("operation not permitted when stream is capturing")


def test_failed_capture_raises_steps_error_restores_stream(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        cuda_graphs().capture(reads)
    assert cuda.current == "the usual stream"


def test_a_run_on_another_gpu_captures_there(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    for cuda.device in (0, 1):
        graphs = cuda_graphs()
        graphs.capture(lambda: None)
        graphs.capture(lambda: None)
    assert cuda.captured_on == ["a side stream of cuda:0"] * 2 + ["a side stream of cuda:1"] * 2


@pytest.mark.parametrize("run", [lambda: None, reads, random.random])
def test_a_capture_destroys_no_dead_graph(run, monkeypatch):
    class Cycle:
        pass

    cuda, cycle = FakeCuda(monkeypatch), Cycle()
    cycle.own, dead = cycle, weakref.ref(cycle)
    del cycle
    seen = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **more: seen.append(dead()) or cuda.graph(*args, **more))
    with suppress(RuntimeError, CannotTraceError):
        cuda_graphs().capture(run)
    assert seen == [None] and gc.isenabled()


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "Python's random"),
        (lambda: np.random.rand(2), "NumPy's random"),
        (lambda: torch.rand(2), "torch's CPU generator"),
    ],
)
def test_host_random_draw_is_not_captured(draw, name, monkeypatch):
    FakeCuda(monkeypatch)
    graphs = cuda_graphs()
    with pytest.raises(CannotTraceError, match=name) as raised:
        graphs.capture(draw)
    assert "draws on the device" in raised.value.fix
    assert graphs.capture(lambda: None) is not None


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")]
)
def test_capture_out_of_memory_raises_unchanged(error):
    with pytest.raises(type(error), match="out of memory"):
        fail_to_capture(error)


def test_resumed_graph_run_has_right_first_rates(monkeypatch):
    """The optimizer's step computes with 0.01 in 64 bits, and the kernels of the other steps with 0.01 in 32 bits."""
    made = []
    monkeypatch.setattr(
        OnDevice, "_fix_update", lambda self, fix=OnDevice._fix_update: (made.append(self._progress.step), fix(self))
    )

    def with_state(parameters):
        parameters = list(parameters)
        optimizer = ADAM(parameters)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return optimizer

    trained(torch.device("cpu"), repeater=GraphSteps(Repeated()), limits={"num_steps": 3})
    trained(
        torch.device("cpu"),
        repeater=GraphSteps(Repeated()),
        optimizer=with_state,
        limits={"num_steps": 3},
        goes_on=True,
    )
    assert made == [1, 0]


def test_first_gpu_step_has_float32_rates(monkeypatch):
    seen = []
    graphed = OnDevice.__new__(OnDevice)
    graphed._device = torch.device("cuda:0")
    graphed._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    with graphed._rounded_rates():
        seen.append(graphed._optimizer.param_groups[0]["lr"])
    assert seen == [float(np.float32(0.01))] != [0.01]
    assert graphed._optimizer.param_groups[0]["lr"] == 0.01


def test_real_graphs(device):
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's: --device cuda:0")
    torch.cuda.set_device(device)
    real = Repeated()
    real.capture, real.warm = cuda_graphs()
    for name, settings in SETTINGS.items():
        check(trained(device, repeater=GraphSteps(real), **settings), trained(device, **settings), device, name)
