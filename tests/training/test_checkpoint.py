"""A checkpoint is read as it was written, or it is refused and the previous one is used."""

import errno
import fcntl
import os
import pickle
import random
import shutil
import stat
import sys
import threading
from pathlib import Path

import pytest
import torch

from runner.errors import DeletedError, RunnerError
from runner.training import checkpoint
from runner.training.background import Background
from runner.training.checkpoint import KEPT, CheckpointWriter, Keeping, TornError, before, load, read_kept, save


def state(step=7):
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "model": {"weight": torch.randn(20, 30, generator=generator)},
        "generators": {"python": (1, 2)},
    }


def is_same(one, other):
    return one["step"] == other["step"] and torch.equal(one["model"]["weight"], other["model"]["weight"])


@pytest.fixture
def path(tmp_path):
    save(state(), tmp_path / "last.pt")
    return tmp_path / "last.pt"


@pytest.mark.parametrize("damage", ["altered", "torn"])
def test_damaged_at_any_place_it_is_refused(path, damage):
    """At 200 places: no wrong load, and no other error."""
    assert is_same(load(path), state()) and is_same(torch.load(path, weights_only=True), state())
    whole, draw = path.read_bytes(), random.Random(0)
    for place in {0, 1, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(200))}:
        rest = bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :] if damage == "altered" else b""
        path.write_bytes(whole[:place] + rest)
        with pytest.raises(TornError, match="checksum"):
            load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(TornError):
        load(path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("made",)


def test_code_in_it_never_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save({"step": Evil()}, tmp_path / "last.pt")
    with pytest.raises(TornError, match="tensors and plain values"):
        load(tmp_path / "last.pt")
    (tmp_path / "last.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(TornError):
        load(tmp_path / "last.pt")
    assert not (tmp_path / "made").exists()


def test_checkpoint_of_other_content_is_refused(tmp_path):
    save([1, 2], tmp_path / "last.pt")
    with pytest.raises(TornError, match="a list and no state"):
        load(tmp_path / "last.pt")
    with pytest.raises(RunnerError, match="no such file"):
        load(tmp_path / "nothing.pt")


@pytest.mark.parametrize("damage", ["torn", "unreadable"])
def test_damaged_checkpoint_is_replaced_by_the_previous(tmp_path, monkeypatch, damage):
    for step in (1, 2, 3):
        save(state(step), tmp_path / "last.pt")
    assert [load(file)["step"] for file in (tmp_path / "last.pt", before(tmp_path / "last.pt"))] == [3, 2]
    assert {file.name for file in tmp_path.iterdir()} == {"last.pt", "last-before.pt"}
    read = Path.read_bytes

    def fail(path):
        if path.name == "last.pt":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    if damage == "torn":
        (tmp_path / "last.pt").write_bytes(b"torn")
    else:
        monkeypatch.setattr(Path, "read_bytes", fail)
    background = Background()
    keeper = CheckpointWriter(tmp_path, background)
    assert keeper.last()["step"] == 2
    assert keeper.notes == ["last.pt is damaged; the checkpoint before it is used, of step 2"]
    before(tmp_path / "last.pt").write_bytes(b"torn")
    with pytest.raises((TornError, OSError)):
        keeper.last()
    background.close()


def test_checkpoint_waits_for_what_it_needs(tmp_path):
    seen = []
    background = Background(lambda: seen.append((tmp_path / "last.pt").exists()))
    CheckpointWriter(tmp_path, background).keep("last", {"step": 1})
    background.close()
    assert not seen[0] and seen[-1]


def test_full_disk_keeps_old_checkpoint(tmp_path, monkeypatch):
    save(state(1), tmp_path / "last.pt")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(state(2), tmp_path / "last.pt")
    monkeypatch.undo()
    assert load(tmp_path / "last.pt")["step"] == 1


def test_checkpoint_and_name_survive_power_cut(tmp_path, monkeypatch):
    """The content is on the disk before the file gets its name, and the directory with the name after that."""
    save(state(1), tmp_path / "last.pt")
    synced, sync = [], os.fsync

    def watched(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((kind, load(tmp_path / "last.pt")["step"]))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    save(state(2), tmp_path / "last.pt")
    assert synced == [("file", 1), ("folder", 2)]


def test_snapshot_stays_while_training_continues(tmp_path):
    background, live = Background(), state(1)
    keeper = CheckpointWriter(tmp_path, background)
    keeper.keep("best", live)
    live["model"]["weight"].add_(1)
    background.close()
    assert is_same(keeper.newest("best"), state(1)) and is_same(load(tmp_path / "best.pt"), state(1))


def test_snapshot_being_written_is_not_overwritten(tmp_path, monkeypatch):
    background, began, gate = Background(), threading.Event(), threading.Event()
    keeper = CheckpointWriter(tmp_path, background)

    def slow(kept, path):
        began.set()
        assert gate.wait(30)
        save(kept, path)

    monkeypatch.setattr("runner.training.checkpoint.save", slow)
    keeper.keep("last", state(1))
    assert began.wait(30)
    keeper.keep("last", state(2))
    gate.set()
    background.close()
    assert is_same(load(tmp_path / "last.pt"), state(2)) and is_same(load(before(tmp_path / "last.pt")), state(1))


def test_failing_check_keeps_previous_checkpoint(tmp_path):
    background, gate = Background(), threading.Event()

    def check(kept):
        if kept["step"] == 2:
            raise ValueError("spoilt")

    keeper = CheckpointWriter(tmp_path, background, check=check)
    background.do(gate.wait)
    keeper.keep("last", state(1))
    keeper.keep("last", state(2))
    gate.set()
    with pytest.raises(ValueError, match="spoilt"):
        background.close()
    assert is_same(load(tmp_path / "last.pt"), state(1)) and is_same(keeper.newest("last"), state(1))


def test_newer_checkpoint_waits_for_older(tmp_path):
    """Its rows may still wait for the journal: after a kill between the two, they would be lost."""
    background, gate, seen = Background(), threading.Event(), []
    keeper = CheckpointWriter(tmp_path, background)
    background.do(gate.wait)
    keeper.keep("last", state(1))
    background.do(lambda: seen.append((tmp_path / "last.pt").exists()))
    keeper.keep("last", state(2))
    gate.set()
    background.close()
    assert seen == [False]
    assert is_same(load(tmp_path / "last.pt"), state(2)) and not before(tmp_path / "last.pt").exists()


def test_written_snapshots_memory_is_reused(tmp_path):
    background, gate = Background(), threading.Event()
    keeper = CheckpointWriter(tmp_path, background)
    addresses = []

    def keep(step):
        keeper.keep("last", state(step))
        addresses.append(keeper.newest("last")["model"]["weight"].data_ptr())
        assert is_same(keeper.newest("last"), state(step))

    keep(1)
    background.wait()
    keep(2)
    background.wait()
    background.do(gate.wait)
    keep(3)
    keep(4)  # overtakes the previous one
    gate.set()
    background.close()
    assert len(set(addresses)) == 1
    assert is_same(load(tmp_path / "last.pt"), state(4)) and is_same(load(before(tmp_path / "last.pt")), state(2))


def test_error_of_disk_replaces_that_of_torch(tmp_path, monkeypatch):
    def fail(state, file):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos")  # noqa: B904

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save({"step": 1}, tmp_path / "last.pt")
    assert not list(tmp_path.iterdir())


def test_folder_deleted_during_write_is_reported(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    save({"step": 1}, folder / "last.pt")
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), shutil.rmtree(folder)))
    with pytest.raises(DeletedError, match="deleted or renamed while it trained"):
        save({"step": 2}, folder / "last.pt")


def test_checkpoint_flushes_drive_cache_on_mac(tmp_path, monkeypatch):
    """macOS's fsync() does not flush the drive's cache; F_FULLFSYNC does. A network drive may not support it."""
    asked = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, what: asked.append(what))
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    save({"a": torch.ones(1)}, tmp_path / "a.pt")
    assert asked == [51, 51]  # the file and its directory

    def unknown(descriptor, what):
        raise OSError("not supported")

    monkeypatch.setattr(fcntl, "fcntl", unknown)
    save({"a": torch.ones(1)}, tmp_path / "a.pt")
    assert asked == [51, 51, "fsync", "fsync"]


