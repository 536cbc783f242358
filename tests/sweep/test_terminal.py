"""The output of a sweep before its first job, while its jobs run, and at its end."""

import io
import re
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from rich.console import Console
from synthetic_sweep import Folder

from runner.experiment.summary import Summary
from runner.sweep import terminal
from runner.sweep.jobs import ledger
from runner.sweep.terminal import Table, Watch
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal import Journal
from runner.tracking.journal_records import FILE

SYNC = "sync     python -m runner sync 'a b' tracking.uri=http://there"


@pytest.mark.parametrize(("state", "is_told"), [("interrupted", True), ("planned", True), ("finished", False)])
def test_unfinished_jobs_of_other_overrides_are_noted(tmp_path, state, is_told):
    made, lines = Folder(tmp_path, ("train.num_epochs=9", "name=a b", "seed=1,2")), []
    for epochs, each in ((9, "finished"), (9, state), (5, "planned")):
        made.job((f"train.num_epochs={epochs}",), each)
    sweep = ledger.read(made.close())
    prepared = [SimpleNamespace(job=sweep.jobs[2], missing=None, devices=("cpu",))]
    terminal.plan(SimpleNamespace(say=lines.append), sweep, prepared, slots="cpu", search=())
    words = "train.num_epochs=9 'name=a b' seed=1,2"
    recorded = f"note: 1 unfinished job is not covered by these overrides; the sweep was started with {words}"
    assert (recorded in lines) == is_told


@pytest.mark.parametrize(
    ("state", "next_line"),
    [
        ("planned", "resume   {} 'sweep.resume=my sweep'"),
        ("failed", "retry    {} 'sweep.resume=my sweep' sweep.retry=true"),
        ("finished", "more     {} 'sweep.resume=my sweep' hydra.sweeper.n_trials=2"),
    ],
)
def test_resume_command_is_complete(own_folder, monkeypatch, state, next_line):
    argv = ["runner", "-cn", "mine", "-m", "seed=1,2", "name=a b", "tracking.uri=http://me:secret@there"]
    monkeypatch.setattr("sys.argv", [*argv, "sweep.resume=last"])
    command = "python -m runner -cn mine -m seed=1,2 'name=a b' tracking.uri=http://me:PASSWORD@there"
    lines, jobs = [], {"0": SimpleNamespace(state=state)}
    found = SimpleNamespace(folder=own_folder / "my sweep", jobs=jobs, objectives=("val/loss",))
    off = SimpleNamespace(tracking=SimpleNamespace(enabled=False))
    terminal.what_next(SimpleNamespace(say=lines.append), found, off)
    assert lines[-1] == next_line.format(command)
    found.folder = own_folder / "multirun/tries/1"  # a sweep of `try` has none
    terminal.what_next(SimpleNamespace(say=lines.append), found, off)
    assert len([line for line in lines if "sweep.resume" in line]) == 1


@pytest.mark.parametrize(
    ("has_all", "lines"),
    [
        (True, ["mlflow   http://there  (view: python -m runner ui tracking.uri=http://there)"]),
        (False, ["mlflow   http://there  (2 of 3 runs are incomplete: it is full)", SYNC]),
    ],
)
def test_incomplete_runs_are_reported_at_the_end(own_folder, has_all, lines):
    made, printed = Folder(own_folder / "a b", ("seed=range(3)",)), []
    for number in range(3):
        made.job((f"seed={number}",), "planned" if number == 2 else "finished")
    sweep = ledger.read(made.close())
    for number, folder in enumerate((sweep.folder, *map(sweep.folder_of, list(sweep.jobs.values())[:2]))):
        with Journal(folder) as journal:
            journal.event("start", uid=str(number), experiment="e", run_name=None, start_ms=0)
        error = None if has_all else "it is full"
        write_ack(folder, Ack(offset=(folder / FILE).stat().st_size, ended=has_all or number == 0, error=error))
    on = OmegaConf.create({"tracking": {"enabled": True, "uri": "http://there"}})
    terminal.what_next(SimpleNamespace(say=printed.append), sweep, on)
    assert printed[: len(lines)] == lines


