"""The order of events in a sweep with fake slots: which job starts when, how its end is reported, and the effect of a stop."""

import io
import json
import signal
from collections import deque
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from runner.errors import Problem, RunnerError
from runner.experiment.context import Membership, RunContext
from runner.sweep import scheduler
from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.launchers.process_pool import Ended, NotTakenError
from runner.sweep.scheduler import Rounds, Scheduler, settle
from runner.sweep.terminal import Table
from runner.training.signals import Stop

CONTEXT = RunContext(member=Membership("s", "u", "e", ""))


class FakeLauncher:
    """One slot per device. ends: One entry per call of ended(): the numbers of jobs that end, or an exception to raise."""

    def __init__(self, folder, devices, ends, arriving=()):
        self.folder, self.free, self.ends, self.arriving = folder, list(devices), deque(ends), deque(arriving)
        self.taken, self.log = {}, []

    def start(self, prepared, context):
        device = next((name for name in prepared.devices if name in self.free), None)
        if device is not None:
            self.free.remove(device)
            self.taken[prepared.job.number] = device
            self.log.append(f"{prepared.job.number} on {device}")
            assert context.member.name == prepared.job.name
        return device

    def ended(self, seconds):
        if not self.free and not self.taken and self.arriving:
            self.free.append(self.arriving.popleft())
        what = self.ends.popleft() if self.ends else list(self.taken)
        if isinstance(what, type):
            raise what
        if callable(what):
            jobs = what() or []
            for job in jobs:
                self.taken.pop(job.number, None)
            return jobs
        for number in what:
            self.free.append(self.taken.pop(number))
            (self.folder / str(number)).mkdir()
            (self.folder / str(number) / "summary.json").write_text('{"status": "finished"}')
        return [Ended(number, 0) for number in what]

    def stop(self, what=signal.SIGTERM):
        self.log.append(what.name)
        if what == signal.SIGKILL:
            for number in list(self.taken):
                self.ends.append(lambda number=number: self.taken.pop(number) and [Ended(number, -9)])


def prepared(number, *devices):
    job = Job(number, (), f"job {number}", folder_name=str(number))
    return PreparedJob(job, OmegaConf.create(), ("auto",), devices)


@pytest.fixture
def run(tmp_path):
    def run(jobs, devices, ends, *, stop=None, arriving=(), source=None, publisher=None, **limits):
        sweep = Sweep(tmp_path, "uid", 0, (), jobs={one.job.number: one.job for one in jobs})
        launcher = FakeLauncher(tmp_path, devices, ends, arriving)
        table = Table(Console(file=io.StringIO()))
        with Ledger(tmp_path) as book:
            book.begin(sweep)
            for one in jobs:
                book.plan(one.job)
            scheduler = Scheduler(sweep, book, Rounds(jobs), launcher, table, CONTEXT, publisher)
            scheduler.source = source(scheduler) if source else scheduler.source
            scheduler.run(stop or Stop(), **{"grace_seconds": 60.0} | limits)
        return launcher.log, [job.state for job in ledger.read(tmp_path).jobs.values()], table.console.file.getvalue()

    return run


def test_scheduler_busy_device_blocks_no_other(run):
    jobs = [prepared(0, "cuda:0"), prepared(1, "cuda:0"), prepared(2, "cpu"), prepared(3, "cuda:0", "cpu")]
    log, states, output = run(jobs, ["cuda:0", "cpu"], [[2], [0], [3], [1]])
    assert log == ["0 on cuda:0", "2 on cpu", "3 on cpu", "1 on cuda:0"]
    assert states == ["finished"] * 4
    assert output.index("job 2 finished") < output.index("job 0 finished")


def test_scheduler_prints_failure_of_mlflow(run):
    found = [None, "it is full"]
    publisher = SimpleNamespace(follow=str, gone=str, first_failure=lambda: found.pop(0) if found else None)
    _, _, output = run([prepared(0, "cpu"), prepared(1, "cpu")], ["cpu"], [[0], [], [1]], publisher=publisher)
    assert output.index("MLflow  it is full; the jobs continue") < output.index("job 1 finished")


def test_scheduler_stop_signals_jobs_once(run):
    stop = Stop()

    def requested():
        stop.signal = signal.SIGINT

    log, states, _ = run([prepared(0, "cpu"), prepared(1, "cpu")], ["cpu"], [requested, [], [0]], stop=stop)
    assert log == ["0 on cpu", "SIGTERM"]
    assert states == ["finished", "planned"]  # it finished after the stop was requested


class Search:
    """Creates its next job when there is a free slot; its time is over after the second one."""

    def __init__(self, state, jobs, clock):
        self.state, self.left, self.clock = state, deque(jobs), clock

    def next(self, num_waiting):
        if not self.left:
            return None
        job = self.left[0].job
        self.state.sweep.jobs[job.number] = job
        self.state.ledger.plan(job)
        return self.left.popleft()

    def ended(self, job, summary):
        self.clock.seconds = 60 * job.number


