import json
import random

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from runner.runs import history as reading
from runner.tracking import thinning, uploader
from runner.tracking.ack import read_ack
from runner.tracking.journal_reader import HISTORY
from runner.tracking.journal_records import Points, Record
from runner.tracking.mlflow_events import own_file
from runner.tracking.uploader import Uploader

LOSS, VAL = "train/loss", "val/loss"


def records(values, pieces, name=LOSS):
    """Return one metric's rows, one per step, in records of these sizes."""
    found, at = [], 0
    for size in pieces:
        steps = np.arange(at + 1, at + size + 1)
        found.append(Record(0, 0, "points", Points((name,), steps, 1000 + steps, values[at : at + size, None])))
        at += size
    assert at == len(values)
    return found


def pieces_of(count, rng):
    found = []
    while count:
        found.append(min(count, rng.randint(1, 300)))
        count -= found[-1]
    return found


def sent(values, *, most, expected, pieces, name=LOSS):
    """Return the sent points of a whole run, one call per record, with the state stored as JSON like in ack.json."""
    state = thinning.begin({}, {"most": most, "expected": expected})
    found = []
    for record in records(values, pieces, name):
        chosen, state = thinning.choose(state, [record])
        state = json.loads(json.dumps(state))
        found += chosen
    chosen, state = thinning.close(state, is_over=True)
    assert state["left_out"] == len(values) - len(found + chosen)
    return found + chosen


