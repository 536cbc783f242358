import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from runner.tracking import publish_loop, publish_run
from runner.tracking.ack import Ack
from runner.tracking.journal import Journal
from runner.tracking.pipe import FOLLOW, GONE, bye, word
from runner.tracking.publish_loop import UploadRounds, follow
from runner.tracking.publish_run import PublishedRun
from runner.tracking.sync import LOCK


class Upload:
    """An uploader without a store: a number of things to send, and the result of each attempt."""

    def __init__(self, *goes, things=0):
        self.goes, self.things = list(goes), things
        self.attempts, self.postponed, self.abandoned, self.samples = 0, [], 0, 0
        self.when, self.ack, self.waits, self.abandons, self.has_left = [], Ack(), False, True, False

    def attempt(self, *, postponed, most):
        self.attempts += 1
        self.postponed.append(postponed)
        self.when.append(time.monotonic())
        went = self.goes.pop(0) if self.goes else True
        if went == "breaks":
            raise KeyError("uid")
        if went is True:
            self.ack = Ack(offset=self.ack.offset + 1, run_id="r")
            self.things = max(0, self.things - most)
        return went is True

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
        self.root, self.pipe, self.uploads, self.lives = root, pipe, {}, {}
        self.turns, self.codes, self.answers, self.asked = [], [], [], 0

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
        def upload(folder, lives):
            self.lives[folder.name] = lives
            return self.uploads[folder]

        return PublishedRun(folder, upload)

    def ask(self):
        self.asked += 1
        return self.answers.pop(0) if self.answers else None

    def rounds(self, first="sweep", **how):
        return UploadRounds(self.root / first, run_of=self.run_of, ask=self.ask, **how)

    def follow(self, line, first="sweep", **how):
        return follow(self.rounds(first), line, **how)

    def start(self, line, first="sweep"):
        self.thread = threading.Thread(target=lambda: self.codes.append(self.follow(line, first)))
        self.thread.start()

    def say(self, kind, name):
        self.pipe.say(word(kind, self.root / name))

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.codes[0]


@pytest.fixture
def runs(tmp_path, pipe):
    return Runs(tmp_path, pipe)


def wait_for(condition):
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


# One run ------------------------------------------------------------------------------------------------------------


def test_it_looks_when_it_is_told_and_ends_with_the_training(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_loop, "LOOK_SECONDS", 60.0)
    upload, line = runs.add("sweep"), pipe.line()
    runs.start(line)
    for attempts in (1, 2, 3):
        wait_for(lambda attempts=attempts: upload.attempts == attempts)
        pipe.say(b"\n")
    wait_for(lambda: upload.attempts == 4)
    pipe.close()
    assert runs.join() == 0 and upload.abandoned == 1 and upload.samples >= 4 and runs.asked == 0
    assert upload.postponed == [False, False, False, False, True] and runs.lives == {"sweep": True}


def test_it_looks_by_itself_too(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_loop, "LOOK_SECONDS", 0.01)
    upload = runs.add("sweep")
    runs.start(pipe.line())
    wait_for(lambda: upload.attempts >= 5)
    pipe.close()
    assert runs.join() == 0


def test_a_goodbye_is_an_end_even_while_a_copy_of_the_pipe_stays_open(runs, pipe):
    runs.add("sweep")
    line = pipe.line(grace_seconds=10)
    pipe.say(b"\n\n" + bye(2.5))
    assert runs.follow(line) == 0
    assert line.grace_seconds == 2.5 and line.closed_at is not None


def test_a_store_that_does_not_answer_is_given_up_after_the_grace(runs, pipe):
    upload, line = runs.add("sweep", Upload(*[False] * 1000)), pipe.line(grace_seconds=0.3)
    pipe.close()
    began = time.monotonic()
    assert runs.follow(line) == 3
    assert 0.3 < time.monotonic() - began < 5 and upload.attempts > 2 and upload.abandoned == 0 and runs.asked == 0


def test_without_any_grace_there_is_one_last_attempt(runs, pipe):
    upload, line = runs.add("sweep", Upload(*[False] * 1000)), pipe.line(grace_seconds=0.0)
    runs.start(line)
    wait_for(lambda: upload.attempts)
    pipe.close()
    assert runs.join() == 3 and upload.postponed[-1] is True


def test_progress_renews_the_grace(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_loop, "LOOK_SECONDS", 0.01)
    line = pipe.line(grace_seconds=0.5)
    pipe.close()
    upload = runs.add("sweep", Upload(*[False, False, True] * 5))
    upload.abandon = lambda: not upload.goes  # marking the end also fails until the last attempt
    began = time.monotonic()
    assert runs.follow(line) == 0
    assert time.monotonic() - began > 0.5 and upload.attempts == 15


def test_an_end_that_never_gets_through_is_given_up(runs, pipe):
    upload, line = runs.add("sweep"), pipe.line(grace_seconds=0.2)
    upload.attempt = lambda **how: True  # everything is sent, and there is no progress
    upload.abandons = False
    pipe.close()
    assert runs.follow(line) == 3 and upload.abandoned > 1


