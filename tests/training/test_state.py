"""A checkpoint restores the whole progress of a training, every number of it."""

import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.data.loading.order import mixed
from runner.device.precision import make_precision
from runner.distributed.group import Alone
from runner.training.carried_state import CarriedState
from runner.training.checkpoint import CheckpointWriter, save
from runner.training.loop import Best, Progress
from runner.training.metric_buffer import MetricBuffer
from runner.training.schedule import Schedule, warmup_cosine
from runner.training.state import _restore_parts, best_state, full_state, restore

CPU = torch.device("cpu")


@pytest.fixture
def parts():
    model = nn.Linear(2, 2)
    return SimpleNamespace(
        train=None,
        device=CPU,
        model=model,
        kept_model=model,
        average=None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        schedule=Schedule(),
        precision=make_precision("fp32", device=CPU),
        shards=None,
        carried=CarriedState(model, None, device=CPU),
        limits=SimpleNamespace(num_steps=100),
    )


BEST = Best("val/loss", "min", value=0.5, step=10)
STOOD = Progress(
    BEST,
    step=33,
    epoch=3,
    measured=30,
    rate=0.1,
    epochs_without_best=2,
    rollbacks=2,
    num_pieces=4,
    seconds=7.5,
    reached="train.stop_when: val/loss <1",
)


def taken_up(folder, parts, background, *, best=BEST, ranks=None):
    """Return the progress after resuming from the checkpoints of a training at STOOD; best.pt may be from another step."""
    buffer = MetricBuffer(CPU, lambda window: None, background=background, pull_every=10)
    state = full_state(parts, STOOD, buffer, Alone())
    save(state | {"seconds": STOOD.seconds, "experiment": {}}, folder / "checkpoints/last.pt")
    save(best_state(parts, replace(STOOD, best=best)), folder / "checkpoints/best.pt")
    parts.best = Best("val/loss", "min")
    writer = CheckpointWriter(folder / "checkpoints", background)
    return restore(writer, parts, buffer, ranks=ranks or Alone(), experiment={})


def test_every_number_of_the_progress_comes_back(tmp_path, parts, background):
    untouched = Progress(Best("", ""))
    assert all(getattr(STOOD, field.name) != getattr(untouched, field.name) for field in fields(Progress))
    assert taken_up(tmp_path, parts, background) == STOOD


@pytest.mark.parametrize(("step", "value", "taken"), [(8, 0.6, (8, 0.6)), (31, 0.4, (10, 0.5))])
def test_best_is_of_older_file(tmp_path, parts, background, step, value, taken):
    """An older best.pt is used, as the newer one was torn; a newer one is ignored, as its evaluation will be repeated."""
    best = taken_up(tmp_path, parts, background, best=replace(BEST, step=step, value=value)).best
    assert (best.step, best.value) == taken


@pytest.mark.parametrize(
    ("left", "taken", "said"),
    [
        ((), (None, 0), "best.pt of step 10 is missing: the next evaluation sets a new best"),
        (("best-before.pt",), (0.6, 8), "best.pt is missing; the checkpoint before it is used, of step 8"),
        (("best.pt",), (0.6, 8), None),
    ],
)
def test_missing_best_checkpoint_is_reported(tmp_path, parts, background, left, taken, said):
    taken_up(tmp_path, parts, background, best=replace(BEST, step=8, value=0.6))
    (tmp_path / "checkpoints/best.pt").rename(tmp_path / "best.pt")
    for name in left:
        shutil.copyfile(tmp_path / "best.pt", tmp_path / "checkpoints" / name)
    parts.best = Best("val/loss", "min")
    writer = CheckpointWriter(tmp_path / "checkpoints", background)
    buffer = MetricBuffer(CPU, print, background=background, pull_every=10)
    best = restore(writer, parts, buffer, ranks=Alone(), experiment={}).best
    assert (best.value, best.step) == taken
    assert writer.notes == ([said] if said else [])


def test_new_process_draws_separate_numbers(tmp_path, parts, background):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        taken_up(tmp_path, parts, background, ranks=SimpleNamespace(rank=1, is_first=False))
        assert torch.initial_seed() == mixed(5, STOOD.step)


LONGER = {
    "warm-up and cosine": lambda optimizer, num: warmup_cosine(optimizer, num_steps=num),
    "torch's cosine": lambda optimizer, num: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num),
    "one cycle": lambda optimizer, num: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=num),
    "one after the other": lambda optimizer, num: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num - 5),
        ],
        [5],
    ),
    "of no length": lambda optimizer, num: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
}


@pytest.mark.parametrize("name", LONGER)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # steps of the schedule come before the optimizer's
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # from SequentialLR
def test_schedule_of_other_length_resumes_in_position(parts, tmp_path, background, name):

    def begin(num_steps, of):
        of.optimizer = torch.optim.SGD(of.model.parameters(), lr=0.1, momentum=0.9)
        of.schedule, of.limits.num_steps = Schedule(LONGER[name](of.optimizer, num_steps)), num_steps
        return of.schedule.scheduler, of.optimizer.param_groups[0]

    def rates(schedule, group, num):
        found = []
        for _ in range(num):
            schedule.step()
            found.append((group["lr"], group["momentum"]))
        return found

    schedule, group = begin(40, parts)
    whole = rates(schedule, group, 40)
    schedule, group = begin(20, parts)
    rates(schedule, group, 10)
    buffer = MetricBuffer(CPU, print, background=background, pull_every=10)
    state = full_state(parts, replace(STOOD, step=10), buffer, Alone())
    schedule, _ = begin(40, parts)
    _restore_parts(state, parts)
    (group,) = parts.optimizer.param_groups
    assert group["lr"] == whole[9][0]
    assert rates(schedule, group, 29) == whole[10:39]
    schedule, _ = begin(20, parts)  # with the same length, the saved state is used unchanged
    _restore_parts(state, parts)
    assert schedule.state_dict()["last_epoch"] == 10