@pytest.mark.parametrize("name", [LOSS, VAL])
@pytest.mark.parametrize("count", [1, 7, 150, 151, 200, 5_003, 20_000])
def test_first_last_minimum_maximum_are_sent(count, name):
    rng = random.Random(count)
    values = np.random.default_rng(rng.getrandbits(32)).normal(size=count)
    for expected in (count, count // 3, None):  # the run may take more steps than planned
        found = sent(values, most=200, expected=expected, pieces=pieces_of(count, rng), name=name)
        steps = [step for _, _, step, _ in found]
        assert steps == sorted(set(steps)) and len(steps) <= 200
        assert {1, count, int(values.argmin()) + 1, int(values.argmax()) + 1} <= set(steps)
        assert all((each, time, value) == (name, 1000 + step, values[step - 1]) for each, time, step, value in found)
        if count <= 150:
            assert len(steps) == count
        elif expected == count:
            assert len(steps) > 60  # the limit is used
        other = sent(values, most=200, expected=expected, pieces=pieces_of(count, rng), name=name)
        assert other == found  # independent of the sender, and of how records are split


def test_spike_in_million_steps_is_sent():
    values = np.zeros(1_000_000)
    values[[123_456, 654_321]] = 5, -5
    found = sent(values, most=2000, expected=1_000_000, pieces=[10_000] * 100)
    assert {(step, value) for _, _, step, value in found if value} == {(123_457, 5.0), (654_322, -5.0)}


def test_run_that_ends_early_shows_beginning():
    values = np.random.default_rng(0).normal(size=2000)
    found = sent(values, most=2000, expected=1_000_000, pieces=[100] * 20)
    assert len(found) > 200 and [step for _, _, step, _ in found][:20] == list(range(1, 21))


def test_single_nan_is_sent_once():
    values = np.ones(3000)
    values[700] = np.nan
    found = sent(values, most=200, expected=3000, pieces=[100] * 30)
    assert [step for _, _, step, value in found if np.isnan(value)] == [701]


@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_minimum_and_maximum_ignore_nan(share):
    draw = np.random.default_rng(round(1000 * share))
    values = draw.normal(size=4_000)
    values[draw.random(4_000) < share] = np.nan
    values[[777, 1_777, 2_777]] = 9, -9, np.nan
    found = sent(values, most=400, expected=4_000, pieces=pieces_of(4_000, random.Random(0)))
    steps = [step for _, _, step, _ in found]
    assert {1, 778, 1_778, 4_000} <= set(steps) and len(steps) <= 400
    assert any(np.isnan(value) for *_, value in found)
    if share < 1:
        assert np.isfinite([value for *_, value in found]).sum() > 140  # every interval has points
    assert repr(sent(values, most=400, expected=4_000, pieces=[1] * 4_000)) == repr(found)


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize("name", [LOSS, VAL])
@pytest.mark.parametrize(
    ("most", "count", "num_parts"), [(200, 151, 2), (200, 1000, 2), (2000, 1000, 4), (2000, 5000, 4)]
)
def test_resumed_run_has_room_again(most, count, num_parts, name, is_over):
    """A resumed run of another length each time: after its end, or after a stop in the middle of an interval."""
    values = np.random.default_rng(0).normal(size=num_parts * count)
    state, sizes, steps = {}, [], []
    for number, record in enumerate(records(values, [count] * num_parts, name), 1):
        state = thinning.begin(state, {"most": most, "expected": number * count})
        for step in (thinning.choose(state, [record]), None):
            chosen, state = step or thinning.close(state, is_over=is_over or number == num_parts)
            steps += [step for _, _, step, _ in chosen]
        sizes.append(len(steps) - sum(sizes))
    assert min(sizes) > 20, sizes
    assert steps == sorted(set(steps)) and len(steps) <= most
    assert steps[-1] == len(values)


@pytest.mark.parametrize("most", [100, 2000])
def test_resumed_run_continues_rare_metrics(most):
    values = np.random.default_rng(0).normal(size=4 * most)
    first, *others = records(values, [2 * most] + [most // 10] * 20, name="val/loss")
    state = thinning.begin({}, {"most": most, "expected": 100 * most})
    chosen, state = thinning.choose(state, [first])
    waiting, state = thinning.close(state, is_over=True)
    state, live = thinning.begin(state, {"most": most, "expected": 200 * most}), 0
    for record in others:
        more, state = thinning.choose(state, [record])
        chosen += more
        live += bool(more)
    ended = thinning.close(state, is_over=True)[0]
    assert live > 1 and len(chosen + waiting + ended) <= most


@pytest.mark.parametrize("most", [100, 200, 2000])
def test_often_stopped_run_keeps_its_end(most):
    values = np.random.default_rng(0).normal(size=60_000)
    plan = {"most": most, "expected": 60_000}
    state, found = {}, []
    for record in records(values, [300] * 200):
        state = thinning.begin(state, plan)
        for step in (thinning.choose(state, [record]), None):
            chosen, state = step or thinning.close(state, is_over=False)
            found += chosen
    chosen, state = thinning.close(state, is_over=True)
    steps = [step for _, _, step, _ in found + chosen]
    assert steps == sorted(set(steps)) and len(steps) <= most
    assert {1, 60_000, int(values.argmin()) + 1, int(values.argmax()) + 1} <= set(steps)
    if most == 2000:  # the last point before each stop is sent
        assert sum(step % 300 == 0 for step in steps) > 150


def test_store_gets_part_and_complete_file(folder, journal, write, upload, client, uri):
    write.start(journal, points={"most": 100, "expected": 2000})
    for first in range(1, 2000, 250):
        write.rows(journal, first, 250)
    write.end(journal)
    ack = upload()
    assert ack.is_complete and ack.points_written + ack.points_left_out == 4000
    assert ack == read_ack(folder) and ack.counts["points_left_out"] == ack.points_left_out
    found = write.history(client, ack.run_id, LOSS)
    assert 30 < len(found) <= 100 and found[0][0] == 1 and found[-1][0] == 2000
    (folder / "journal/journal.bin").rename(folder / "elsewhere")  # the points now come from the store
    series = reading.history(ack.run_id, uri=uri)
    steps, times_ms, values = series["train/accuracy"]
    assert steps.tolist() == list(range(1, 2001)) and values.tolist() == [step + 0.1 for step in range(1, 2001)]
    assert times_ms.tolist() == [1_700_000_000_000 + step for step in range(1, 2001)]


def test_repeated_sending_chooses_the_same_points(folder, journal, write, uri, client, monkeypatch):
    """A store that accepts a call but loses the answer, repeatedly, with a new sender each time."""
    write.start(journal, points={"most": 100, "expected": 3000})
    for first in range(1, 3000, 100):
        write.rows(journal, first, 100)
    write.end(journal)
    rng = random.Random(0)
    batch = type(client).log_batch

    def lossy(self, *given, **named):
        batch(self, *given, **named)
        if rng.random() < 0.5:
            raise MlflowException("the answer is lost")

    monkeypatch.setattr(type(client), "log_batch", lossy)
    monkeypatch.setattr(uploader, "MAX_POINTS", 40)
    for _ in range(200):
        one = Uploader(folder, uri)
        if one.attempt(postponed=True):
            break
    assert one.ack.is_complete
    steps = [step for step, *_ in write.history(client, one.ack.run_id, LOSS)]
    assert steps == sorted(set(steps)) and len(steps) <= 100
    assert 2 * len(steps) == one.ack.points_written


def test_killed_run_sends_last_point_and_history(folder, journal, write, uri, client):
    write.start(journal, points={"most": 100, "expected": 5000})
    write.rows(journal, 1, 777)
    one = Uploader(folder, uri)
    assert one.attempt(postponed=True)
    before = [step for step, *_ in write.history(client, one.ack.run_id, LOSS)]
    assert before[-1] < 777
    assert one.abandon()
    assert write.history(client, one.ack.run_id, LOSS)[-1][0] == 777
    assert own_file(folder, HISTORY).is_file()
    assert [item.path for item in client.list_artifacts(one.ack.run_id)] == [HISTORY]
