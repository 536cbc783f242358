import errno
import os
from contextlib import nullcontext

import pytest
from refused import problems_of

from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import Job, Ledger, Sweep


def begun(folder, *jobs):
    sweep = Sweep(folder, "uid", 5, ("device=cpu,mps", "seed=1,2"), ({"metric": "val/loss", "direction": "minimize"},))
    with Ledger(folder) as book:
        book.begin(sweep)
        for job in jobs:
            book.plan(job)
            book.note(job)
    return sweep


def job(number, **fields):
    return Job(number, (f"seed={number}",), f"seed={number}", folder_name=str(number), **fields)


def test_ledger_reads_noted_states(tmp_path):
    jobs = [job(0, state="finished", device="cpu"), job(1, state="failed", error="ValueError: no", trial={"a": 1.5})]
    sweep = begun(tmp_path / "s", *jobs)
    found = ledger.read(tmp_path / "s")
    assert list(found.jobs.values()) == jobs
    assert (found.uid, found.began_ms, found.overrides) == (sweep.uid, sweep.began_ms, sweep.overrides)
    assert found.objectives == sweep.objectives
    assert found.folder_of(found.jobs[1]) == tmp_path / "s" / "1"


def test_ledger_retry_has_another_directory(tmp_path):
    begun(tmp_path, job(0, state="running"))
    with Ledger(tmp_path) as book:
        again = job(0, state="failed")
        book.note(again)
        again.folder_name, again.state = "0-1", "planned"
        book.plan(again)
    assert ledger.read(tmp_path).jobs[0] == again


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_ledger_cuts_incomplete_last_line(tmp_path, cut):
    begun(tmp_path, job(0, state="finished"), job(1, state="running"))
    path = tmp_path / ledger.FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert ledger.read(tmp_path).jobs[1].state == "planned"
    with Ledger(tmp_path) as book:
        book.note(job(1, state="finished"))
    assert ledger.read(tmp_path).jobs[1].state == "finished"
    assert path.read_bytes().count(b"\n") == whole.count(b"\n")


@pytest.mark.parametrize("is_full", [False, True])
def test_ledger_on_full_disk_stays_readable(tmp_path, monkeypatch, is_full):
    write, taken = os.write, []

    def a_part(fd, line):
        taken.append(line)
        if is_full and len(taken) == 2:
            raise OSError(errno.ENOSPC, "no room")
        return write(fd, line[:7])

    begun(tmp_path, job(0))
    with Ledger(tmp_path) as book:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", a_part)
            with pytest.raises(OSError, match="no room") if is_full else nullcontext():
                book.note(job(0, state="running"))
        assert len(taken) > 1
        assert ledger.read(tmp_path).jobs[0].state == ("planned" if is_full else "running")
        book.note(job(0, state="finished"))
    assert ledger.read(tmp_path).jobs[0].state == "finished"


def test_ledger_is_locked_by_one_process(tmp_path, messages):
    with Ledger(tmp_path):
        assert ledger.is_running(tmp_path)
        messages(problems_of(Ledger, tmp_path))
    assert not ledger.is_running(tmp_path)


def test_find_last_takes_most_recently_active(tmp_path):
    assert ledger.find_last(tmp_path) is None
    for index, name in enumerate(("b/2", "a/1", "c/3")):
        begun(tmp_path / name)
        os.utime(tmp_path / name / ledger.FILE, (index, index))
    assert ledger.find_last(tmp_path) == tmp_path / "c/3"
    begun(tmp_path / "tries/1")  # a sweep of `try` is not resumed by `last`
    assert ledger.find_last(tmp_path) == tmp_path / "c/3"
    begun(tmp_path / "a/1", job(0))
    assert ledger.find_last(tmp_path) == tmp_path / "a/1"


def test_read_without_sweep_suggests_others(tmp_path, messages):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ledger.FILE).touch()
    for name in ("one", "onw"):
        messages(problems_of(ledger.read, tmp_path / name))