def test_a_training_that_never_began_leaves_nothing(runs, pipe):
    upload, line = runs.add("sweep", has_run=False), pipe.line()
    pipe.close()
    assert runs.follow(line) == 0 and upload.attempts == 0
    assert not (runs.root / "sweep" / LOCK).exists()


def test_wakes_do_not_hurry_a_store_that_does_not_answer(runs, pipe):
    upload, line = runs.add("sweep", Upload(*[False] * 1000)), pipe.line()
    runs.start(line)
    for _ in range(200):
        pipe.say(b"\n")
        time.sleep(0.001)
    attempts = upload.attempts
    pipe.close()
    runs.join()
    assert attempts <= 4  # at 0, 0.2, 0.6, 1.4 s


# Many runs ----------------------------------------------------------------------------------------------------------


def test_finished_runs_go_first_and_completely(runs):
    for name, things in (("sweep", 3), ("a", 3), ("b", 3), ("done", 3), ("files", 3)):
        runs.add(name, Upload(things=things))
    runs.uploads[runs.root / "files"].has_records = lambda: False
    rounds = runs.rounds()
    for name in ("a", "b", "done", "files"):
        rounds.hear(FOLLOW, runs.root / name)
    for name in ("done", "files"):
        rounds.hear(GONE, runs.root / name)
    rounds.begin()
    while rounds.has_turns:
        rounds.turn()
    order = [*["done"] * 3, "files", *["sweep", "a", "b"] * 3, *["files"] * 2]
    assert runs.turns == order
    rounds.give_up()


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
    pipe.close()
    wait_for(lambda: line._words.qsize() == 6 and line.closed_at)
    assert follow(runs.rounds(num_at_once=4), line) == 0
    assert max(most) == 4 and all(upload.abandoned == 1 for upload in runs.uploads.values())
    assert most[:1] == [1]  # the sweep's run is created before those of its jobs


def test_owner_that_is_gone_ends_a_slow_upload(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_loop, "ORPHAN_SECONDS", 0.3)
    upload, line = runs.add("sweep", Upload(things=10**6)), pipe.line(grace_seconds=1000)
    pipe.close()
    began = time.monotonic()
    assert runs.follow(line, has_owner=lambda: time.monotonic() < began + 0.2) == 3
    assert upload.things and 0.5 < time.monotonic() - began < 5 and _is_free(FileLock(runs.root / "sweep" / LOCK))


def test_a_run_that_is_followed_before_its_journal_exists_is_found(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_loop, "LOOK_SECONDS", 0.01)
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


def test_a_run_that_is_gone_is_sent_ended_and_let_go(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_loop, "LOOK_SECONDS", 0.01)
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
    pipe.close()
    assert runs.join() == 0 and upload.abandoned == 2


def test_a_run_that_goes_on_at_once_is_not_called_dead(runs, pipe):
    runs.add("sweep")
    upload, line = runs.add("a"), pipe.line()
    for kind in (FOLLOW, GONE, FOLLOW):
        runs.say(kind, "a")
    followers = runs.rounds()
    wait_for(lambda: not line._words.empty() and line._words.qsize() == 3)
    for kind, folder in line.words():
        followers.hear(kind, folder)
    followers.begin()
    followers.turn()
    followers.turn()
    assert upload.attempts == 1 and upload.abandoned == 0
    followers.give_up()


def test_a_run_that_another_process_goes_on_with_is_not_called_dead(runs, monkeypatch):
    monkeypatch.setattr(publish_run, "LINGERING_SECONDS", 0.0)
    upload = runs.add("a")
    run = runs.run_of(runs.root / "a")
    run.end()
    with Journal(runs.root / "a"):
        assert run.turn() is publish_run.Went.OVER and upload.abandoned == 0 and upload.has_left
    run.let_go()


def test_a_killed_run_whose_journal_is_let_go_late_is_called_dead_all_the_same(runs):
    upload = runs.add("a")
    run = runs.run_of(runs.root / "a")
    run.end()
    with Journal(runs.root / "a"):  # a process that the run has forked
        assert run.turn() is publish_run.Went.QUIET and upload.abandoned == 0
    assert run.turn() is publish_run.Went.OVER and upload.abandoned == 1
    run.let_go()


@pytest.mark.parametrize("how", [False, "breaks"])
def test_a_run_that_fails_by_itself_stops_no_other(runs, pipe, how):
    runs.add("sweep")
    bad, good = runs.add("bad", Upload(*[how] * 1000)), runs.add("good", Upload(things=50))
    line = pipe.line(grace_seconds=0.3)
    for name in ("bad", "good"):
        runs.say(FOLLOW, name)
    pipe.close()
    assert runs.follow(line) == (3 if how is False else 1)
    assert good.things == 0 and good.abandoned == 1 and bad.abandoned == 0
    assert runs.asked and 2 < bad.attempts < 10  # its intervals grow


