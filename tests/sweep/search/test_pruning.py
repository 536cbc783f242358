"""A job's view of the study: the values it reports, when it is pruned, and the errors it tolerates."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import event

from runner.errors import is_full_disk
from runner.sweep.search import study as studies
from runner.sweep.search.study import Pruning, StudyTrial, make_study, open_storage

pytestmark = pytest.mark.slow

SPACE = {"a": optuna.distributions.FloatDistribution(0, 1)}


def made(folder, pruning, direction="minimize"):
    storage = open_storage(folder / "optuna.db", is_new=True)
    return make_study(storage, [direction], pruning)


def run(folder, number, values, first=1):
    """Report one value per epoch; return the epoch at which the trial was pruned."""
    trial = StudyTrial(str(folder / "optuna.db"), number, metric="val/loss")
    for epoch, value in enumerate(values, first):
        if trial.gives_up(value, epoch):
            return epoch
    return None


def whole(study, folder, curves):
    for curve in curves:
        number = study.ask(SPACE).number
        assert run(folder, number, curve) is None
        study.tell(number, curve[-1])


GOOD = [[5.0, 4.0, 3.0, 2.0], [6.0, 5.0, 4.0, 3.0]]
BAD = [9.0] * 4


@pytest.mark.parametrize(
    ("pruning", "epoch"),
    [
        (Pruning(3, 2), 3),
        (Pruning(1, 2), 1),
        (Pruning(3, 3), None),  # too few trials have finished
        (None, None),
    ],
)
def test_poor_trial_is_pruned_after_warmup(pruning, epoch, tmp_path):
    study = made(tmp_path, pruning)
    whole(study, tmp_path, [GOOD[0]] * 2)
    number = study.ask(SPACE).number
    assert run(tmp_path, number, BAD) == epoch
    reported = study.trials[number].intermediate_values
    assert reported == dict.fromkeys(range(1, (epoch or 4) + 1), 9.0)
    assert run(tmp_path, study.ask(SPACE).number, [1.0, float("nan")]) == 2  # a value that is not finite


def test_good_trial_continues_also_if_maximized(tmp_path):
    """In a directory whose name has special characters."""
    (folder := tmp_path / "a {b} c%20?d#e").mkdir()
    study = made(folder, Pruning(1, 2), "maximize")
    whole(study, folder, GOOD)
    assert [run(folder, study.ask(SPACE).number, values) for values in (BAD, [0.1] * 4)] == [None, 1]
    assert (folder / "optuna.db").exists()


def test_resumed_trial_reports_nothing_twice(tmp_path, recwarn):
    study = made(tmp_path, Pruning(3, 2))
    whole(study, tmp_path, GOOD)
    number = study.ask(SPACE).number
    assert run(tmp_path, number, [1.0, 1.0]) is None
    # the same epochs again, then one that is judged: 1.0 is the best value
    assert run(tmp_path, number, [1.0, 1.0, 9.0]) is None
    other = study.ask(SPACE).number
    assert run(tmp_path, other, [9.0, 9.0]) is None
    # killed between the report of epoch 3 and its judgment, and interrupted in epoch 1: judged at the last epoch
    trial = study.trials[other]
    study._storage.set_trial_intermediate_value(trial._trial_id, 3, 9.0)
    assert run(tmp_path, other, [9.0, 9.0]) is None
    assert run(tmp_path, other, [9.0], first=3) == 3
    assert study.trials[number].intermediate_values == {1: 1.0, 2: 1.0, 3: 9.0}
    assert not recwarn.list


def test_study_accepts_concurrent_writers(tmp_path):
    study = made(tmp_path, Pruning(20, 2))
    numbers = [study.ask(SPACE).number for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        ends = [threads.submit(run, tmp_path, number, [1.0] * 5) for number in numbers]
        others = [study.ask(SPACE) for _ in range(3)]
        for trial in others:
            study.tell(trial.number, 1.0)
    assert [end.result() for end in ends] == [None] * 4
    assert [len(study.trials[number].intermediate_values) for number in numbers] == [5] * 4
    assert [study.trials[trial.number].state for trial in others] == [TrialState.COMPLETE] * 3


def test_locked_study_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "WAIT_SECONDS", 0.01)
    study = made(tmp_path, Pruning(1, 2))
    whole(study, tmp_path, GOOD)
    number = study.ask(SPACE).number
    trial = StudyTrial(str(tmp_path / "optuna.db"), number, metric="val/loss")
    other = sqlite3.connect(tmp_path / "optuna.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waits = []
    monkeypatch.setattr(studies.time, "sleep", lambda seconds: waits.append(seconds) or other.execute("COMMIT"))
    assert trial.gives_up(9.0, 1) and len(waits) == 1
    other.close()


def fill(engine):
    """Fill the disk, from SQLite's point of view: the database gets no further page."""
    event.listen(engine, "checkout", lambda connection, *_: connection.execute("PRAGMA max_page_count=1"))


def test_full_disk_does_not_fail_trial(tmp_path, caplog):
    storage = open_storage(tmp_path / "optuna.db", is_new=True)
    study = make_study(storage, ["minimize"], Pruning(1, 2))
    whole(study, tmp_path, GOOD)
    trial = StudyTrial(str(tmp_path / "optuna.db"), study.ask(SPACE).number, metric="val/loss")
    fill(storage.engine)
    with pytest.raises(OSError) as raised:
        for number in range(1000):  # the last pages have space for some rows
            studies.patiently(partial(study.set_user_attr, str(number), "x" * 900))
    assert is_full_disk(raised.value)
    fill(trial._open()[0].engine)
    for epoch in range(1, 1000):
        assert not trial.gives_up(0.0, epoch)
        if caplog.records:
            break
    assert "the trial continues: [Errno 28] No space left on device: 'optuna.db'" in caplog.text
    assert len(study.trials) == 3


def test_missing_study_does_not_fail_trial(tmp_path, caplog):
    study = made(tmp_path, Pruning(1, 0))
    number = study.ask(SPACE).number
    study.tell(number, state=TrialState.FAIL)
    assert run(tmp_path, number, [9.0]) is None  # a trial that has already ended
    assert run(tmp_path, 77, [9.0]) is None
    (tmp_path / "optuna.db").unlink()
    assert run(tmp_path, number, [9.0]) is None
    assert caplog.text.count("the trial continues") == 3
