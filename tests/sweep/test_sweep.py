"""Whole sweeps, as a user starts them: skipped devices, jobs that die, kills at any moment, signals, and a common store."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf
from refused import problems_of
from synthetic_sweep import Folder
from waiting import wait_for

from runner import cli
from runner.device import diagnose, probe
from runner.device.unavailable import why_not
from runner.errors import RunnerError
from runner.experiment.summary import Summary
from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import Job, Sweep
from runner.sweep.launchers.local import Capacity
from runner.sweep.sweep import Plan, SweepContext, _end, _folder_problems, _jobs_to_run, _reporting_full_disk, _sweep_of
from runner.sweep.terminal import Table
from runner.tracking.journal import Journal, read_points
from runner.tracking.journal_reader import read_events
from runner.training.signals import Stop

UNTRACKED = ("tracking.enabled=false", "task.plots=false")

FAULTY = """
import os, signal, time
import torch
from torch import nn

class Faulty(nn.Module):
    def __init__(self, inputs, outputs, number, pause):
        super().__init__()
        self.layer, self.number, self.pause = nn.Linear(inputs, outputs), number, pause
        self.register_buffer("calls", torch.zeros(()))  # a resumed run dies at the same step

    def forward(self, x):
        time.sleep(self.pause)
        self.calls += self.training
        if self.calls == 20 and self.training:
            if self.number == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.number == 3:
                raise ValueError("a bug in the third layer")
            if self.number == 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return self.layer(x.flatten(1))