def test_when_the_store_is_down_it_is_asked_and_no_run_is_tried(runs, pipe):
    names = [f"run{number}" for number in range(20)]
    runs.add("sweep", Upload(False))
    uploads = [runs.add(name) for name in names]
    runs.answers = ["it does not answer"] * 3
    line = pipe.line(grace_seconds=30)
    for name in names:
        runs.say(FOLLOW, name)
    wait_for(lambda: line._words.qsize() == 20)
    followers = runs.rounds()
    for kind, folder in line.words():
        followers.hear(kind, folder)
    attempts = []
    ask = followers._ask

    def asks():
        attempts.append(sum(upload.attempts for upload in runs.uploads.values()))
        return ask()

    followers._ask = asks
    notes = []
    for upload in uploads:
        upload.note_outage = notes.append
    pipe.close()
    wait_for(lambda: line.closed_at)
    assert follow(followers, line) == 0
    assert attempts == [1, 1, 1, 1]  # one failed attempt; the store answered after three questions
    assert notes == ["it does not answer"] * 60 and all(upload.abandoned for upload in uploads)


def test_an_outage_that_outlasts_the_grace_is_given_up_and_each_run_knows_why(runs, pipe):
    runs.add("sweep", Upload(*[False] * 1000))
    left, done = runs.add("left"), runs.add("done")
    done.note_outage = lambda error: None
    done.ack = Ack(ended=True)
    runs.answers = ["away"] * 1000
    line = pipe.line(grace_seconds=0.3)
    for name in ("left", "done"):
        runs.say(FOLLOW, name)
    pipe.close()
    wait_for(lambda: line.closed_at)
    began = time.monotonic()
    assert runs.follow(line) == 3
    assert 0.3 < time.monotonic() - began < 5
    assert left.ack.error == "away" and left.attempts == 0 and runs.uploads[runs.root / "sweep"].attempts == 1
    assert _is_free(FileLock(runs.root / "left" / LOCK))


def test_what_waits_for_the_store_holds_back_no_end(runs, pipe):
    runs.add("sweep")
    upload = runs.add("a", Upload(*[False] * 1000))
    upload.waits = True
    line = pipe.line(grace_seconds=0.2)
    runs.say(FOLLOW, "a")
    pipe.close()
    assert runs.follow(line) == 3 and upload.abandoned > 0


def test_a_run_that_another_process_sends_is_waited_for_and_stops_no_other(runs, pipe, monkeypatch):
    monkeypatch.setattr(publish_run, "LOCKED_SECONDS", 0.01)
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
    assert runs.join() == 0 and upload.abandoned == 1 and runs.lives["a"] is False


def test_a_run_that_another_process_keeps_is_left_to_it(runs, pipe, monkeypatch, caplog):
    monkeypatch.setattr(publish_run, "PREDECESSOR_SECONDS", 0.2)
    upload, line = runs.add("sweep"), pipe.line(grace_seconds=0.0)
    pipe.close()
    with FileLock(runs.root / "sweep" / LOCK):
        assert runs.follow(line) == 3
    assert upload.attempts == 0 and "another process is sending this run: nothing was sent from here" in caplog.text


def test_a_journal_that_can_not_be_read_is_told_of_by_the_attempt(tmp_path):
    from runner.tracking.journal_frames import encode
    from runner.tracking.journal_records import EVENT, FILE

    (tmp_path / "journal").mkdir()
    (tmp_path / FILE).write_bytes(encode(EVENT, b"no json", num_points=0))
    upload = Upload(False)
    run = PublishedRun(tmp_path, lambda folder, lives: upload)
    assert run.turn() is publish_run.Went.FAILED and not run.is_broken and upload.attempts == 1
    run.let_go()


def test_an_end_brings_a_turn_to_each_run_that_pauses_at_once(runs):
    for name in ("sweep", "a", "b"):
        runs.add(name, Upload(False))
    followers = runs.rounds()
    for name in ("a", "b"):
        followers.hear(FOLLOW, runs.root / name)
    followers.begin()
    while followers.has_turns:
        followers.turn()
    paused = list(followers.runs.values())
    assert all(run.is_pausing for run in paused)
    followers.hear(GONE, runs.root / "a")
    assert [run.is_pausing for run in paused] == [True, False, True]
    followers.end_all()
    while followers.has_turns:
        followers.turn()
    assert runs.turns == ["sweep", "a", "b"] * 2 and not followers.runs


def test_a_word_for_a_run_that_nobody_follows_is_nothing(runs, pipe):
    runs.add("sweep")
    line = pipe.line()
    pipe.say(word(GONE, Path("/no/such/run")))
    pipe.close()
    assert runs.follow(line) == 0


def _is_free(lock):
    try:
        lock.acquire(timeout=0)
    except TimeoutError:
        return False
    lock.release()
    return True
