"""The steps that a plan takes, as the run itself would."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from runner.inspection.costs import Costs
from runner.plan.dry_run import NUM_STEPS, Trial
from runner.training.schedule import Schedule

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_steps", [1, 2, 100])
def test_a_schedule_is_not_asked_for_more_steps_than_the_run_has(num_steps):
    optimizer, costs = torch.optim.AdamW([torch.ones(1, requires_grad=True)]), Costs(CPU)
    schedule = OneCycleLR(optimizer, max_lr=0.01, total_steps=num_steps)
    limits = SimpleNamespace(num_steps=num_steps)
    trial = SimpleNamespace(
        parts=SimpleNamespace(schedule=Schedule(schedule), limits=limits, optimizer=optimizer),
        step=lambda: lambda group: optimizer.step(),
        group=(),
        costs=costs,
        meetings=None,
        slow=None,
        num_processes=1,
        in_parts=False,
        buffer=SimpleNamespace(write=lambda values: None),
        _ahead=lambda group: [],
        _count_anew=lambda: None,
        _watching=lambda *observers: nullcontext(),
    )
    Trial.take_steps(trial)
    assert schedule.last_epoch == min(NUM_STEPS, num_steps)
