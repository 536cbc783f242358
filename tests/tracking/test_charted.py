"""Which points MLflow's charts show of a run that has finished: asked of MLflow's own store, as its pages do."""

import random

import numpy as np
import pytest
import seeded
from mlflow.tracking._tracking_service.utils import _get_store

from runner.tracking import charted, thinning
from runner.tracking.journal_records import Points, Record
from runner.tracking.uploader import Uploader

LOSS = "train/loss"


def drawing(*more):
    """Another one in each run of the tests."""
    return np.random.default_rng(random.Random(f"{seeded.SEED} {more}").getrandbits(32))


def shown(rows):
    """The first row of each of 320 parts as long as each other, the longer ones first, as SQL's NTILE has it."""
    rows = np.asarray(rows)
    size, longer = divmod(len(rows), charted.SHOWN)
    sizes = np.full(charted.SHOWN, size)
    sizes[:longer] += 1
    return set(rows[np.cumsum(sizes) - sizes].tolist())


def chosen_of(values, *, most, expected):
    """Whether each of a run's points is sent by the end, before more of them are."""
    state = thinning.begin({}, {"most": most, "expected": expected})
    steps = np.arange(len(values))
    chosen, state = thinning.choose(state, [Record(0, 0, "points", Points((LOSS,), steps, steps, values[:, None]))])
    chosen += thinning.close(state, is_over=True)[0]
    is_sent = np.zeros(len(values), bool)
    is_sent[[step for _, _, step, _ in chosen]] = True
    return is_sent


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2_500, 2_500), (5_000, 5_000), (100_000, 100_000), (100_000, 10**7), (30_000, 10_000), (200_000, 200_000)],
)
def test_spikes_of_one_step_are_shown(count, expected):
    draw = drawing(count, expected)
    values = 2 * np.exp(-np.arange(count) / count * 20) + draw.normal(size=count) / 20
    spikes = draw.choice(np.arange(count // 10, count - 20), 6, replace=False)
    values[spikes] += [50, -40, 9, -9, 8, -8]
    values[draw.choice(count // 20, 3)] = np.nan
    is_sent = chosen_of(values, most=2000, expected=expected)
    more = charted.more(values, is_sent, most=2000)
    assert not is_sent[more].any() and len(set(more)) == len(more)
    before = shown(np.flatnonzero(is_sent))
    is_sent[more] = True
    rows = np.flatnonzero(is_sent)
    assert len(rows) % charted.SHOWN == 0 and len(rows) <= 2000
    assert set(spikes[:2]) <= shown(rows)
    assert len({step for step in spikes if is_sent[step]} - shown(rows)) <= 2
    assert len(shown(rows) - before) > 50  # it is by choice


@pytest.mark.parametrize("at", range(240, 250))
def test_the_best_is_shown_though_it_stands_out_nowhere(at):
    values, is_sent = np.zeros(5000), np.zeros(5000, bool)
    is_sent[::10] = True
    values[::20] = 1.0
    values[2000:3000] = 5 - np.square((np.arange(2000, 3000) - 10 * at) / 1000)  # a hill among what stands out
    is_sent[charted.more(values, is_sent, most=2000)] = True
    assert 10 * at in shown(np.flatnonzero(is_sent))


@pytest.mark.parametrize("fill", [0.0, np.nan, np.inf])
def test_of_equal_values_some_are_shown(fill):
    values, is_sent = np.full(5000, fill), np.zeros(5000, bool)
    is_sent[::10] = True
    assert len(charted.more(values, is_sent, most=2000)) == 640 - 500


@pytest.mark.parametrize(
    ("most", "num_sent", "count"), [(2000, 320, 5000), (2000, 1950, 5000), (600, 500, 5000), (2000, 700, 800)]
)
def test_nothing_more_goes_where_all_is_shown_or_no_room_is(most, num_sent, count):
    is_sent = np.zeros(count, bool)
    is_sent[:num_sent] = True
    assert charted.more(np.random.default_rng(0).normal(size=count), is_sent, most=most).size == 0


def test_where_all_that_is_between_is_sent_nothing_more_is():
    is_sent = np.zeros(5000, bool)
    is_sent[:1000] = True  # no room between these: none of them could be another's part's first
    values = np.zeros(5000)
    values[501] = 9
    assert 501 not in shown(np.flatnonzero(is_sent))
    assert charted.more(values, is_sent, most=2000).size == 0


@pytest.fixture
def steps_of(uri, client, write):
    """Of a run in the store: the steps of a metric's points, and of those that a chart is answered with."""

    def find(run_id, key):
        answered = _get_store(uri).get_metric_history_bulk_interval([run_id], key, charted.SHOWN, None, None)
        return [step for step, *_ in write.history(client, run_id, key)], {point.step for point in answered}

    return find


@pytest.mark.parametrize("is_another", [False, True])
def test_mlflow_shows_them(folder, journal, write, uri, steps_of, is_another):
    """is_another: whether another process sends the run's end than what sent its points."""
    draw = drawing(is_another)
    # of the first 200 nearly all go as they come: no more of them can be sent that would let each begin a part
    spike, count = int(draw.integers(300, 5900)), 6000
    values = np.stack([draw.normal(size=count), draw.normal(size=count)], 1)
    values[spike] = 90, -90
    write.start(journal, points={"most": 2000, "expected": count})
    names = (LOSS, "train/p>0.5")
    for first in range(0, count, 200):
        steps = np.arange(first, first + 200)
        journal.points(names, steps, 1_700_000_000_000 + steps, values[first : first + 200])
    uploader = Uploader(folder, uri)
    assert uploader.attempt(postponed=True)
    write.end(journal)
    if is_another:
        uploader.leave()
        uploader = Uploader(folder, uri)
    assert uploader.attempt(postponed=True)
    ack = uploader.ack
    for name in names:
        steps, answered = steps_of(ack.run_id, name.replace(">", "_"))
        assert len(steps) == len(set(steps)) and len(steps) % charted.SHOWN == 0
        assert spike in answered and len(answered) == charted.SHOWN
    assert ack.points_written + ack.points_left_out == 2 * count


def test_a_run_that_goes_on_is_shown_again_and_none_goes_twice(folder, journal, write, uri, steps_of):
    uploader = Uploader(folder, uri)
    for part in range(2):  # the third has no room for more
        write.start(journal, uid="one", points={"most": 2000, "expected": 3000 * (part + 1)})
        values = drawing(part).normal(size=(3000, 1))
        values[1234] = 90 + part
        steps = 3000 * part + np.arange(3000)
        journal.points((LOSS,), steps, 1_700_000_000_000 + steps, values)
        write.end(journal)
        assert uploader.attempt(postponed=True)
        found, answered = steps_of(uploader.ack.run_id, LOSS)
        assert len(found) == len(set(found)) <= 2000 and 3000 * part + 1234 in answered
        assert uploader.ack.points_written == len(found)