"""
FAULTY_YAML = """
_target_: my_models.Faulty
inputs: ${facts.in_features}
outputs: ${facts.out_features}
number: 0
pause: 0
"""
NUM_JOBS = 5
FAULTS = (
    "model=faulty",
    f"model.number=range({NUM_JOBS})",
    "sweep.slots.cpu=2",
    "train.num_epochs=3",
    "data.limit=600",
    "train.batch_size=64",
)
FAULTS += ("train.checkpoint_every_steps=4", "metrics.pull_every=5", "model.pause=0.02", "task.plots=false")


@pytest.fixture
def sweep(warm):
    """Run a whole sweep in a directory. Returns its exit code and its output."""

    def run(folder, *words):
        process = warm.command(folder, "-m", *words)
        output, _ = process.communicate()
        return process.returncode, output

    return run


def the_sweep(folder):
    (found,) = (path.parent for path in folder.glob("multirun/**/ledger.jsonl"))
    return found


def report(folder):
    return json.loads((the_sweep(folder) / "report.json").read_text())


def results(folder):
    """Return the results that must not depend on when the sweep was killed: everything except times."""
    rows = {}
    for number, job in ledger.read(the_sweep(folder)).jobs.items():
        path = the_sweep(folder) / job.folder_name
        summary = json.loads((path / "summary.json").read_text())
        metrics = {name: value for name, value in summary.get("metrics", {}).items() if not name.startswith("speed/")}
        points = {name: rows for name, rows in read_points(path).items() if not name.startswith("speed/")}
        if "process" in (job.error or "") or job.state == "killed":  # a window may have been lost in the crash
            metrics = points = None
        # an earlier part of the run, which measured nothing, may have left its own
        best = summary.get("best") or {"value": None}
        rows[number] = job.state, job.error, metrics, None if best["value"] is None else best, points
    return rows


def write_faulty(folder):
    (folder / "my_models.py").write_text(FAULTY)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "faulty.yaml").write_text(FAULTY_YAML)


@pytest.mark.parametrize(
    ("states", "what", "status"),
    [
        (["finished", "interrupted", "planned"], None, "KILLED"),  # sweep.max_seconds
        (["finished", "failed", "planned"], None, "KILLED"),
        (["finished", "skipped"], None, "FINISHED"),
        (["finished", "killed"], None, "FAILED"),
        (["finished"], signal.SIGINT, "KILLED"),
    ],
)
def test_unfinished_sweep_is_killed_in_mlflow(tmp_path, states, what, status):
    made = Folder(tmp_path, ("seed=range(3)",))
    for state in states:
        made.job((f"seed={made.number}",), state, summary={})
    ended = []
    parent = SimpleNamespace(note_runs=lambda: None, end=lambda status, *_, **__: ended.append(status))
    stop = Stop()
    stop.signal = what
    _end(ledger.read(made.close()), parent, stop, Table())
    assert ended == [status]


@pytest.mark.parametrize("adds_seeds", [False, True])
def test_resumed_sweep_with_another_store_matches(tmp_path, adds_seeds):
    made, now = Folder(tmp_path, ("tracking.uri=http://there", "seed=range(3)")), "tracking.uri=sqlite:///here.db"
    for seed, state in enumerate(("finished", "interrupted", "finished")):
        made.job(("tracking.uri=http://there", f"seed={seed}"), state, summary={})
    sweep = ledger.read(made.close())
    planned = [((now, f"seed={seed}"), "") for seed in range(2 if adds_seeds else 3)]
    plan = Plan((), planned, lambda context: None, adds_seeds=adds_seeds)
    (found,) = _jobs_to_run(plan, sweep, retry=False, grace_seconds=0)
    assert (found.number, found.folder_name) == (1, "1")
    assert [job.overrides for job in sweep.jobs.values()] == [(now, f"seed={seed}") for seed in range(3)]
    with ledger.Ledger(tmp_path) as book:  # for the report, as run_sweep() does it
        book.plan(*sweep.jobs.values())
    states = [(job.state, job.overrides) for job in ledger.read(tmp_path).jobs.values()]
    assert states == [(job.state, job.overrides) for job in sweep.jobs.values()]


def test_retry_after_full_disk_keeps_directory(tmp_path):
    words = [(f"seed={seed}",) for seed in range(4)]
    made = Folder(tmp_path, ("seed=range(4)",))
    for each, ending in zip(words, ("disk_full", "not_finite", None, "disk_full"), strict=True):
        made.job(each, "running" if each == words[-1] else "failed", summary={})
        (tmp_path / each[0][-1] / "summary.json").write_text(json.dumps({"status": "failed", "ending": ending}))
    sweep = ledger.read(made.close())
    plan = Plan((), [(each, "") for each in words], lambda context: None)
    found = _jobs_to_run(plan, sweep, retry=True, grace_seconds=0)
    assert [job.folder_name for job in found] == ["0", "1-1", "2-1", "3"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_full_disk_names_resume_command(tmp_path, messages):
    sweep = Sweep(tmp_path / "a b", "1", 0, ())
    with pytest.raises(RunnerError) as raised, _reporting_full_disk(sweep), open("/dev/full", "w") as full:  # noqa: PTH123
        full.write("a summary")
    messages(raised.value)
    with pytest.raises(FileNotFoundError), _reporting_full_disk(sweep):
        (tmp_path / "nowhere").read_text()


GOALS = ({"metric": "val/loss", "direction": "minimize"},)


@pytest.mark.parametrize(
    ("objectives", "new", "refused"),
    [
        ((), ["0", "1"], ["1"]),
        ((), ["0", "2"], []),
        (GOALS, [], ["1"]),  # its trials are created one by one
    ],
)
def test_used_directory_is_refused(tmp_path, objectives, new, refused):
    for name in ("1", "5", "mine"):
        with Journal(tmp_path / name) as journal:
            journal.event("start", uid=name)
    (tmp_path / "3").mkdir()
    jobs = [Job(index, (), name, folder_name=name) for index, name in enumerate(new)]
    known = Job(5, (), "one that resumes", folder_name="5")
    sweep = Sweep(tmp_path, "1", 0, (), objectives, jobs={job.number: job for job in [*jobs, known]})
    found = _folder_problems(Plan((), [], lambda context: None, objectives), sweep, jobs)
    assert [problem.message for problem in found] == [
        f"`{tmp_path / name}` has a run, which is never overwritten" for name in refused
    ]


@pytest.mark.parametrize(("named", "last"), [("runs/a", "a"), ("runs/b", "b"), ("runs/new", "b")])
def test_resume_last_respects_sweep_dir(tmp_path, monkeypatch, named, last):
    monkeypatch.chdir(tmp_path)
    for at, name in enumerate("ab"):
        path = Folder(tmp_path / "runs" / name, ("seed=1,2",)).close() / ledger.FILE
        os.utime(path, (at, at))
    settings = {"sweep": {"resume": "last"}, "hydra": {"sweep": {"dir": named}}, "tracking": {"enabled": False}}
    found, is_new = _sweep_of(Plan((), [], lambda context: None), OmegaConf.create(settings))
    assert (found.folder, is_new) == (tmp_path / "runs" / last, False)


SEARCH = ({"metric": "val/accuracy", "direction": "maximize"},)


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [((), GOALS, "minimize val/loss"), (SEARCH, GOALS, "minimize val/loss"), (GOALS, (), "a grid")],
)
def test_sweep_resumes_only_as_the_same(tmp_path, now, before, said):
    Folder(tmp_path / "found", objectives=before).close()
    settings = {"sweep": {"resume": str(tmp_path / "found")}, "hydra": {"sweep": {"dir": "s"}}}
    (problem,) = problems_of(_sweep_of, Plan((), [], lambda context: None, now), OmegaConf.create(settings))
    assert said in problem.message


def tree(process):
    """Return the process and all its descendants, also those that are being started."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def all_gone(processes):
    def is_gone(process):
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return all(map(is_gone, processes))


