import errno
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from refused import problems_of

from runner.errors import DeletedError, RunnerError
from runner.tracking import journal as module
from runner.tracking.journal import Journal, is_being_written, scan
from runner.tracking.journal_reader import read_events, read_points

WRITER = """
import sys, time
from pathlib import Path
from runner.tracking.journal import Journal
journal = Journal(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    journal.points(("loss",), [step], [step], [[float(step)]])
    print(step, flush=True)
"""


def test_journal_import_loads_no_torch_or_mlflow():
    code = (
        "import sys, runner.tracking.journal, runner.tracking.publisher; print({'torch', 'mlflow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_record_takes_one_write_and_sync(folder, monkeypatch):
    calls = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append("write") or write(fd, data))
    monkeypatch.setattr(module, "_sync", lambda fd: calls.append("sync"))
    with Journal(folder) as journal:
        journal.event("start")
        journal.points(("a",), range(1000), range(1000), np.ones((1000, 1)))
    assert calls == ["write", "sync"] * 2


def test_torn_tail_is_cut_and_kept(folder):
    with Journal(folder) as journal:
        journal.event("a")
        path, size = journal.path, journal.path.stat().st_size
    with path.open("ab") as file:
        file.write(b"RJ1\nhalf a record")
    with Journal(folder) as journal:
        assert path.stat().st_size == size
        journal.event("b")
    assert [event["kind"] for event in read_events(folder)] == ["a", "b"]
    assert (path.parent / f"torn-{size}.bin").read_bytes() == b"RJ1\nhalf a record"


def test_second_writer_is_refused(folder, messages):
    with Journal(folder):
        assert is_being_written(folder)
        messages(problems_of(Journal, folder, wait_seconds=0))
    assert not is_being_written(folder)
    Journal(folder, wait_seconds=0).close()


def test_foreign_file_is_unchanged(folder, messages):
    (folder / "journal").mkdir()
    (folder / "journal" / "journal.bin").write_bytes(b"somebody's data")
    messages(problems_of(Journal, folder))
    assert (folder / "journal" / "journal.bin").read_bytes() == b"somebody's data"
    assert not is_being_written(folder)


def test_full_disk_is_reported_and_loses_nothing(folder, monkeypatch):
    write = os.write
    with Journal(folder) as journal:
        journal.event("a")
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
        with pytest.raises(OSError, match="make room on the disk") as caught:
            journal.event("b")
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(journal.path)
        monkeypatch.setattr(os, "write", write)
        journal.event("c")
    assert [event["kind"] for event in read_events(folder)] == ["a", "c"]


def test_deleted_journal_is_written_again_completely(folder, monkeypatch):
    write = os.write
    with Journal(folder) as journal:
        journal.event("a", text="x" * 100)
        shutil.rmtree(folder)
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:60]))
        with pytest.raises(DeletedError):
            journal.event("b")
        monkeypatch.undo()
        journal.event("c")
    assert [event["kind"] for event in read_events(folder)] == ["a", "c"]


def test_journal_renamed_is_continued_at_its_place(folder):
    with Journal(folder) as journal:
        journal.event("a")
        folder.rename(folder.with_name("moved"))
        with pytest.raises(DeletedError, match="deleted or renamed"):
            journal.event("b")
        journal.event("c")
    assert [event["kind"] for event in read_events(folder)] == ["a", "c"]


@pytest.mark.parametrize("size", [0, 30, 70])
def test_journal_cut_raises_once_and_continues(folder, size):
    with Journal(folder) as journal:
        for kind in "abc":
            journal.event(kind)
        whole = [event["kind"] for event in read_events(folder)]
        os.truncate(journal.path, size)
        with pytest.raises(DeletedError, match=f"to {size} bytes while the run trained; the points .* are lost"):
            journal.event("d")
        journal.event("e")
    assert [event["kind"] for event in read_events(folder)] == [*whole[: size // 33], "e"]


def test_full_disk_without_truncation_loses_nothing(folder, monkeypatch):
    write = os.write

    def refuse(fd, size):
        raise OSError(errno.EIO, "no")

    with Journal(folder) as journal:
        journal.event("a")
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:-1]))
        monkeypatch.setattr(os, "ftruncate", refuse)
        with pytest.raises(OSError, match="make room"):
            journal.event("long", text="x" * 100)
        monkeypatch.undo()
        journal.event("c")
    assert [event["kind"] for event in read_events(folder)] == ["a", "c"]
    Journal(folder).close()
    assert [event["kind"] for event in read_events(folder)] == ["a", "c"]


def test_failed_sync_is_reported_and_keeps_record(folder, monkeypatch):
    def refuse(fd):
        raise OSError(errno.EIO, "Input/output error")

    with Journal(folder) as journal:
        monkeypatch.setattr(module, "_sync", refuse)
        with pytest.raises(OSError, match="Input/output error"):
            journal.event("a")
        monkeypatch.undo()
        journal.event("b")
    assert [event["kind"] for event in read_events(folder)] == ["a", "b"]


def test_threads_share_a_journal(folder):
    with Journal(folder) as journal:

        def write(thread):
            for step in range(50):
                journal.points((f"t{thread}",), [step], [step], [[step]])

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert read_points(folder) == {f"t{n}": [(step, float(step)) for step in range(50)] for n in range(4)}


def test_journal_closes_its_files(folder, open_fds):
    Journal(folder).close()
    before = open_fds()
    for _ in range(5):
        with Journal(folder) as journal:
            journal.event("a")
            with pytest.raises(RunnerError):
                Journal(folder, wait_seconds=0)
    assert open_fds() == before


@pytest.mark.slow
def test_killed_writer_leaves_points_and_no_lock(folder):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    told = [int(process.stdout.readline()) for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.stdout]
    process.stdout.close()
    process.wait()
    with Journal(folder, wait_seconds=0) as journal:
        steps = [step for step, _ in read_points(folder)["loss"]]
        assert steps == list(range(1, len(steps) + 1)) and told[-1] <= len(steps) <= told[-1] + 1
        journal.event("resumed")
    assert [record.kind for record in scan(journal.path)][-1] == "resumed"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_read_only_directory_has_no_writer(number, tmp_path, monkeypatch):
    """By the error, as root may write everywhere."""
    Journal(tmp_path).close()

    def refuse(lock, **_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    assert not is_being_written(tmp_path)
