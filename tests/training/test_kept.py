"""Checkpoints that stay: which, what kill at which place leaves what, and what is said of them."""

import threading

import pytest
import torch

from runner.training import checkpoint
from runner.training.background import Background
from runner.training.checkpoint import KEPT, CheckpointWriter, Keeping, before, load, read_kept

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
        ("last:9", "min", [3, 6, 9, 12, 15, 18]),
        ("best:2", "min", [6, 12]),
        ("best:3", "min", [6, 12, 18]),
        ("best:2", "max", [3, 9]),
        ("best:6", "min", [3, 6, 9, 12, 15, 18]),
    ],
)
def test_which_stay(tmp_path, words, mode, steps):
    keep_all(tmp_path, words, mode=mode)
    assert steps_of(tmp_path) == steps
    assert load(tmp_path / "last.pt")["step"] == 18 and load(before(tmp_path / "last.pt"))["step"] == 15
    assert not list(tmp_path.glob("*ing")) and not list(tmp_path.glob(".*"))


def test_the_disk_keeps_each_once(tmp_path):
    keep_all(tmp_path, "every_epoch")
    assert (tmp_path / "last.pt").samefile(tmp_path / "step-18.pt")
    assert before(tmp_path / "last.pt").samefile(tmp_path / "step-15.pt")


def test_a_disk_without_links_keeps_copies(tmp_path, monkeypatch):
    def refuse(*paths):
        raise OSError("no links here")

    monkeypatch.setattr(checkpoint.os, "link", refuse)
    keep_all(tmp_path, "last:2")
    assert steps_of(tmp_path) == [15, 18] and load(tmp_path / "last.pt")["step"] == 18


def test_none_is_skipped_though_the_disk_is_slow(tmp_path):
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
def test_what_a_kill_leaves_out_is_taken_again(tmp_path, monkeypatch, place):
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


def test_a_list_that_is_torn_is_none(tmp_path):
    for text in ("", "{", "[1]", '[{"step": "x"}]', '[{"file": "../../x", "step": 3}]'):
        (tmp_path / KEPT).write_text(text)
        assert [entry["file"] for entry in read_kept(tmp_path)] == (["step-3.pt"] if "../" in text else [])