VALUES = {3: 0.5, 6: 0.2, 9: 0.9, 12: 0.2, 15: float("nan"), 18: 0.4}


def keep_all(folder, words, *, values=VALUES, mode="min"):
    background = Background()
    keeping = Keeping.of(words, metric="val/loss", mode=mode)
    keeper = CheckpointWriter(folder, background, keeping=keeping)
    for epoch, (step, value) in enumerate(values.items(), start=1):
        entry = {"step": step, "epoch": epoch, "metrics": {"val/loss": value}}
        keeper.keep("last", {"step": step, "model": {"w": torch.full((3,), float(step))}}, entry=entry)
    background.close()
    return keeper


def steps_of(folder):
    files = sorted(int(path.stem.split("-")[1]) for path in folder.glob("step-*.pt"))
    assert [entry["step"] for entry in read_kept(folder)] == files
    for step in files:
        assert load(folder / f"step-{step}.pt")["model"]["w"].tolist() == [step] * 3
    return files


@pytest.mark.parametrize(
    ("words", "mode", "steps"),
    [
        ("every_epoch", "min", [3, 6, 9, 12, 15, 18]),
        ("last:2", "min", [15, 18]),
        ("best:2", "min", [6, 12]),
        ("best:3", "min", [6, 12, 18]),
        ("best:2", "max", [3, 9]),
        ("best:6", "min", [3, 6, 9, 12, 15, 18]),
    ],
)
def test_which_stay(tmp_path, words, mode, steps):
    keep_all(tmp_path, words, mode=mode)
    assert steps_of(tmp_path) == steps
    last = tmp_path / "last.pt"
    assert load(last)["step"] == 18 and load(before(last))["step"] == 15
    for step, file in ((18, last), (15, before(last))):  # the disk keeps each one once
        assert step not in steps or file.samefile(tmp_path / f"step-{step}.pt")
    assert not list(tmp_path.glob("*ing")) and not list(tmp_path.glob(".*"))


