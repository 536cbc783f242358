import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from runner.errors import RunnerError
from runner.training import metric_buffer
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer, NotFiniteError, Window


def make(background, device, **settings):
    windows: list[Window] = []
    buffer = MetricBuffer(torch.device(device), windows.append, background=background, **settings)
    return buffer, windows


def fill(buffer, values):
    for value in values:
        buffer.write({"loss": torch.tensor(float(value)), "accuracy": torch.tensor(value / 2)})


@pytest.mark.parametrize("num_steps", [0, 1, 9, 10, 11, 20, 35])
def test_every_row_arrives_once_and_in_order(background, num_steps):
    buffer, windows = make(background, "cpu", pull_every=10)
    fill(buffer, range(num_steps))
    buffer.pull()
    background.wait()
    steps = [step for window in windows for step in window.steps.tolist()]
    values = [row for window in windows for row in window.values.tolist()]
    assert steps == list(range(1, num_steps + 1))
    assert values == [[float(value), value / 2] for value in range(num_steps)]
    assert buffer.pulls == len(windows) == -(-num_steps // 10)


class Copied:
    """An event behind a copy, which is over once the host has waited for it."""

    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over

    def synchronize(self):
        self.is_over = True


def test_host_is_at_most_two_windows_ahead(background, monkeypatch):
    """Replays of graphs are queued by the thousand: without a limit, a stop would take effect minutes late."""
    buffer, _ = make(background, "cpu", pull_every=10)
    events, delivered = [], []
    copy = MetricBuffer._copy
    monkeypatch.setattr(buffer, "_copy", lambda rows: (copy(buffer, rows)[0], events.append(Copied()) or events[-1]))
    monkeypatch.setattr(buffer, "_deliver", lambda *window: delivered.append(window))  # no other code waits
    for num_windows in range(1, 6):
        fill(buffer, range(10))
        assert [event.is_over for event in events] == [True] * (num_windows - 1) + [False]
    buffer.pull()


def test_window_is_copy_unchanged_by_later_steps(background):
    buffer, windows = make(background, "cpu", pull_every=2)
    fill(buffer, range(8))
    background.wait()
    assert windows[0].values[:, 0].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("num_steps", "points"), [(12, [1.5, 5.5, 9.5]), (14, [1.5, 5.5, 9.5, 12.5])])
