"""The owner of a run's directory: its creator, at any path, but not after a change or with another key."""

import json
import shutil
import stat
from pathlib import Path

import pytest

from runner.config import origin


@pytest.fixture
def made(own_folder, monkeypatch):
    """A directory that this user has created."""
    monkeypatch.setenv("XDG_STATE_HOME", str(own_folder / "state"))
    folder = own_folder / "run"
    folder.mkdir()
    (folder / "rerun.yaml").write_text("seed: 0\n")
    origin.sign(folder, "http://here")
    return folder


def test_moved_or_copied_run_stays_trusted(made):
    assert origin.store_of(made) == "http://here"
    shutil.copytree(made, "copy")
    made.rename("moved")
    assert origin.is_own(Path("copy")) and origin.is_own(Path("moved"))
    assert stat.S_IMODE(Path("state/runner/key").stat().st_mode) == 0o600


def test_run_from_other_machine_is_untrusted(made, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(made.parent / "other"))
    assert origin.store_of(made) is None
    monkeypatch.setenv("XDG_STATE_HOME", str(made.parent / "state"))
    assert origin.is_own(made)


def forged(folder, **fields):
    file = folder / origin.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


CHANGES = {
    "its configuration": lambda folder: (folder / "rerun.yaml").write_text("seed: 1\n"),
    "its model": lambda folder: (folder / "model.json").write_text("{}"),
    "no configuration": lambda folder: (folder / "rerun.yaml").unlink(),
    "another store": lambda folder: forged(folder, store="http://there"),
    "no signature": lambda folder: forged(folder, signature=""),
    "a number for one": lambda folder: forged(folder, signature=1),
    "an odd one": lambda folder: forged(folder, signature="é"),
    "a list": lambda folder: (folder / origin.FILE).write_text("[]"),
    "nothing said": lambda folder: (folder / origin.FILE).unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_run_is_untrusted(made, change):
    change(made)
    assert origin.store_of(made) is None


def test_without_key_folder_nothing_is_trusted(made, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(made.parent / "file"))
    origin.sign(made, "http://here")
    assert not origin.is_own(made)


def test_key_created_concurrently_is_one(made, monkeypatch):
    key = Path("state/runner/key")
    first = key.read_bytes()
    monkeypatch.setattr(Path, "exists", lambda path, **more: False)  # as another process has seen it a moment before
    assert origin._key() == first
    assert [path.name for path in Path("state/runner").iterdir()] == ["key"]


def test_relative_key_folder_is_ignored(own_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(own_folder / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    assert origin._folder() == own_folder / "home/.local/state/runner"


def test_truncated_key_signs_nothing(made):
    Path("state/runner/key").write_bytes(b"")
    origin.sign(made, "http://here")
    assert not origin.is_own(made)
