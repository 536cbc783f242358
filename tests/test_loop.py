import json
import signal
from collections import Counter

import pytest
import torch
from torch import nn

from runner.backends import precision
from runner.background import Background
from runner.data.loaders import Resident
from runner.epochs import Rates, StepByStep
from runner.loop import AskedAlone, Best, Limits, Progress, train
from runner.metrics import MetricBuffer
from runner.optim import warmup_cosine
from runner.step import make_step
from runner.stop import Stop
from runner.tasks.classification import Classification

CPU = torch.device("cpu")
BATCHES = 5  # an epoch: 50 rows, 10 a batch


@pytest.fixture
def background():
    background = Background()
    yield background
    background.close()


def run(background, *, values=(), accumulate_steps=1, schedule=None, stop=None, on_step=None, gives_up=None, **limits):
    """A small training; `values` are what the epochs' evaluations give."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows, kept, epochs = [], Counter(), iter(values)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(50, 4, generator=generator), torch.randint(2, (50,), generator=generator)
    buffer = MetricBuffer(CPU, windows.append, background=background, pull_every=7)
    progress = Progress(best=Best("val/loss", "min"))
    limits = Limits(**{"num_epochs": 4, "num_steps": 20, **limits})
    step = make_step(model, Classification(), optimizer=optimizer, precision=precision("fp32", device=CPU))

    def watched(batches):
        if on_step:
            on_step(progress.step)
        return step(batches)

    ending = train(
        StepByStep(
            watched,
            Resident(data, batch_size=10, device=CPU, seed=0, shuffle=True),
            accumulate_steps=accumulate_steps,
            rates=Rates(optimizer, schedule(optimizer) if schedule else None, buffer=buffer, progress=progress),
            buffer=buffer,
        ),
        progress=progress,
        limits=limits,
        evaluate=lambda: {"val/loss": value} if (value := next(epochs, None)) is not None else {},
        keep=lambda name: kept.update([name]),
        asked=AskedAlone(stop or Stop(), limits),
        gives_up=gives_up,
    )
    buffer.pull()
    background.wait()
    return ending, progress, windows, kept


def test_trains_its_epochs_and_keeps_every_step(background):
    ending, progress, windows, _ = run(background)
    assert (ending, progress.step, progress.epoch) == ("finished", 20, 4)
    assert sum(len(window.steps) for window in windows) == 20


def test_the_number_of_steps_wins_in_the_middle_of_an_epoch(background):
    ending, progress, _, kept = run(background, num_steps=7, num_epochs=2, values=[1.0, 0.5])
    assert (ending, progress.step) == ("finished", 7)
    assert kept["best"] == 2  # the broken-off epoch is evaluated, too


def test_accumulated_batches_make_one_step(background):
    _, progress, _, _ = run(background, accumulate_steps=2, num_steps=12)
    assert (progress.step, progress.epoch) == (12, 4)  # 2 + 2 + 1 batches an epoch


def test_the_best_weights_are_kept_and_patience_ends_the_run(background):
    ending, progress, _, kept = run(background, values=[1.0, 0.5, 0.7, 0.6], patience=2)
    assert ending == "patience"
    assert (progress.best.value, progress.best.step, kept["best"]) == (0.5, 10, 2)


def test_a_value_that_is_not_a_number_is_never_the_best(background):
    _, progress, _, kept = run(background, values=[float("nan"), 3.0, float("nan"), 2.0])
    assert (progress.best.value, kept["best"]) == (2.0, 2)


def test_a_signal_ends_after_the_step(background):
    stop = Stop()

    def ask(step):
        if step == 8:
            stop.signal = signal.SIGTERM

    ending, progress, windows, _ = run(background, stop=stop, on_step=ask)
    assert (ending, progress.step, stop.exit_code) == ("stopped", 9, 143)
    assert sum(len(window.steps) for window in windows) == 9


def test_time_ends_a_run(background):
    ending, progress, _, _ = run(background, max_seconds=1e-9)
    assert (ending, progress.step) == ("max_seconds", 1)


def test_checkpoints_by_steps(background):
    assert run(background, save_every_steps=6)[3]["last"] == 3


def test_the_learning_rate_is_a_point_where_it_changes(background):
    plain = run(background)[2]
    assert [note for window in plain for note in window.notes.get("train/lr", [])] == [(1, 0.1)]
    scheduled = run(background, schedule=lambda optimizer: warmup_cosine(optimizer, num_steps=20))[2]
    steps = [step for window in scheduled for step, _ in window.notes["train/lr"]]
    assert steps == [1, 2, *range(4, 21)]  # the third step still has the full rate
    assert json.dumps(scheduled[0].notes)  # plain numbers


def test_a_run_is_given_up_at_an_epochs_end_but_not_at_its_last(background):
    asked = []

    def gives_up(poor):
        return lambda values: asked.append(values["val/loss"]) or values["val/loss"] >= poor

    for poor, ending, num_epochs in ((3, "pruned", 3), (4, "finished", 4)):
        asked.clear()
        found, progress, _, _ = run(background, values=[1, 2, 3, 4], gives_up=gives_up(poor))
        assert (found, progress.epoch, asked) == (ending, num_epochs, [1, 2, 3, 4][:num_epochs])
    found, progress, _, _ = run(background, values=[1, 2, 3, 4], gives_up=gives_up(2), num_steps=10)
    assert (found, progress.step) == ("finished", 10)