def test_every_writes_mean_at_last_step(background, num_steps, points):
    buffer, windows = make(background, "cpu", pull_every=10, every=4)
    fill(buffer, range(num_steps))
    buffer.pull()
    background.wait()
    assert [value for window in windows for value, _ in window.values.tolist()] == points
    assert [step for window in windows for step in window.steps.tolist()][-1] == num_steps


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, a list with one number."""
    now = [0.0]
    monkeypatch.setattr(metric_buffer, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0]))
    return now


def test_points_have_step_times_despite_delay(background, now):
    """One step per second; the first window is delivered after the second one has ended."""
    buffer, windows = make(background, "cpu", pull_every=5)
    gate = threading.Event()
    background.do(gate.wait)
    for value in range(10):
        now[0] += 1
        fill(buffer, [value])
    gate.set()
    background.wait()
    assert [window.times_ms.tolist() for window in windows] == [
        [1000 * s for s in range(1, 6)],
        [1000 * s for s in range(6, 11)],
    ]
    assert [window.seconds for window in windows] == [5, 5]


def test_incomplete_means_wait_for_next_window(background, now):
    """One step per second."""
    buffer, windows = make(background, "cpu", pull_every=20, every=4)
    for num_steps, is_end in ((6, False), (3, True)):
        now[0] += num_steps
        fill(buffer, range(num_steps))
        buffer.pull(is_end=is_end)
        background.wait()
        assert buffer.seen_until == pytest.approx(now[0] - (0 if is_end else 2))
    assert [(window.num_steps, window.seconds) for window in windows] == [(4, pytest.approx(4)), (5, pytest.approx(5))]
    assert [window.times_ms.tolist() for window in windows] == [[4000], [8000, 9000]]
    assert [window.steps.tolist() for window in windows] == [[4], [8, 9]]
    assert [value for window in windows for value, _ in window.values.tolist()] == [1.5, 2.5, 2.0]


def test_buffer_has_room_until_next_pull(background):
    buffer, windows = make(background, "cpu", pull_every=10)
    for num_steps, room in ((0, 10), (3, 7), (6, 1), (1, 10)):
        fill(buffer, range(num_steps))
        assert buffer.room == room
    background.wait()
    assert len(windows) == 1


def test_notes_are_host_numbers_in_window(background):
    buffer, windows = make(background, "cpu", pull_every=2)
    buffer.note("train/lr", 0.1)
    fill(buffer, range(2))
    buffer.note("train/lr", 0.2)
    fill(buffer, range(2))
    background.wait()
    assert [window.notes for window in windows] == [{"train/lr": [(1, 0.1)]}, {"train/lr": [(3, 0.2)]}]


def test_nonfinite_loss_names_step_keeps_points(background):
    buffer, windows = make(background, "cpu", pull_every=4)
    with pytest.raises(NotFiniteError, match="train/loss is nan at step 7") as caught:
        fill(buffer, [1, 2, 3, 4, 5, 6, float("nan"), 8])
        background.wait()
    assert caught.value.step == 7
    assert sum(len(window.values) for window in windows) == 8


def test_other_values_may_be_anything(background):
    buffer, windows = make(background, "cpu", pull_every=2)
    for _ in range(2):
        buffer.write({"loss": torch.tensor(1.0), "ratio": torch.tensor(float("inf"))})
    background.wait()
    assert np.isinf(windows[0].values[:, 1]).all()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(torch.tensor(2.0, dtype=torch.bfloat16), np.float32), (torch.tensor(0.1, dtype=torch.float64), np.float64)],
)
def test_rows_are_float32_unless_value_is_float64(background, value, dtype):
    buffer, windows = make(background, "cpu", pull_every=1)
    buffer.write({"loss": value, "accuracy": torch.tensor(0.5)})
    background.wait()
    assert windows[0].values.dtype == dtype and windows[0].values.tolist() == [[value.item(), 0.5]]


def test_sink_error_is_raised_in_training_thread():
    def full(window):
        raise OSError("no space left")

    background = Background()
    buffer = MetricBuffer(torch.device("cpu"), full, background=background, pull_every=1)
    with pytest.raises(OSError, match="no space left"):
        fill(buffer, range(1))
        background.wait()
    background.close()


def test_other_value_names_fail_order_is_corrected(background):
    buffer, windows = make(background, "cpu", pull_every=10)
    fill(buffer, [1, 2])
    buffer.write({"accuracy": torch.tensor(1.5), "loss": torch.tensor(3.0)})
    for values in ({"loss": torch.tensor(1.0)}, {"loss": torch.tensor(1.0), "extra": torch.tensor(1.0)}):
        with pytest.raises(RunnerError, match=r"the values of a step are loss(.|\n)*before were loss, accuracy"):
            buffer.write(values)
    buffer.pull()
    background.wait()
    assert windows[0].values.tolist() == [[1.0, 0.5], [2.0, 1.0], [3.0, 1.5]]


@pytest.mark.parametrize("pull_every", [5, 10, 20, 40])
@pytest.mark.parametrize("every", [1, 3])
def test_rows_after_changed_pull_interval_are_complete(background, pull_every, every):
    first, _ = make(background, "cpu", pull_every=40, every=every)
    fill(first, range(30))
    second, windows = make(background, "cpu", pull_every=pull_every, every=every)
    second.step = 30
    second.load_state(first.state())
    fill(second, range(30, 100))
    second.pull()
    background.wait()
    values = [row[0] for window in windows for row in window.values.tolist()]
    steps = [step for window in windows for step in window.steps.tolist()]
    groups = [list(range(100))[at : at + every] for at in range(0, 100, every)]
    assert steps == [group[-1] + 1 for group in groups]
    assert values == pytest.approx([sum(group) / len(group) for group in groups])
