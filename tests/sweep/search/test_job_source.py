"""The study's part of a search: its trials, their order, and the state after a kill between two writes."""

import json
import math

import pytest
from omegaconf import OmegaConf
from optuna.trial import TrialState
from refused import problems_of

from runner.config.schema import SearchKeys
from runner.device import Hardware
from runner.errors import RunnerError
from runner.experiment.summary import Summary
from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import Ledger, Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.launchers.local import Capacity, devices_for
from runner.sweep.search.job_source import Suggestions
from runner.sweep.search.space import read_space
from runner.sweep.search.study import Pruning, StudyTrial
from runner.sweep.sweep import SweepContext

pytestmark = pytest.mark.slow

LOSS = ({"metric": "val/loss", "direction": "minimize"},)
BOTH = (*LOSS, {"metric": "val/accuracy", "direction": "maximize"})
LR = "lr=tag(log,interval(1e-4,1e-1))"
WORDS = ("epochs=3", LR, "width=[32],[64],[128]")


def settings_with(**changed):
    defaults = dict(metric="val/loss", direction=None, sampler="tpe", seed=0, pruner="auto", params=None)
    return SearchKeys(**dict(n_trials=12, warmup_epochs=3, startup_trials=5, batch=4, **defaults) | changed)


class Unlaunched(SweepContext):
    """SweepContext whose jobs are not composed: the test decides how they end."""

    def prepare(self, job):
        if job.trial.get("width") == "broken":
            raise RunnerError()
        return PreparedJob(job, None)


class Search:
    """A search in a directory: opened like by a new process, left like after a kill."""

    def __init__(self, folder, *, words=WORDS, goals=LOSS, num_slots=2, pruning=None, retry=False, **settings):
        sweep = ledger.read(folder) if (folder / ledger.FILE).exists() else None
        self.ledger, self.said = Ledger(folder), []
        if sweep is None:
            sweep = Sweep(folder, "uid", 0, words, goals)
            self.ledger.begin(sweep)
        config = OmegaConf.create({"sweep": {"retry": retry}})
        where = (Hardware(), True, devices_for, Capacity("", num_slots))
        self.context = Unlaunched(sweep, self.ledger, config, None, *where, self.said.append)
        self.jobs = sweep.jobs
        try:
            self.source = Suggestions(self.context, read_space(words, None), goals, settings_with(**settings), pruning)
        except BaseException:
            self.ledger.close()
            raise

    def start(self):
        """Return the next trial, running; None if no trial is ready."""
        prepared = self.source.next(0)
        if prepared is None:
            return None
        prepared.job.state = "running"
        self.ledger.note(prepared.job)
        return prepared.job

    def end(self, job, state="finished", values=None):
        """End a job like the engine: write the summary, then update the source and the ledger."""
        summary = self.write(job, state, values)
        job.state, job.error = state, summary.error
        self.source.ended(job, summary)
        self.ledger.note(job)

    def write(self, job, state="finished", values=None):
        metrics = values if values is not None else reached(job)
        folder = self.context.sweep.folder_of(job)
        folder.mkdir(exist_ok=True)
        summary = Summary(state, "it burst" if state == "failed" else None, metrics=metrics)
        summary.write(folder)
        return summary

    def run(self):
        """Run all remaining trials, one at a time."""
        while (job := self.start()) is not None:
            self.end(job)
        return self

    def leave(self):
        self.ledger.close()
        return self.context.sweep.folder

    @property
    def trials(self):
        return self.source._trials.all()


def reached(job):
    far = abs(math.log10(float(job.trial["lr"]) / 1e-2))
    wide = job.trial.get("width") != "[64]"
    return {"val/loss": far + wide, "val/accuracy": -(far**2) + len(str(job.trial.get("width")))}


@pytest.fixture
def search(tmp_path):
    opened = []

    def open_one(**settings):
        found = Search(tmp_path, **settings)
        opened.append(found)
        return found

    yield open_one
    for one in opened:
        if one.ledger._lock.is_locked:
            one.leave()


def good(trials):
    return [trial.number for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]


def agrees(search):
    """The study, the ledger and the directories have the same information about each trial."""
    told = ledger.read(search.context.sweep.folder).jobs
    for trial in search.trials:
        if trial.number not in told:
            assert trial.state == TrialState.FAIL
            continue
        job = told[trial.number]
        assert job.trial == trial.params and job.folder_name == str(trial.number)
        states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        assert trial.state == states.get(job.state, TrialState.RUNNING)
        if job.state == "finished":
            summary = json.loads((search.context.sweep.folder_of(job) / "summary.json").read_text())
            assert trial.values == [summary["metrics"][goal["metric"]] for goal in search.context.sweep.objectives]
    return True


