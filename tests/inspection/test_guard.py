"""The guard on real steps, on a simulated device: it names every tensor in the wrong place, and nothing else."""

import functools
import inspect
import types

import pytest
import torch
from judged import SOUND, WRONG, Linear, classify, marked_line, rows
from simulated import run_simulated

from runner.device.capabilities import SLOW_TYPES
from runner.device.placement import move, place
from runner.device.precision import make_precision
from runner.inspection.call_site import Lines
from runner.inspection.findings import merged
from runner.inspection.guard import Guard, PlacementError, Slow
from runner.inspection.operations import observe
from runner.training.step.train_step import make_step

pytestmark = pytest.mark.slow


def step_once(case, device):
    """Take one watched step like a run. Returns the findings."""
    torch.manual_seed(0)
    model, task = place(case.make(), device), case.make_task()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad] or [torch.zeros(1)], lr=0.1)
    guard = Guard(device, when="first_step", model=model, task=task, optimizer=optimizer)
    step = guard.on(
        make_step(model, task, optimizer=optimizer, precision=make_precision("fp32", device=device)), of_groups=True
    )
    batch = move(case.batch(), device)
    try:
        step([batch])
        step([batch])
    except PlacementError as error:
        return [vars(error.finding)]
    except (TypeError, RuntimeError) as error:
        return [{"error": f"{type(error).__name__}: {error}"}]
    return [vars(finding) for finding in merged(guard.findings)]


def judge_all(device):
    torch.set_num_threads(1)
    wrong = {case.name: step_once(case, device) for case in WRONG if case.device.partition(":")[0] == device.type}
    return {"wrong": wrong, "sound": {case.name: step_once(case, device) for case in SOUND}}


@functools.cache
def judged(device):
    return run_simulated(device, judge_all)


@pytest.mark.parametrize("case", WRONG, ids=[case.name for case in WRONG])
def test_findings_have_path_and_line(case):
    (found,) = judged(case.device)["wrong"][case.name]
    assert (found["kind"], found["path"]) == (case.kind, case.path), found
    assert found["line"].endswith(marked_line(case.name)), found
    fixes = {"attribute": 'register_buffer("scale", ...)', "plain list": "self.layers = nn.ModuleList(...)"}
    assert found["write"] and fixes.get(case.name, "") in found["write"], found


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
@pytest.mark.parametrize("case", SOUND, ids=[case.name for case in SOUND])
def test_what_is_sound_is_left_in_peace(case, device):
    assert judged(device)["sound"][case.name] == []


class Weighted:
    def __init__(self):
        self.weights = torch.ones(3)

    def __call__(self, model, batch):
        return {"loss": torch.nn.functional.cross_entropy(model(batch[0]), batch[1], self.weights)}


def weigh(device):
    return step_once(types.SimpleNamespace(make=Linear, make_task=Weighted, batch=rows), device)


def test_tensor_of_a_task_is_named():
    (found,) = run_simulated("cuda:1", weigh)
    assert (found["kind"], found["path"]) == ("mixed devices", "task.weights")


class Hasty(torch.nn.Module):
    """Copies in both directions without waiting for them."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)

    def forward(self, x):
        shift = torch.ones(3).to(x.device, non_blocking=True)
        self.seen = x.detach().to("cpu", non_blocking=True)
        return self.linear(x) + shift


def hasten(device):
    case = types.SimpleNamespace(make=Hasty, make_task=lambda: classify, batch=rows)
    return [[found["kind"], found["line"]] for found in step_once(case, device)]


def test_copies_that_nobody_waits_for():
    _, first = inspect.getsourcelines(Hasty.forward)
    to_device, to_host = (f"tests/inspection/test_guard.py:{first + number}" for number in (1, 2))
    assert run_simulated("cuda:1", hasten) == [["non_blocking", to_host]]
    assert run_simulated("mps", hasten) == [["non_blocking", to_device], ["non_blocking", to_host]]


def test_a_slow_type_is_told_of_more_than_one_number(monkeypatch):
    """A GradScaler divides its one number in float64."""
    monkeypatch.setitem(SLOW_TYPES, "cpu", {torch.float64: "float32"})
    cpu = torch.device("cpu")
    slow = Slow(cpu, Lines())
    one, several = torch.tensor(2.0), torch.ones(3, dtype=torch.float64)
    with observe(slow):
        one.double().reciprocal().float()
        assert slow.findings == []
        several.sum()
    (found,) = slow.findings
    assert found.kind == "slow type" and "sum in float64" in found.what
    slow = Slow(cpu, Lines(), chosen={torch.float64})  # the type of the weights
    with observe(slow):
        several.sum()
    assert slow.findings == []