@pytest.mark.slow
def test_missing_device_is_announced_and_skipped(own_folder, warm_jobs, capfd):
    words = ("device=cpu,cuda:7,mps", "model=linear,mlp", "train.num_steps=1", "data.limit=100", *UNTRACKED)
    assert cli.main(["-m", *words]) == 0
    before, _, after = capfd.readouterr().out.partition("job 0 started")
    assert "2 to run, 4 skipped" in before
    assert len(re.findall(r"^  device=(cuda:7|mps) model=(linear|mlp)$", before, re.M)) == 4
    assert why_not("cuda:7", diagnose(probe())).cause in before and "Apple's GPU" in before
    assert "skipped" in after and "failed" not in after
    states = [job["state"] for job in report(own_folder)["jobs"]]
    assert sorted(states) == ["finished"] * 2 + ["skipped"] * 4
    summaries = [json.loads(path.read_text()) for path in the_sweep(own_folder).glob("*/summary.json")]
    assert sorted(found["status"] for found in summaries) == sorted(states)
    assert (the_sweep(own_folder) / "report.html").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "mends"),
    [
        (["device=cpu,cuda:7,mps", "sweep.strict=true"], ["device=cuda:7", "device=mps"]),
        (["model=liner,mlp", "seed=1,x"], ["model=linear", "seed=10"]),
        (["model=mlp", "model.hiden_sizes=[1],[2]"], ["model.hidden_sizes=[1]"]),
        (["device=cpu", "sweep.slots.cpu=0"], ["sweep.slots.cpu=1"]),
        (["device=cpu", "sweep.zip={tracking.enabled:[true,false]}"], ["tracking.enabled=..."]),
        (["device=cpu", "sweep.resume=nowhere"], ["multirun/DATE/TIME"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_of_jobs_come_before_start(words, mends, own_folder, warm_jobs, capfd):
    assert cli.main(["-m", *words]) == 2
    error = capfd.readouterr().err.replace("`", "")
    for mend in mends:
        assert mend in error
    assert "Traceback" not in error
    assert not (own_folder / "multirun").exists()


def test_unknown_argument_of_a_sweep_is_reported_once(own_folder, warm_jobs, capfd):
    assert cli.main(["-m", "device=cpu", "optimizer.rl=1,2,3"]) == 2
    assert capfd.readouterr().err.count("-->") == 1


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """The sweep of the jobs that die, without a kill: its directory, its exit code and its output."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_faulty(folder)
    process = warm.command(folder, "-m", *FAULTS, *UNTRACKED)
    output, _ = process.communicate()
    return folder, process.returncode, output, results(folder), _timeless(report(folder))


@pytest.mark.slow
def test_dying_jobs_are_rows_with_causes(undisturbed, sweep):
    folder, code, output, *_ = undisturbed
    assert code == 1, output
    jobs = ledger.read(the_sweep(folder)).jobs
    causes = {number: (job.state, job.error) for number, job in jobs.items() if job.state != "finished"}
    assert len(jobs) == NUM_JOBS and causes.keys() == {1, 2, 3, 4}
    assert causes[1] == ("failed", "its process crashed: SIGSEGV, segmentation fault")
    assert causes[2] == ("killed", "SIGKILL: by the system when memory ran out, or by `kill -9`")
    assert causes[3][0] == "failed" and "ValueError: a bug in the third layer (my_models.py:" in causes[3][1]
    assert causes[4][0] == "failed" and "CUDA out of memory" in causes[4][1]
    for number, (_, error) in causes.items():
        assert error.split(";")[0][:40] in " ".join(output.split())
        assert json.loads((the_sweep(folder) / str(number) / "summary.json").read_text())["error"]
    code, output = sweep(folder, *FAULTS, *UNTRACKED, "sweep.resume=last")
    assert code == 1 and f"0 to run, {NUM_JOBS} done before" in output
    (folder / "my_models.py").write_text(FAULTY.replace("self.calls == 20", "False"))
    code, output = sweep(folder, *FAULTS, *UNTRACKED, "sweep.resume=last", "sweep.retry=true")
    assert code == 0 and "4 to run, 1 done before" in output
    assert {job.folder_name for job in ledger.read(the_sweep(folder)).jobs.values()} >= {"0", "1-1", "2-1"}


def journals(folder):
    """Return the journals of the jobs that have started."""
    with contextlib.suppress(FileNotFoundError):  # a directory that appeared and vanished during the search
        return [path for path in folder.glob("multirun/**/journal.bin") if (path.parents[1] / ".hydra").is_dir()]
    return []


def in_flight(folder):
    """Return the unfinished jobs with a saved state: they resume from it, and their journals have a second start."""
    jobs = [path.parents[1] for path in journals(folder)]
    saved = [job for job in jobs if (job / "checkpoints/last.pt").exists()]
    return [job for job in saved if Summary.read(job).status not in ("finished", "failed")]


@pytest.mark.slow
def test_sweep_killed_repeatedly_equals_undisturbed(undisturbed, warm, sweep, own_folder, empty_store):
    """The first kill hits a running job, and also kills it; the others come at random moments."""
    write_faulty(own_folder)
    shutil.copy(empty_store, own_folder / "mlflow.db")  # one that is created during a kill stays incomplete
    chance = random.Random(0)
    for attempt in range(3):
        resume = [f"sweep.resume={the_sweep(own_folder)}"] if attempt else []
        process = warm.command(own_folder, "-m", *FAULTS, *resume)
        wait_for(lambda process=process: in_flight(own_folder) or process.poll() is not None, "a job in flight")
        if attempt:
            time.sleep(chance.uniform(0.0, 2.0))  # the test needs a random moment
        found = tree(psutil.Process(process.pid)) if process.poll() is None else []
        victims = found if not attempt or chance.random() < 0.6 else found[:1]  # with its jobs, or only the sweep
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
        process.communicate()
        wait_for(lambda found=found: all_gone(found), "the end of what it left")
    code, output = sweep(own_folder, *FAULTS, f"sweep.resume={the_sweep(own_folder)}")
    assert code == 1, output
    *_, whole, recorded = undisturbed
    assert results(own_folder) == whole
    assert json.dumps(_timeless(report(own_folder))) == json.dumps(recorded)
    check_store(own_folder, num_runs=NUM_JOBS)
    events = [read_events(the_sweep(own_folder) / str(number)) for number in range(NUM_JOBS)]
    starts = [sum(event["kind"] == "start" for event in of_job) for of_job in events]
    assert max(starts) > 1, "no kill met a job in flight: this test proves nothing"


def _timeless(found):
    """Return the report without seconds, names of places, and the values that a crashed job had reported.

    A job that stopped with its sweep, and crashed after it was resumed, has reported more.
    """
    dropped = re.compile(r"second|speed|run_id|began|uid|uri|folder|command|overrides|keys|time")
    if isinstance(found, dict):
        if found.get("state") in ("failed", "killed"):
            found = {key: value for key, value in found.items() if key in ("job", "name", "state", "seed", "error")}
        return {key: _timeless(value) for key, value in found.items() if not dropped.search(key)}
    return [_timeless(item) for item in found] if isinstance(found, list) else found


def check_store(folder, *, num_runs):
    """Every point of every job's journal is in MLflow, once, below the sweep's run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = (found for found in client.search_experiments() if found.name == "digits")
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    children = {key: run for key, run in runs.items() if "mlflow.parentRunId" in run.data.tags}
    (parent,) = runs.keys() - children.keys()
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent}
    assert len(children) == num_runs
    assert runs[parent].info.status in ("FINISHED", "FAILED")
    assert "report.html" in {item.path for item in client.list_artifacts(parent)}
    best = runs[report(folder)["jobs"][0]["run_id"]].data.metrics["val/loss"]
    assert runs[parent].data.metrics["val/loss"] == best
    for job in ledger.read(the_sweep(folder)).jobs.values():
        path = the_sweep(folder) / job.folder_name
        run_id = json.loads((path / "journal" / "ack.json").read_text())["run_id"]
        summary = Summary.read(path)
        assert job.state != "finished" or (summary.run_id, summary.tracker["points_pending"]) == (run_id, 0)
        assert runs[run_id].info.run_name == job.name
        assert runs[run_id].info.status == {"finished": "FINISHED", "failed": "FAILED"}.get(job.state, "KILLED") or (
            job.state == "failed" and runs[run_id].info.status == "KILLED"  # a crash leaves no status
        )
        for name, points in read_points(path).items():
            stored = sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))
            assert stored == sorted(points), (job.name, name)