@pytest.mark.parametrize(
    ("sampler", "words", "goals"),
    [
        ("random", WORDS, LOSS),
        ("nsga2", WORDS, BOTH),
        ("cmaes", (*WORDS, "momentum=interval(0,1)"), LOSS),
        (
            "tpe",
            (*WORDS, "n=int(interval(1,9))", "s=range(1,9,2)", "f=range(0.1,0.5,0.1)", "m=tag(log,range(1,99))"),
            BOTH,
        ),
    ],
)
def test_samplers_give_requested_number_of_trials(sampler, words, goals, search, capfd):
    num = 12 if sampler == "tpe" else 6
    found = search(sampler=sampler, words=words, goals=goals, n_trials=num).run()
    assert good(found.trials) == list(found.jobs) and agrees(found)
    assert len({job.overrides for job in found.jobs.values()}) == num
    assert all(job.overrides[0] == "epochs=3" for job in found.jobs.values())
    assert capfd.readouterr() == ("", "")  # Optuna prints nothing


def test_grid_resumed_takes_each_combination_once(search):
    words = ("lr=0.1,0.01", "width=[32],[64]", "n=range(1,3)")
    first = search(sampler="grid", words=words, n_trials=50)
    for _ in range(3):
        first.end(first.start())
    first.start()
    asked(first)
    first.leave()
    second = search(sampler="grid", words=words, n_trials=50).run()
    combinations = [tuple(job.trial.values()) for job in second.jobs.values()]
    assert len(combinations) == len(set(combinations)) == 8 and agrees(second)
    assert second.start() is None


def test_finite_space_is_searched_completely(search):
    found = search(words=("lr=0.1,0.01", "width=[32],[64]", "n=range(1,3)"), n_trials=50).run()
    combinations = [tuple(job.trial.values()) for job in found.jobs.values()]
    assert len(combinations) == len(set(combinations)) == 8 and agrees(found)
    assert found.said == ["search: every combination has been tried"]


def test_trials_start_as_slots_get_free(search):
    found = search(num_slots=2, n_trials=6)
    slow, quick = found.start(), found.start()
    assert found.start() is None and found.source.next(1) is None
    for _ in range(4):  # the slow trial blocks no other
        found.end(quick)
        quick = found.start()
    assert quick.number == 5 and slow.state == "running"
    found.end(quick)
    assert [trial.state for trial in found.trials[1:]] == [TrialState.COMPLETE] * 5  # the next one depends on them
    assert found.start() is None  # five have finished, and the sixth is running
    found.end(slow, "failed")
    assert found.start().number == 6  # replaces the failed trial


def test_launcher_without_slots_gets_batches(search):
    found = search(num_slots=None, batch=3)
    assert [found.start() is not None for _ in range(4)] == [True, True, True, False]


def test_job_has_trial_only_with_pruning(search, tmp_path):
    assert search().source.next(0).trial is None
    (folder := tmp_path / "pruned").mkdir()
    pruned = Search(folder, pruning=Pruning(3, 5))
    prepared = pruned.source.next(0)
    assert vars(prepared.trial) == vars(StudyTrial(str(folder / "optuna.db"), 0, metric="val/loss"))
    pruned.leave()


# states after a kill: each function brings a search to a point between two writes


def asked(found):
    found.source._trials.ask([])


def half_asked(found):
    study = found.source._trials._study
    study._storage.create_new_trial(study._study_id)


def planned(found):
    found.source.next(0)


def running(found):
    found.start()


def summary_written(found):
    found.write(found.start())


def told(found, state="finished"):
    job = found.start()
    job.state, job.error = state, "it burst" if state == "failed" else None
    found.source.ended(job, found.write(job, state))


def pruned_and_told(found):
    told(found, "pruned")


def failed_and_told(found):
    told(found, "failed")


def without_the_metric(found):
    found.write(found.start(), values={"train/loss": 1.0})


POINTS = [(asked, 0, 0), (half_asked, 0, 0), (planned, 1, 0), (running, 1, 0), (summary_written, 0, 1), (told, 0, 1)]
POINTS += [(pruned_and_told, 0, 1), (failed_and_told, 0, 0), (without_the_metric, 0, 0)]


@pytest.mark.parametrize(("point", "again", "done"), POINTS, ids=[point.__name__ for point, _, _ in POINTS])
def test_kill_between_writes_loses_nothing(point, again, done, search):
    first = search(n_trials=4)
    first.end(first.start())
    point(first)
    first.leave()
    second = search(n_trials=4)
    num_good = sum(job.state in ("finished", "pruned") for job in second.jobs.values())
    assert (len(second.source._resumed), num_good) == (again, 1 + done)
    before = {number: job.overrides for number, job in second.jobs.items()}
    if again:
        assert second.start().number == 1  # the same trial, in its directory
        second.end(second.jobs[1])
    second.run()
    assert len(good(second.trials)) == 4 and agrees(second)
    assert not [trial for trial in second.trials if trial.state == TrialState.RUNNING]
    assert before.items() <= {number: job.overrides for number, job in second.jobs.items()}.items()
    assert len({job.overrides for job in second.jobs.values()}) == len(second.jobs)


