import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock
from waiting import LONGEST, wait_for

from runner.tracking import follow, sync
from runner.tracking.ack import Ack
from runner.tracking.follow import UploadLoop
from runner.tracking.journal import Journal
from runner.tracking.journal_records import EVENT, FILE, encode_frame
from runner.tracking.pipe import BYE, FOLLOW, GONE
from runner.tracking.sync import LOCK, FollowedRun, Turn


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(sync, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(sync, "LOCKED_SECONDS", 0.01)


class Upload:
    """An uploader without a store: a number of things to send, and the result of each attempt."""

    def __init__(self, *results, things=0):
        self.results, self.things = list(results), things
        self.attempts, self.postponed, self.abandoned, self.samples = 0, [], 0, 0
        self.ack, self.waits, self.abandons, self.has_left = Ack(), False, True, False

    def attempt(self, *, postponed, most):
        self.attempts += 1
        self.postponed.append(postponed)
        result = self.results.pop(0) if self.results else True
        if result == "breaks":
            raise KeyError("uid")
        if result is True:
            self.ack = Ack(offset=self.ack.offset + 1, run_id="r")
            self.things = max(0, self.things - most)
        return result is True

    def has_more(self):
        return self.things > 0

    def has_records(self):
        return self.has_more()

    def only_waits(self):
        return self.waits

    def abandon(self):
        self.abandoned += 1
        return self.abandons

    def leave(self):
        self.has_left = True

    def sample(self, *, sends):
        self.samples += not sends

    def note_outage(self, error):
        self.ack = Ack(offset=self.ack.offset, error=error)


class Runs:
    """Runs with real journals and locks, followed in a thread."""

    def __init__(self, root, pipe):
        self.root, self.pipe, self.uploads, self.are_running = root, pipe, {}, {}
        self.turns, self.codes, self.answers, self.requests = [], [], [], []

    def add(self, name, upload=None, *, has_run=True):
        folder = self.root / name
        folder.mkdir()
        if has_run:
            with Journal(folder) as journal:
                journal.event("start", uid=name)
        self.uploads[folder] = upload = upload or Upload()
        whole = upload.attempt

        def attempt(**how):
            self.turns.append(name)
            return whole(**how)

        upload.attempt = attempt
        return upload

    def run_of(self, folder):
        def uploader_of(folder, is_running):
            self.are_running[folder.name] = is_running
            return self.uploads[folder]

        return FollowedRun(folder, uploader_of)

    def ask(self):
        self.requests.append(sum(upload.attempts for upload in self.uploads.values()))
        return self.answers.pop(0) if self.answers else None

    def follow(self, line, *, num_at_once=1, **how):
        loop = UploadLoop(self.root / "sweep", line, run_of=self.run_of, ask=self.ask, num_at_once=num_at_once)
        return loop.run(**how)

    def start(self, line):
        self.thread = threading.Thread(target=lambda: self.codes.append(self.follow(line)))
        self.thread.start()

    def say(self, kind, name):
        self.pipe.say(kind, str(self.root / name))

    def close(self, line):
        """End the training, and wait until the line knows all that was said."""
        self.pipe.close()
        wait_for(lambda: line.closed_at)

    def join(self):
        self.thread.join(LONGEST)
        assert not self.thread.is_alive()
        return self.codes[0]


@pytest.fixture
def runs(tmp_path, pipe):
    return Runs(tmp_path, pipe)


# The pipe -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["0", "my run", "two\nlines", 'a "b" \\', "größe", "\udcff", "bye 5"])
def test_pipe_carries_every_path_in_order(pipe, name):
    line, folder = pipe.line(grace_seconds=7), Path("/runs") / name
    for kind in (FOLLOW, GONE, FOLLOW):
        pipe.say(kind, str(folder))
    pipe.say(BYE, None)
    wait_for(lambda: line.closed_at)
    assert [*line.runs()] == [(FOLLOW, folder), (GONE, folder), (FOLLOW, folder)] and [*line.runs()] == []
    assert line.grace_seconds == 7


def test_uploader_rests_until_the_training_ends(pipe):
    line = pipe.line()
    began = time.monotonic()
    line.rest(0.02)
    assert time.monotonic() - began >= 0.18
    pipe.close()
    line.rest(60)
    assert time.monotonic() - began < 60


def test_uploader_of_a_sweep_does_not_rest(pipe):
    line = pipe.line()
    pipe.say(FOLLOW, "/runs/0")
    line.wait(60)
    began = time.monotonic()
    line.rest(60)
    assert time.monotonic() - began < 60 and line.closed_at is None


# One run ------------------------------------------------------------------------------------------------------------


def test_journal_is_read_until_training_ends(runs, pipe):
    upload, line = runs.add("sweep"), pipe.line()
    runs.start(line)
    wait_for(lambda: upload.attempts >= 5)
    pipe.close()
    assert runs.join() == 0 and upload.abandoned == 1 and upload.samples >= 4 and not runs.requests
    assert upload.postponed[-1] is True and not any(upload.postponed[:4]) and runs.are_running == {"sweep": True}


def test_bye_ends_it_while_a_copy_of_the_pipe_stays_open(runs, pipe):
    runs.add("sweep")
    line = pipe.line(grace_seconds=10)
    pipe.say(BYE, 2.5)
    assert runs.follow(line) == 0
    assert line.grace_seconds == 2.5 and line.closed_at is not None


@pytest.mark.parametrize(("grace", "abandons"), [(0.3, True), (0.0, True), (0.2, False)])
def test_silent_store_is_given_up_after_the_grace(runs, pipe, grace, abandons):
    """abandons: False: everything is sent except the mark of the end."""
    upload, line = runs.add("sweep", Upload(*[False] * 1000)), pipe.line(grace_seconds=grace)
    if not abandons:
        upload.abandons = False
        upload.attempt = lambda **how: True  # without progress
    pipe.close()
    began = time.monotonic()
    assert runs.follow(line) == 3
    assert grace < time.monotonic() - began and not runs.requests
    if abandons:
        assert upload.abandoned == 0 and upload.postponed[-1] is True and upload.attempts > (2 if grace else 0)


def test_progress_renews_the_grace(runs, pipe):
    line = pipe.line(grace_seconds=0.5)
    pipe.close()
    upload = runs.add("sweep", Upload(*[False, False, True] * 5))
    upload.abandon = lambda: not upload.results  # marking the end also fails until the last attempt
    began = time.monotonic()
    assert runs.follow(line) == 0
    assert time.monotonic() - began > 0.5 and upload.attempts == 15


def test_training_without_a_run_leaves_nothing(runs, pipe):
    upload, line = runs.add("sweep", has_run=False), pipe.line()
    pipe.close()
    assert runs.follow(line) == 0 and upload.attempts == 0
    assert not (runs.root / "sweep" / LOCK).exists()


def test_pauses_double_up_to_the_longest(monkeypatch):
    monkeypatch.setattr(sync, "FIRST_PAUSE_SECONDS", 1.0)
    monkeypatch.setattr(sync, "LONGEST_PAUSE_SECONDS", 5.0)
    backoff = sync.Backoff()
    assert [backoff.pause_seconds() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.pause_seconds() == 1


# Many runs ----------------------------------------------------------------------------------------------------------


def test_finished_runs_go_first_and_completely(runs, pipe):
    names = ("sweep", "a", "b", "done", "files")
    for name in names:
        runs.add(name, Upload(things=3))
    runs.uploads[runs.root / "files"].has_records = lambda: False
    line = pipe.line(grace_seconds=30)
    for name in names[1:]:
        runs.say(FOLLOW, name)
    for name in ("done", "files"):
        runs.say(GONE, name)
    wait_for(lambda: line._runs.qsize() == 6)
    runs.start(line)
    wait_for(lambda: len(runs.turns) >= 15)
    others = ["a", "b", "sweep"] * 2 + ["a", "b"]
    assert runs.turns[:15] == ["sweep", *["done"] * 3, "files", *others, *["files"] * 2]
    pipe.close()
    assert runs.join() == 0


def test_slow_store_gets_several_runs_at_once(runs, pipe):
    names = [f"run{number}" for number in range(6)]
    for name in ("sweep", *names):
        runs.add(name, upload := Upload(things=4))
        whole = upload.attempt
        upload.attempt = lambda whole=whole, **how: (
            active.append(0),
            time.sleep(0.05),
            most.append(len(active)),
            active.pop(),
            whole(**how),
        )[-1]
    active, most = [], []
    line = pipe.line(grace_seconds=30)
    for name in names:
        runs.say(FOLLOW, name)
    runs.close(line)
    assert runs.follow(line, num_at_once=4) == 0
    assert max(most) == 4 and all(upload.abandoned == 1 for upload in runs.uploads.values())
    assert most[:1] == [1]  # the sweep's run is created before those of its jobs


def test_owner_that_is_gone_ends_a_slow_upload(runs, pipe, monkeypatch):
    monkeypatch.setattr(follow, "ORPHAN_SECONDS", 0.3)
    upload, line = runs.add("sweep", Upload(things=10**9)), pipe.line(grace_seconds=1000)
    pipe.close()
    began = time.monotonic()
    assert runs.follow(line, has_owner=lambda: time.monotonic() < began + 0.2) == 3
    assert upload.things and time.monotonic() - began > 0.5 and _is_free(FileLock(runs.root / "sweep" / LOCK))


def test_run_followed_before_its_journal_exists_is_sent(runs, pipe):
    first = runs.add("sweep")
    upload = runs.add("late", has_run=False)
    runs.start(pipe.line())
    runs.say(FOLLOW, "late")
    seen = first.attempts
    wait_for(lambda: first.attempts > seen + 3)
    assert upload.attempts == 0
    with Journal(runs.root / "late") as journal:
        journal.event("start", uid="late")
    wait_for(lambda: upload.attempts)
    pipe.close()
    assert runs.join() == 0 and upload.abandoned == 1


def test_run_without_process_is_ended_and_released(runs, pipe):
    first, upload = runs.add("sweep"), runs.add("a", Upload(things=5))
    runs.start(pipe.line())
    runs.say(FOLLOW, "a")
    wait_for(lambda: upload.attempts > 6)
    lock = FileLock(runs.root / "a" / LOCK)
    assert not _is_free(lock)
    assert upload.abandoned == 0
    upload.things = 5
    runs.say(GONE, "a")
    wait_for(lambda: _is_free(lock))
    attempts, seen = upload.attempts, first.attempts
    assert upload.things == 0 and upload.abandoned == 1 and upload.postponed[-1] is True
    wait_for(lambda: first.attempts > seen + 3)
    assert upload.attempts == attempts and first.abandoned == 0  # the sweep's run continues without it
    runs.say(FOLLOW, "a")  # the run may also be followed again
    wait_for(lambda: upload.attempts > attempts)
    runs.say(GONE, "/no/such/run")  # which is not followed
    pipe.close()
    assert runs.join() == 0 and upload.abandoned == 2


def test_run_that_is_resumed_at_once_is_not_marked_killed(runs, pipe):
    runs.add("sweep")
    upload, line = runs.add("a"), pipe.line()
    for kind in (FOLLOW, GONE, FOLLOW):
        runs.say(kind, "a")
    wait_for(lambda: line._runs.qsize() == 3)
    runs.start(line)
    wait_for(lambda: upload.attempts > 2)
    assert upload.abandoned == 0
    pipe.close()
    assert runs.join() == 0


@pytest.mark.parametrize("lingers", [False, True])
def test_run_that_another_process_continues_is_not_marked_killed(runs, monkeypatch, lingers):
    """lingers: it is a process that the killed run has forked, and ends soon."""
    monkeypatch.setattr(sync, "LINGERING_SECONDS", 0.0)
    upload = runs.add("a")
    run = FollowedRun(runs.root / "a", lambda *_: upload, lingering_seconds=60.0 if lingers else 0.0)
    run.end()
    with Journal(runs.root / "a"):
        assert run.turn() is (Turn.IDLE if lingers else Turn.DONE)
        assert upload.abandoned == 0 and upload.has_left is not lingers
    if lingers:
        assert run.turn() is Turn.DONE and upload.abandoned == 1
    run.release()


@pytest.mark.parametrize("how", [False, "breaks"])
def test_failing_run_stops_no_other(runs, pipe, how):
    runs.add("sweep")
    bad, good = runs.add("bad", Upload(*[how] * 1000)), runs.add("good", Upload(things=50))
    line = pipe.line(grace_seconds=0.3)
    for name in ("bad", "good"):
        runs.say(FOLLOW, name)
    runs.close(line)
    assert runs.follow(line) == (3 if how is False else 1)
    assert good.things == 0 and good.abandoned == 1 and bad.abandoned == 0
    assert runs.requests and bad.attempts > 2


def test_outage_is_watched_by_small_requests(runs, pipe):
    names = [f"run{number}" for number in range(20)]
    runs.add("sweep", Upload(False))
    uploads = [runs.add(name) for name in names]
    runs.answers = ["it does not answer"] * 3
    line = pipe.line(grace_seconds=30)
    for name in names:
        runs.say(FOLLOW, name)
    notes = []
    for upload in uploads:
        upload.note_outage = notes.append
    runs.close(line)
    assert runs.follow(line) == 0
    assert runs.requests == [1, 1, 1, 1]  # one failed attempt; the store answered after three questions
    assert notes == ["it does not answer"] * 60 and all(upload.abandoned for upload in uploads)


def test_outage_longer_than_the_grace_is_noted_in_each_run(runs, pipe):
    runs.add("sweep", Upload(*[False] * 1000))
    left, done = runs.add("left"), runs.add("done")
    done.note_outage = lambda error: None
    done.ack = Ack(ended=True)
    runs.answers = ["away"] * 1000
    line = pipe.line(grace_seconds=0.3)
    for name in ("left", "done"):
        runs.say(FOLLOW, name)
    runs.close(line)
    began = time.monotonic()
    assert runs.follow(line) == 3
    assert time.monotonic() - began > 0.3
    assert left.ack.error == "away" and left.attempts == 0 and runs.uploads[runs.root / "sweep"].attempts == 1
    assert _is_free(FileLock(runs.root / "left" / LOCK))


def test_event_that_waits_for_the_store_delays_no_end(runs, pipe):
    runs.add("sweep")
    upload = runs.add("a", Upload(*[False] * 1000))
    upload.waits = True
    line = pipe.line(grace_seconds=0.2)
    runs.say(FOLLOW, "a")
    runs.close(line)
    assert runs.follow(line) == 3 and upload.abandoned > 0


def test_run_that_another_process_sends_is_waited_for(runs, pipe):
    runs.add("sweep")
    upload, good = runs.add("a"), runs.add("good")
    line = pipe.line(grace_seconds=0.0)
    for name in ("a", "good"):
        runs.say(FOLLOW, name)
    with FileLock(runs.root / "a" / LOCK):
        runs.start(line)
        pipe.close()
        wait_for(lambda: good.abandoned)
        assert upload.attempts == 0
    assert runs.join() == 0 and upload.abandoned == 1 and runs.are_running["a"] is False


def test_run_that_another_process_keeps_is_left_to_it(runs, pipe, monkeypatch, caplog):
    monkeypatch.setattr(sync, "PREDECESSOR_SECONDS", 0.2)
    upload, line = runs.add("sweep"), pipe.line(grace_seconds=0.0)
    pipe.close()
    with FileLock(runs.root / "sweep" / LOCK):
        assert runs.follow(line) == 3
    assert upload.attempts == 0 and "another process is sending this run: nothing was sent from here" in caplog.text


def test_unreadable_journal_fails_its_attempt(tmp_path):
    (tmp_path / "journal").mkdir()
    (tmp_path / FILE).write_bytes(encode_frame(EVENT, b"no json", num_points=0))
    upload = Upload(False)
    run = FollowedRun(tmp_path, lambda *_: upload)
    assert run.turn() is Turn.FAILED and run.failure is None and upload.attempts == 1
    run.release()


def test_failing_runs_end_after_the_grace_time(runs, pipe):
    uploads = [runs.add(name) for name in ("sweep", *"abcdefgh")]
    line = pipe.line(grace_seconds=0.3)
    for upload in uploads:  # together they take longer than a pause
        upload.attempt = lambda **_: time.sleep(0.02) or False
    for folder in list(runs.uploads)[1:]:
        runs.say(FOLLOW, folder.name)
        runs.say(GONE, folder.name)
    pipe.close()
    began = time.monotonic()
    assert runs.follow(line, has_owner=lambda: time.monotonic() - began < 60) == 3
    assert time.monotonic() - began < 60


def test_end_gives_each_paused_run_a_turn_at_once(runs, pipe, monkeypatch):
    monkeypatch.setattr(sync, "FIRST_PAUSE_SECONDS", 1000.0)
    monkeypatch.setattr(sync, "LONGEST_PAUSE_SECONDS", 1000.0)
    uploads = [runs.add(name, Upload(False)) for name in ("sweep", "a", "b")]
    line = pipe.line(grace_seconds=1000.0)
    for name in ("a", "b"):
        runs.say(FOLLOW, name)
    wait_for(lambda: line._runs.qsize() == 2)
    runs.start(line)
    wait_for(lambda: len(runs.turns) == 3)
    runs.say(GONE, "a")
    wait_for(lambda: uploads[1].abandoned)
    assert runs.turns == ["sweep", "a", "b", "a"]
    pipe.close()
    assert runs.join() == 0 and [upload.abandoned for upload in uploads] == [1, 1, 1]


def _is_free(lock):
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        return False
    lock.release()
    return True
