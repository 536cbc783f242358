"""What a checkpoint holds of where a training stands comes back, every number of it."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.data.loading.order import mixed
from runner.device.backends import precision
from runner.distributed.group import Alone
from runner.training.background import Background
from runner.training.checkpoint import save
from runner.training.metric_buffer import MetricBuffer
from runner.training.progress import Best, Progress
from runner.training.state import Checkpoints, best_state, full_state

CPU = torch.device("cpu")


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()


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
        schedule=None,
        precision=precision("fp32", device=CPU),
        shards=None,
        elsewhere=(),
    )


BEST = Best("val/loss", "min", value=0.5, step=10)
STOOD = Progress(
    BEST, step=33, epoch=3, measured=30, rate=0.1, epochs_without_best=2, num_pieces=4, num_together=3, seconds=7.5
)


def taken_up(folder, parts, background, *, best=BEST, ranks=None):
    """What a process stands at that goes on from the checkpoints of one that stood at STOOD; best.pt may be of another step."""
    buffer = MetricBuffer(CPU, lambda window: None, background=background, pull_every=10)
    state = full_state(parts, STOOD, buffer, Alone())
    save(state | {"seconds": STOOD.seconds, "experiment": {}}, folder / "checkpoints/last.pt")
    save(best_state(parts, replace(STOOD, best=best)), folder / "checkpoints/best.pt")
    parts.best = Best("val/loss", "min")
    return Checkpoints(parts, folder, background, ranks=ranks or Alone(), experiment={}).restore(buffer)


def test_every_number_of_the_progress_comes_back(tmp_path, parts, background):
    untouched = Progress(Best("", ""))
    assert all(getattr(STOOD, field.name) != getattr(untouched, field.name) for field in fields(Progress))
    assert taken_up(tmp_path, parts, background) == STOOD


@pytest.mark.parametrize(("step", "value", "taken"), [(8, 0.6, (8, 0.6)), (31, 0.4, (10, 0.5))])
def test_the_best_is_that_of_the_older_file(tmp_path, parts, background, step, value, taken):
    """An older best.pt is all that a torn one left; a newer one holds what is going to be measured again."""
    best = taken_up(tmp_path, parts, background, best=replace(BEST, step=step, value=value)).best
    assert (best.step, best.value) == taken


def test_a_process_that_was_not_there_before_draws_numbers_of_its_own(tmp_path, parts, background):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        taken_up(tmp_path, parts, background, ranks=SimpleNamespace(rank=1, is_first=False))
        assert torch.initial_seed() == mixed(5, STOOD.step)