@pytest.mark.slow
def test_sigterm_stops_jobs_with_checkpoints(own_folder, warm, sweep):
    words = ("model=linear", "data.limit=200", "seed=1,2,3,4", "sweep.slots.cpu=2", "sweep.batch=off", *UNTRACKED)
    process = warm.command(own_folder, "-m", *words, "train.num_epochs=100000")
    wait_for(lambda: len(journals(own_folder)) == 2)
    wait_for(lambda: all(read_points(path.parents[1]) for path in journals(own_folder)))
    found = tree(psutil.Process(process.pid))
    assert len(found) >= 4
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 143, output
    wait_for(lambda: all_gone(found))
    states = [job.state for job in ledger.read(the_sweep(own_folder)).jobs.values()]
    assert states == ["interrupted", "interrupted", "planned", "planned"]
    assert len(list(the_sweep(own_folder).glob("*/checkpoints/last.pt"))) == 2
    assert "sweep.resume=" in output
    code, output = sweep(own_folder, "model=linear", "seed=5", "train.num_steps=1", *UNTRACKED, "sweep.resume=last")
    assert code == 1, output  # other overrides: new jobs, in addition to those that still wait
    assert [job.state for job in ledger.read(the_sweep(own_folder)).jobs.values()] == [*states, "finished"]


def test_existing_sweep_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Folder(tmp_path / "multirun/mine", ("seed=1,2",)).close()
    settings = {"sweep": {"resume": None}, "hydra": {"sweep": {"dir": "multirun/mine"}}}
    (problem,) = problems_of(_sweep_of, Plan((), [], lambda context: None), OmegaConf.create(settings))
    assert problem.suggestions == ("sweep.resume=multirun/mine",)


@pytest.mark.parametrize(("batch", "is_said"), [("auto", False), ("off", False), (4, True)])
def test_batch_without_groups_prints_reason(batch, is_said):
    """In a search, and on other machines."""
    output, config = [], OmegaConf.create({"sweep": {"batch": batch}})
    context = SweepContext(None, None, config, None, None, True, None, Capacity(""), output.append)
    assert context.in_groups([]) == [] and any("sweep.batch=4" in line for line in output) == is_said