@pytest.mark.parametrize("store", ["sqlite:///here.db", "http://there"])
def test_stopped_trial_continues_and_sends_to_the_current_store(search, store):
    first = search(words=("tracking.uri=http://there", *WORDS))
    job = first.start()
    job.state = "interrupted"
    first.source.ended(job, Summary())
    first.ledger.note(job)
    first.leave()
    second = search(words=(f"tracking.uri={store}", *WORDS))
    assert second.trials[0].state == TrialState.RUNNING and second.said == []
    job = second.start()
    assert job.number == 0 and [text for text in job.overrides if "tracking" in text] == [f"tracking.uri={store}"]


def test_more_trials_repeat_no_suggestion(search):
    """The intervals may change, and an interrupted trial leaves room for another."""
    first = search(n_trials=5, sampler="random")
    (job := first.start()).state = "interrupted"  # e.g., by a queue's time limit
    first.source.ended(job, Summary())
    first.ledger.note(job)
    first.run().leave()
    assert [job.state for job in first.jobs.values()] == ["interrupted"] + ["finished"] * 5
    words = ("epochs=5", "lr=tag(log,interval(1e-3,1e-2))", WORDS[2])
    second = search(words=words, n_trials=9, sampler="random").run()
    assert len({json.dumps(trial.params) for trial in second.trials}) == len(second.trials)
    assert len(good(second.trials)) == 9 and all(1e-3 <= trial.params["lr"] <= 1e-2 for trial in second.trials[6:])
    assert second.jobs[7].overrides[0] == "epochs=5"
    second.leave()
    assert search(n_trials=7).start() is None


def test_missing_study_is_an_error(search, tmp_path, messages):
    search().leave()
    (tmp_path / "optuna.db").write_bytes(b"SQLite format 3\0 torn")  # killed before its first trial
    first = search(n_trials=2).run()
    assert len(good(first.trials)) == 2
    first.leave()
    (tmp_path / "optuna.db").unlink()
    messages(problems_of(search, n_trials=3))


@pytest.mark.parametrize(
    "words", [(LR, "width=[32],[16]"), ("lr=0.1,0.2", WORDS[2]), (LR, "width=int(interval(1,9))")], ids=str
)
def test_changed_choices_are_refused(words, search, messages):
    search(n_trials=2).run().leave()
    messages(problems_of(search, words=words))


def test_failed_trials_are_retried_on_request(search):
    first = search(n_trials=4)
    for number in range(6):
        first.end(first.start(), "failed" if number in (1, 3) else "finished")
    assert first.start() is None and len(good(first.trials)) == 4
    first.leave()
    second = search(n_trials=6, retry=True).run()
    assert [second.jobs[number].trial for number in (6, 7)] == [second.jobs[number].trial for number in (1, 3)]
    assert len(good(second.trials)) == 6
    second.leave()
    assert search(n_trials=7, retry=True).run().jobs[8].trial not in [
        job.trial for job in list(second.jobs.values())[:8]
    ]


@pytest.mark.parametrize("num_good", [0, 1])
def test_search_gives_up_after_failures_in_a_row(search, num_good):
    found = search(n_trials=30)
    for _ in range(num_good):
        found.end(found.start())
    while (job := found.start()) is not None:
        found.end(job, "failed")
    num_failed = 10 if num_good else 5
    last = num_good + num_failed - 1
    assert found.said == [f"search: given up, {num_failed} trials in a row failed; job {last}: it burst"]
    assert len(found.jobs) == last + 1


def test_unknown_metric_ends_search_at_once(search):
    found = search()
    job = found.start()
    found.end(job, values={"val/acc": 1.0, "train/loss": 2.0})
    assert (job.state, job.error) == ("failed", "it has no metric val/loss; it has train/loss, val/acc")
    assert found.start() is None and "given up, the first trial failed" in found.said[0] and agrees(found)


def test_metric_missing_once_continues(search):
    found = search(n_trials=3)
    found.end(found.start())
    found.end(found.start(), values={"val/loss": math.nan})
    found.run()
    assert len(good(found.trials)) == 3 and not found.said and agrees(found)


def test_incompatible_choices_are_failed_trials(search):
    found = search(words=(LR, "width=broken,[64]"), n_trials=8, sampler="random").run()
    assert len(good(found.trials)) == 8
    assert {job.trial["width"] for job in found.jobs.values() if job.state == "failed"} == {"broken"} and agrees(found)
