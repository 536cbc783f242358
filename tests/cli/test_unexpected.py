"""Unexpected errors: one line on the screen, the traceback in a file, and no other files."""

from dataclasses import replace
from pathlib import Path

import pytest

from runner import cli
from runner.cli import table
from runner.experiment import run

SMALL = [
    *("data=synthetic", "data.num_rows=40", "data.num_features=3"),
    *("model=mlp", "device=cpu", "tracking.enabled=false"),
]
BROKEN = "def fail():\n    raise KeyError('nothing')\n"


@pytest.mark.parametrize("shown", [False, True])
def test_unexpected_error_is_one_line_traceback_logged(shown, own_folder, monkeypatch, capsys):
    (own_folder / "mine.py").write_text(BROKEN)
    import mine

    monkeypatch.setattr(run, "check_directory", lambda *_: mine.fail())
    if shown:
        monkeypatch.setenv("RUNNER_TRACEBACK", "1")
    assert cli.main([*SMALL, "hydra.run.dir=run"]) == 1
    said = capsys.readouterr().err
    assert "error: unexpected error: KeyError: 'nothing' (mine.py:2)" in said and "runner.log" in said
    assert ("Traceback" in said) == shown and "Error executing job" not in said
    assert "Traceback" in Path("run/runner.log").read_text()


@pytest.mark.parametrize("error", ["MemoryError()", 'RuntimeError("alloc_cpu.cpp:127: can\'t allocate memory")'])
def test_unexpected_host_memory_error_names_free_memory(error, own_folder, capsys):
    (own_folder / "large.py").write_text(f"def model():\n    raise {error}\n")
    assert cli.main([*SMALL[:3], *SMALL[4:], "~model", "+model._target_=large.model"]) == 1
    said = capsys.readouterr().err
    assert "error: unexpected error: out of host memory, " in said and "use a smaller model or data" in said


def test_without_a_folder_the_file_is_named(own_folder, monkeypatch, capsys):
    def fail(given):
        raise ValueError("of a verb")

    monkeypatch.setitem(table.COMMANDS, "devices", replace(table.COMMANDS["devices"], function=fail))
    monkeypatch.setattr("tempfile.tempdir", str(own_folder))
    assert cli.main(["devices"]) == 1
    said = capsys.readouterr().err
    (log,) = own_folder.glob("runner-*.log")
    assert "ValueError: of a verb" in said and str(log) in said and "Traceback" not in said
    assert "of a verb" in log.read_text()


def test_user_exit_does_not_look_like_success(own_folder, monkeypatch, capsys):
    (own_folder / "mine.py").write_text("import sys\n\n\ndef command(given):\n    sys.exit()\n")
    import mine

    monkeypatch.setitem(table.COMMANDS, "devices", replace(table.COMMANDS["devices"], function=mine.command))
    monkeypatch.setattr("tempfile.tempdir", str(own_folder))
    assert cli.main(["devices"]) == 1
    said = capsys.readouterr().err
    assert "unexpected error: SystemExit: it would end the program, with exit code 0 (mine.py:5)" in said


def test_resumed_run_writes_error_into_its_log(own_folder, monkeypatch, capsys):
    assert cli.main([*SMALL, "train.num_epochs=1", "hydra.run.dir=run"]) == 0

    def fail(cfg, folder, **more):
        raise ValueError("of a resumed run")

    monkeypatch.setattr(run, "run", fail)
    assert cli.main(["resume", "run", "train.num_epochs=2"]) == 1
    said = capsys.readouterr().err
    assert "ValueError: of a resumed run" in said and "run/runner.log" in said and "Traceback" not in said
    assert "of a resumed run" in Path("run/runner.log").read_text()


@pytest.mark.parametrize("words", [["hydra.run.dir={}"], ["-cd", "{}"], ["-m", "seed=1,2", "sweep.resume={}"]])
def test_impossible_file_name_is_refused(words, own_folder, capsys):
    assert cli.main(["tracking.enabled=false", *(word.format("a" * 300) for word in words)]) == 2
    assert "error: this file system takes no name of 300 letters" in capsys.readouterr().err