@pytest.mark.parametrize(("left", "recorded"), [([], 0), (["planned"], 1)])
def test_scheduler_max_seconds_leaves_next_trial(run, monkeypatch, left, recorded):
    """If all its jobs had ended, the search would be complete."""
    clock = SimpleNamespace(seconds=0)
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: clock.seconds))
    jobs = [prepared(number, "cpu") for number in range(2 + len(left))]
    search = lambda state: Search(state, jobs, clock)  # noqa: E731
    log, states, output = run([], ["cpu"], [[0], [1]], max_seconds=50, source=search)
    assert log == ["0 on cpu", "1 on cpu", "SIGTERM"]
    assert states == ["finished", "finished", *left]
    assert output.count("sweep.max_seconds=50 was over before all jobs were at their end") == recorded


@pytest.mark.parametrize("second", ["grace", "Ctrl-C"])
def test_scheduler_kills_jobs_after_grace_time(run, second):
    stop = Stop()

    def requested():
        stop.signal = signal.SIGTERM

    ends = [requested, [] if second == "grace" else KeyboardInterrupt]
    log, states, _ = run([prepared(0, "cpu")], ["cpu"], ends, stop=stop, grace_seconds=0 if second == "grace" else 60)
    assert log[:3] == ["0 on cpu", "SIGTERM", "SIGKILL"]
    assert states == ["interrupted"]


@pytest.mark.parametrize(
    ("summary", "code", "is_stopped", "state", "error"),
    [
        ({"status": "finished"}, 0, False, "finished", None),
        ({"status": "pruned"}, 0, True, "pruned", None),
        ({"status": "failed", "error": "ValueError: no\nmore"}, 1, False, "failed", "ValueError: no"),
        ({"status": "killed"}, 143, True, "interrupted", None),
        ({"status": "killed"}, 143, False, "killed", "SIGTERM, from somewhere else"),
        (None, -9, True, "interrupted", None),
        (None, -9, False, "killed", "SIGKILL: by the system when memory ran out, or by `kill -9`"),
        (None, -11, False, "failed", "its process crashed: SIGSEGV, segmentation fault"),
        (None, -15, False, "killed", "SIGTERM, from somewhere else"),
        (None, -35, False, "killed", "signal 35, from somewhere else"),  # a real-time signal, without a name
        (None, 3, False, "failed", "its process ended with exit code 3 and left no summary"),
        (None, 137, False, "killed", "SIGKILL: by the system when memory ran out, or by `kill -9`"),
        (None, 160, False, "failed", "its process ended with exit code 160 and left no summary"),
        (None, 255, False, "failed", "its process ended with exit code 255 and left no summary"),  # sys.exit(-1)
        (None, None, False, "killed", "the process that starts the jobs was killed, and this one with it"),
    ],
)
def test_how_a_job_ended(tmp_path, summary, code, is_stopped, state, error):
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    job = Job(0, (), "", state="running")
    settle(job, tmp_path, code, is_stopped=is_stopped)
    assert (job.state, job.error) == (state, error)
    if job.is_done:
        assert json.loads((tmp_path / "summary.json").read_text())["status"] == state


def test_scheduler_repeats_start_without_room(run):
    """A cluster starts jobs when it has resources: nothing runs, and the jobs wait."""
    log, states, _ = run([prepared(0, "cuda:0")], [], [[]], arriving=["cuda:0"])
    assert log == ["0 on cuda:0"]
    assert states == ["finished"]


def test_scheduler_refused_jobs_stay_planned(run, tmp_path):
    """sweep.resume runs them; if they were noted as running, the resumed sweep would wait for them."""

    def refuse():
        raise NotTakenError(Problem("hydra.launcher.partition=shrt", "Invalid partition", "another"), [1])

    with pytest.raises(RunnerError, match="Invalid partition"):
        run([prepared(0, "cpu"), prepared(1, "cpu")], ["cpu"], [[0], refuse])
    found = ledger.read(tmp_path).jobs.values()
    assert [(job.state, job.device) for job in found] == [("finished", "cpu"), ("planned", None)]


def test_settle_prefers_cause_of_launcher(run):
    lost = [
        Ended(0, None, "its node is gone"),
        Ended(1, 1, "the queue says FAILED"),
        Ended(2, None, is_interrupted=True),
    ]
    _, states, output = run([prepared(0, "a"), prepared(1, "b"), prepared(2, "c")], ["a", "b", "c"], [lambda: lost])
    assert states == ["killed", "failed", "interrupted"]
    assert "job 0 killed: its node is gone" in output
    assert "job 1 failed: the queue says FAILED" in output
