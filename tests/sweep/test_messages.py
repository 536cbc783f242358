"""The output of a sweep before its first job, and at its end."""

import shlex
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from synthetic_sweep import Folder

from runner.sweep import messages
from runner.sweep.jobs import ledger
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal import Journal
from runner.tracking.journal_records import FILE

SYNC = "sync     python -m runner sync 'a b' tracking.uri=http://there"


@pytest.mark.parametrize(("state", "is_told"), [("interrupted", True), ("planned", True), ("finished", False)])
def test_jobs_that_the_words_of_a_resumed_sweep_do_not_describe_are_told(tmp_path, state, is_told):
    made, lines = Folder(tmp_path, ("train.num_epochs=9", "name=a b", "seed=1,2")), []
    for epochs, each in ((9, "finished"), (9, state), (5, "planned")):
        made.job((f"train.num_epochs={epochs}",), each)
    sweep = ledger.read(made.close())
    prepared = [SimpleNamespace(job=sweep.jobs[2], missing=None, devices=("cpu",))]
    messages.plan(SimpleNamespace(say=lines.append), sweep, prepared, slots="cpu", search=())
    words = "train.num_epochs=9 'name=a b' seed=1,2"
    told = f"note: 1 unfinished job is not covered by these overrides; the sweep was started with {words}"
    assert (told in lines) == is_told


@pytest.mark.parametrize(
    ("state", "next_line"),
    [
        ("planned", "resume   {} 'sweep.resume=my sweep'"),
        ("failed", "retry    {} 'sweep.resume=my sweep' sweep.retry=true"),
        ("finished", "more     {} 'sweep.resume=my sweep' hydra.sweeper.n_trials=2"),
    ],
)
def test_resume_command_is_complete(own_folder, monkeypatch, state, next_line):
    argv = [
        "runner",
        "-cn",
        "mine",
        "-m",
        "seed=1,2",
        "name=a b",
        "tracking.uri=http://me:secret@there",
        "sweep.resume=last",
    ]
    monkeypatch.setattr("sys.argv", argv)
    command = "python -m runner -cn mine -m seed=1,2 'name=a b' tracking.uri=http://me:PASSWORD@there"
    lines, jobs = [], {"0": SimpleNamespace(state=state)}
    found = SimpleNamespace(folder=own_folder / "my sweep", jobs=jobs, objectives=("val/loss",))
    off = SimpleNamespace(tracking=SimpleNamespace(enabled=False))
    messages.what_next(SimpleNamespace(say=lines.append), found, off)
    assert lines[-1] == next_line.format(command)


def test_a_try_is_not_gone_on_with(own_folder):
    lines, folder = [], own_folder / "multirun/tries/1"
    found = SimpleNamespace(folder=folder, jobs={"0": SimpleNamespace(state="interrupted")}, objectives=())
    off = SimpleNamespace(tracking=SimpleNamespace(enabled=False))
    messages.what_next(SimpleNamespace(say=lines.append), found, off)
    assert not any("sweep.resume" in line for line in lines)


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
    messages.what_next(SimpleNamespace(say=printed.append), sweep, on)
    assert printed[: len(lines)] == lines


@pytest.mark.parametrize("folder", ["multirun/2026-11-25/10-00-00", "/my runs/a", "übung, 1", 'it\'s (a) & "b"', "a,b"])
def test_hydra_reads_the_folder_that_is_to_be_typed(folder):
    (word,) = shlex.split(messages.to_resume(folder))
    assert OverridesParser.create().parse_override(word).value() == folder