def test_disk_without_links_keeps_copies(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError("no links here")

    monkeypatch.setattr(checkpoint.os, "link", refuse)
    keep_all(tmp_path, "last:2")
    last = tmp_path / "last.pt"
    assert steps_of(tmp_path) == [15, 18] and not last.samefile(tmp_path / "step-18.pt")
    kept = {path.name: load(path)["step"] for path in tmp_path.glob("*.pt")}
    assert kept == {"last.pt": 18, "last-before.pt": 15, "step-15.pt": 15, "step-18.pt": 18}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, KEPT}


def test_slow_disk_skips_no_checkpoint(tmp_path):
    background, gate = Background(), threading.Event()
    keeper = CheckpointWriter(tmp_path, background, keeping=Keeping.of("every_epoch", metric="", mode="min"))
    background.do(gate.wait)
    threading.Timer(0.3, gate.set).start()
    for step in (1, 2, 3):
        entry = {"step": step, "epoch": step, "metrics": {}} if step < 3 else None
        keeper.keep("last", {"step": step, "model": {"w": torch.full((3,), float(step))}}, entry=entry)
    background.close()
    assert steps_of(tmp_path) == [1, 2] and load(tmp_path / "last.pt")["step"] == 3


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", range(20))
def test_checkpoint_missed_by_kill_is_repeated(tmp_path, monkeypatch, place):
    left = [place]

    def dying(function):
        def call(*args, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(checkpoint.Path, name, dying(getattr(checkpoint.Path, name)))
        background = Background()
        keeper = CheckpointWriter(tmp_path, background, keeping=Keeping.of("last:2", metric="", mode="min"))
        with pytest.raises(Killed):
            try:
                for step in (1, 2, 3, 4):
                    entry = {"step": step, "epoch": step, "metrics": {}}
                    keeper.keep("last", {"step": step, "model": {"w": torch.full((3,), float(step))}}, entry=entry)
                    background.wait()
            finally:
                background.close()
    began = load(tmp_path / "last.pt")["step"] if (tmp_path / "last.pt").exists() else 0
    keep_all(tmp_path, "last:2", values=dict.fromkeys(range(began + 1, 6), 0.1))
    assert steps_of(tmp_path) == [4, 5]


def test_checkpoints_missing_in_the_list_are_pruned(tmp_path):
    keep_all(tmp_path, "last:3", values=dict.fromkeys((1, 2, 3), 0.1))
    (tmp_path / KEPT).unlink()
    keep_all(tmp_path, "last:2", values={4: 0.1})
    assert steps_of(tmp_path) == [3, 4]


def test_torn_checkpoint_list_is_ignored(tmp_path):
    for text in ("", "{", "[1]", '[{"step": "x"}]', '[{"file": "../../x", "step": 3}]'):
        (tmp_path / KEPT).write_text(text)
        assert [entry["file"] for entry in read_kept(tmp_path)] == (["step-3.pt"] if "../" in text else [])
