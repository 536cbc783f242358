import json
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.data.loading.loaders import Resident
from runner.device.precision import make_precision
from runner.tasks.classification import Classification
from runner.training.loop import Best, Loop, Progress, train
from runner.training.metric_buffer import MetricBuffer
from runner.training.schedule import Rates, Schedule, warmup_cosine
from runner.training.signals import Stop
from runner.training.step.train_step import EagerSteps, make_step
from runner.training.stopping import Limits, OwnStopCondition

CPU = torch.device("cpu")
BATCHES = 5  # per epoch: 50 rows, 10 per batch


def run(
    background,
    *,
    values=(),
    accumulate_steps=1,
    schedule=None,
    stop=None,
    on_step=None,
    is_pruned=lambda values: False,
    progress=None,
    **limits,
):
    """Run a small training. values: The results of the epochs' evaluations; progress: The point at which to resume."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows, kept, epochs = [], Counter(), iter(values)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(50, 4, generator=generator), torch.randint(2, (50,), generator=generator)
    buffer = MetricBuffer(CPU, windows.append, background=background, pull_every=7)
    progress = progress or Progress(best=Best("val/loss", "min"))
    limits = Limits(**{"num_epochs": 4, "num_steps": 20, **limits})
    step = make_step(model, Classification(), optimizer=optimizer, precision=make_precision("fp32", device=CPU))

    def watched(batches):
        if on_step:
            on_step(progress.step)
        return step(batches)

    ending = train(
        EagerSteps(
            watched,
            Resident(data, batch_size=10, device=CPU, seed=0, shuffle=True),
            accumulate_steps=accumulate_steps,
            rates=Rates(
                optimizer, Schedule(schedule(optimizer) if schedule else None), buffer=buffer, progress=progress
            ),
            buffer=buffer,
        ),
        Loop(
            progress,
            limits,
            -(-BATCHES // accumulate_steps),
            evaluate=lambda: {"val/loss": value} if (value := next(epochs, None)) is not None else {},
            save=lambda name: kept.update([name]),
            stop=OwnStopCondition(stop or Stop(), limits),
            is_pruned=is_pruned,
        ),
    )
    buffer.pull()
    background.wait()
    return ending, progress, windows, kept


def test_trains_its_epochs_and_keeps_every_step(background):
    ending, progress, windows, _ = run(background)
    assert (ending, progress.step, progress.epoch) == ("finished", 20, 4)
    assert sum(len(window.steps) for window in windows) == 20


def test_num_steps_ends_within_epoch(background):
    ending, progress, _, kept = run(background, num_steps=7, num_epochs=2, values=[1.0, 0.5])
    assert (ending, progress.step) == ("finished", 7)
    assert kept["best"] == 2  # the interrupted epoch is evaluated, too


def test_accumulated_batches_make_one_step(background):
    _, progress, _, _ = run(background, accumulate_steps=2, num_steps=12)
    assert (progress.step, progress.epoch) == (12, 4)  # 2 + 2 + 1 batches per epoch


def test_best_weights_are_kept_patience_ends_run(background):
    ending, progress, _, kept = run(background, values=[1.0, 0.5, 0.7, 0.6], patience=2)
    assert ending == "patience"
    assert (progress.best.value, progress.best.step, kept["best"]) == (0.5, 10, 2)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_first_of_equal_values_is_best(background, mode):
    progress = Progress(best=Best("val/loss", mode))
    _, _, _, kept = run(background, values=[1.0, 1.0, 1.0], num_epochs=3, progress=progress)
    assert (progress.best.step, kept["best"], progress.epochs_without_best) == (5, 1, 2)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_value_is_never_best(mode, value):
    assert not Best("val/loss", mode).improves(value) and not Best("val/loss", mode, value=0.5).improves(value)


def taken_up(step, **told):
    return Progress(best=Best("val/loss", "min", value=0.5, step=5), step=step, epoch=step // BATCHES, **told)


def test_resume_does_not_repeat_measured_epoch(background):
    for measured, values in ((10, [0.4, 0.3]), (5, [0.6, 0.4, 0.3])):  # before its evaluation, and after it
        progress, waiting = taken_up(10, measured=measured), iter(values)
        ending, _, windows, _ = run(background, values=waiting, progress=progress)
        assert (ending, progress.step, progress.epoch, next(waiting, None)) == ("finished", 20, 4, None)
        assert (progress.best.value, progress.best.step) == (0.3, 20) and sum(
            len(window.steps) for window in windows
        ) == 10


def test_resume_continues_patience(background):
    progress = taken_up(10, measured=10, epochs_without_best=1)
    assert run(background, values=[0.6, 0.4], progress=progress, patience=2)[0] == "patience"
    assert (progress.step, progress.best.step) == (15, 5)
    ending, _, windows, kept = run(background, values=[0.4], progress=progress, patience=2)  # after the run's end
    assert (ending, progress.step, windows, kept) == ("patience", 15, [], Counter())


def test_evaluate_every_steps_works_within_epochs(background):
    """At steps 3, 6, ... 18, and at the end, 20; epochs end at 5, 10, 15."""
    values = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    waiting = iter(values)
    ending, progress, _, kept = run(background, values=waiting, evaluate_every_steps=3)
    assert (ending, progress.step, progress.epoch, progress.measured) == ("finished", 20, 4, 20)
    assert (progress.best.value, progress.best.step, next(waiting)) == (1.0, 20, 0.0)
    assert kept == Counter(best=7, measured=7)
    progress = Progress(best=Best("val/loss", "min"))
    assert (
        run(background, values=[2.0, 1.0, 3.0, 3.0], patience=2, evaluate_every_steps=3, progress=progress)[0]
        == "patience"
    )
    assert (progress.step, progress.epoch, progress.best.step) == (12, 2, 6)
    assert run(background, values=[4.0, 3.0], num_epochs=4, num_steps=20, evaluate_every_steps=15)[3]["best"] == 2


@pytest.mark.parametrize(("step", "measured", "left"), [(6, 6, 5), (6, 3, 6), (10, 9, 4), (5, 3, 6)])
def test_resume_measures_only_missing_steps(background, step, measured, left):
    progress = taken_up(step, measured=measured)
    waiting = iter([0.4] * left)
    ending, *_ = run(background, values=waiting, progress=progress, evaluate_every_steps=3)
    assert (ending, progress.step, progress.epoch, progress.measured) == ("finished", 20, 4, 20)
    assert next(waiting, None) is None and progress.best.value == 0.4


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


def test_checkpoints_by_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("runner.training.stopping.time", SimpleNamespace(monotonic=lambda: now[0]))
    asked, saved = OwnStopCondition(Stop(), Limits(num_epochs=9, num_steps=99, save_every_seconds=1.0)), []
    for step in range(1, 17):
        now[0] = step / 4
        saved += [now[0]] if asked(step) == "save" else []
    assert saved == [1, 2, 3, 4]


def test_grouped_steps_stop_at_evaluation_and_end():
    limits = Limits(num_epochs=4, num_steps=20, save_every_steps=7, evaluate_every_steps=3)
    assert [limits.room(step) for step in (0, 2, 3, 6, 7, 18, 19)] == [3, 1, 3, 1, 2, 2, 1]
    assert Limits(num_epochs=1, num_steps=100).room(3) == 97


def test_learning_rate_point_where_it_changes(background):
    plain = run(background)[2]
    assert [note for window in plain for note in window.notes.get("train/lr", [])] == [(1, 0.1)]
    scheduled = run(background, schedule=lambda optimizer: warmup_cosine(optimizer, num_steps=20))[2]
    steps = [step for window in scheduled for step, _ in window.notes["train/lr"]]
    assert steps == [1, 2, *range(4, 21)]  # the third step still has the full rate
    assert json.dumps(scheduled[0].notes)  # plain numbers


def test_pruning_at_epoch_end_except_last(background):
    asked = []

    def prune_from(poor):
        return lambda values: asked.append(values["val/loss"]) or values["val/loss"] >= poor

    for poor, ending, num_epochs in ((3, "pruned", 3), (4, "finished", 4)):
        asked.clear()
        found, progress, _, _ = run(background, values=[1, 2, 3, 4], is_pruned=prune_from(poor))
        assert (found, progress.epoch, asked) == (ending, num_epochs, [1, 2, 3, 4][:num_epochs])
    found, progress, _, _ = run(background, values=[1, 2, 3, 4], is_pruned=prune_from(2), num_steps=10)
    assert (found, progress.step) == ("finished", 10)
