"""Several steps in one call of a compiled function: the same training up to rounding, for any number of steps at a time."""

from __future__ import annotations

import random

import pytest
import torch
from steps_on_device import SETTINGS, trained
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from runner.errors import RunnerError
from runner.tasks.classification import Classification
from runner.training.step import compiled
from runner.training.step.compiled import CompiledSteps
from runner.training.step.cuda_graphs import Capture, GraphSteps
from runner.training.step.on_device import Compiling

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def kernels_of_torch(graph, inputs):
    """Trace and differentiate as usual, but run torch's kernels, as compiling C++ takes seconds."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, inputs)


class Watched:
    """CompiledSteps that notes how many steps each call took."""

    is_required, most_calls = False, 1

    def __init__(self, **options):
        self.said, self.nums = [], []
        self.repeated = CompiledSteps(say=self.said.append, compile_graph=kernels_of_torch, **options)
        torch._dynamo.reset()

    def at_once(self, sizes, room):
        return self.repeated.at_once(sizes, room)

    def take(self, steps, sizes, num):
        self.repeated.take(steps, sizes, num)
        self.nums.append(num)

    @property
    def of_host(self):
        return {function.of_host for function in self.repeated._functions.values()}


@pytest.fixture(autouse=True)
def many_at_once(monkeypatch):
    monkeypatch.setattr(compiled, "SECONDS_A_CALL", 60.0)
    yield
    torch._dynamo.reset()


def assert_close(ours, expected):
    torch.testing.assert_close(torch.tensor(ours["rows"]), torch.tensor(expected["rows"]), **CLOSE)
    assert ours["weights"].keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(ours["weights"][name]), torch.tensor(value), rtol=1e-3, atol=1e-3)
    assert [ours["notes"], ours["steps"]] == [expected["notes"], expected["steps"]]
    assert [step for step, _ in ours["kept"]] == [step for step, _ in expected["kept"]]


@pytest.mark.parametrize("settings", [SETTINGS["a schedule"], SETTINGS["groups"] | SETTINGS["augmented"]])
def test_repeated_steps_equal_single_up_to_rounding(settings):
    watched = Watched()
    assert_close(trained(CPU, repeater=watched, kind=Compiling(), **settings), trained(CPU, **settings))
    assert max(watched.nums) > 5 and watched.of_host == {""}
    assert watched.said[0].startswith("compile: the whole step is one function") and len(watched.said) == 1


def test_steps_per_call_do_not_change_result(monkeypatch):
    settings = {"kind": Compiling(), **SETTINGS["a schedule"]}
    several = trained(CPU, repeater=Watched(), **settings)
    monkeypatch.setattr(compiled, "SECONDS_A_CALL", 0.0)
    single = Watched()
    assert trained(CPU, repeater=single, **settings) == several
    assert set(single.nums) == {1}


class Counting(Classification):
    """Scales its loss by the number of losses it has computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __call__(self, model, batch):
        self.count += 1
        return {name: value / self.count for name, value in super().__call__(model, batch).items()}


class Following(Classification):
    """Replaces one of its tensors in each step."""

    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(())

    def __call__(self, model, batch):
        values = super().__call__(model, batch)
        self.mean = 0.9 * self.mean + values["loss"].detach()
        return {**values, "accuracy": self.mean}


class Drawing(Classification):
    def __call__(self, model, batch):
        scale = random.randint(1, 9)
        return {name: value * scale for name, value in super().__call__(model, batch).items()}


@pytest.mark.parametrize(
    ("task", "reason"),
    [(Counting, "a number of the host"), (Following, "an attribute is another tensor"), (Drawing, "Python's random")],
)
def test_step_with_host_work_is_not_repeated(task, reason):
    random.seed(0)
    watched = Watched()
    ours = trained(CPU, repeater=watched, kind=Compiling(), task=task())
    random.seed(0)
    assert_close(ours, trained(CPU, task=task()))
    assert all(reason in found for found in watched.of_host) and set(watched.nums) == {1}
    random.seed(0)
    with pytest.raises(RunnerError) as caught:
        trained(CPU, repeater=GraphSteps(AGAIN, compiled=Watched()), kind=Compiling(), task=task())
    assert reason in str(caught.value) and "train.cuda_graph=false" in str(caught.value)


#: replaces CUDA graphs: repeats the captured call
AGAIN = Capture(lambda run: run, lambda run: run())


def test_a_graph_of_a_compiled_step():
    watched, settings = Watched(), SETTINGS["accumulated, clipped, averaged"]
    ours = trained(CPU, repeater=GraphSteps(AGAIN, compiled=watched), kind=Compiling(), **settings)
    assert_close(ours, trained(CPU, **settings))
    assert 8 in watched.nums


def test_unrepeatable_settings_step_by_step():
    """No step, rate or row is lost at the change."""
    settings = {"schedule": lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=200)}
    ours = trained(CPU, repeater=Watched(), kind=Compiling(), **settings)
    assert_close(ours, trained(CPU, **settings))  # one step was compiled before the schedule changed its betas


class Late(LambdaLR):
    """Lowers its rates, and changes the weight decay at the 30th step."""

    def __init__(self, optimizer):
        super().__init__(optimizer, lambda step: 1 - step / 400)

    def step(self, epoch=None):
        super().step(epoch)
        if self.last_epoch >= 30:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.5


def test_schedule_that_moves_more_later_is_refused():
    with pytest.raises(RunnerError, match="the schedule moves weight_decay") as caught:
        trained(CPU, repeater=Watched(), kind=Compiling(), schedule=Late)
    assert "`train.compile=false`" in str(caught.value)


def test_late_host_work_loses_no_rate():
    settings = SETTINGS["a schedule"]
    ours = trained(CPU, repeater=Watched(), kind=Compiling(), task=Counting(), **settings)
    assert_close(ours, trained(CPU, task=Counting(), **settings))


class Deciding(Classification):
    """Reads the device, so it can't become one function."""

    def __call__(self, model, batch):
        values = super().__call__(model, batch)
        return values if values["loss"] > -1 else {}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from dynamo
def test_reading_step_is_not_repeated():
    ours = trained(CPU, repeater=Watched(), kind=Compiling(), task=Deciding(), **SETTINGS["a schedule"])
    assert ours == trained(CPU, task=Deciding(), **SETTINGS["a schedule"])


def test_rare_smaller_batches_are_not_compiled():
    watched = Watched()
    ours = trained(CPU, repeater=watched, kind=Compiling(usual_rows=4))
    assert_close(ours, trained(CPU))
    assert set(watched.repeated._functions) == {(4,)}