@pytest.mark.parametrize("folder", ["multirun/2026-11-25/10-00-00", "/my runs/a", "übung, 1", 'it\'s (a) & "b"', "a,b"])
def test_to_resume_survives_shell_and_hydra(folder):
    (word,) = shlex.split(terminal.to_resume(folder))
    assert OverridesParser.create().parse_override(word).value() == folder


def test_watch_follows_growing_journal(tmp_path):
    watch = Watch(tmp_path)
    watch.look()
    assert (watch.step, watch.num_steps, watch.values) == (0, 0, {})
    with Journal(tmp_path) as journal:
        journal.event("start", uid="u", params={"facts.num_steps": "40"})
        journal.points(("train/loss", "train/accuracy"), [1, 2], [5, 6], np.array([[2.0, 0.1], [1.5, 0.2]]))
        watch.look()
        assert (watch.step, watch.num_steps, watch.values) == (2, 40, {"train/loss": 1.5, "train/accuracy": 0.2})
        journal.points(("val/loss",), [2], [7], np.array([[1.0]]))
        watch.look()
        assert watch.values["val/loss"] == 1.0 and watch.step == 2
        read = watch._offset
        watch.look()
        assert watch._offset == read == journal.path.stat().st_size


def begun_sweep(folder, console, monkeypatch):
    """Six jobs: two have ended, two are running, one of them at 25 %, and two wait."""
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_FRAMES", 0.0)
    made = Folder(folder, ("seed=range(6)",))
    for number in range(6):
        made.job((f"seed={number}",) if number else (), "planned", name=f"seed={number}" if number else "")
    sweep, table = ledger.read(made.close()), Table(console)
    jobs = list(sweep.jobs.values())
    with table:
        for job in jobs[:2]:
            job.state, job.device = "running", "cpu"
        table.show(sweep)
        jobs[0].state, jobs[1].state, jobs[1].error = "finished", "failed", "ValueError: x"
        table.ended(jobs[0], Summary(best={"metric": "val/loss", "value": 0.25, "step": 4}, metrics={"val/loss": 0.5}))
        table.ended(jobs[1], Summary())
        for job in jobs[2:4]:
            job.state, job.device = "running", "cpu"
        for job, step in ((jobs[2], 5), (jobs[3], 0)):
            with Journal(sweep.folder_of(job)) as journal:
                journal.event("start", uid=str(job.number), params={"facts.num_steps": "20"})
                if step:
                    journal.points(("train/loss",), [step], [7], np.array([[2.0]]))
                    journal.points(("val/loss",), [step], [7], np.array([[0.125]]))
        table.show(sweep)
    return console.file.getvalue()


def test_table_shows_progress_and_values(tmp_path, monkeypatch):
    output = begun_sweep(tmp_path, Console(file=io.StringIO(), width=100, force_terminal=True), monkeypatch)
    frame = output[output.rindex("overrides") :]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in frame.splitlines()]
    assert lines[1] == ["2", "seed=2", "cpu", "25%", "0.1250"]
    assert lines[2] == ["3", "seed=3", "cpu", "0%"]
    assert lines[3] == ["1", "seed=1", "cpu", "failed:", "ValueError:", "x"]
    assert lines[4] == ["0", "(defaults)", "cpu", "finished", "0.2500"]
    assert " ".join(lines[5]) == "2/6 done · 1 failed"


def test_pipe_gets_lines_without_control_characters(tmp_path, monkeypatch):
    output = begun_sweep(tmp_path, Console(file=io.StringIO(), width=100), monkeypatch)
    assert output.splitlines() == [
        "job 0 started on cpu: (defaults)",
        "job 1 started on cpu: seed=1",
        "job 0 finished  val/loss 0.2500",
        "job 1 failed: ValueError: x",
        "job 2 started on cpu: seed=2",
        "job 3 started on cpu: seed=3",
    ]
