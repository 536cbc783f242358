"""Searches as a user starts them: real trainings in two slots, pruned, killed, resumed; and the errors."""

import json
import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import optuna
import psutil
import pytest
from omegaconf import OmegaConf
from optuna.trial import TrialState

from runner import cli
from runner.config.packages import install
from runner.sweep.jobs import ledger
from runner.tracking.journal_reader import read_series

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_jobs")]

LR = "optimizer.lr=tag(log,interval(1e-6,1e-1))"
COMMON = ["hydra/sweeper=optuna", "model=mlp", "tracking.enabled=false", "sweep.slots.cpu=2", "device=cpu"]
COMMON += ["task.plots=false", "data.limit=300", "train.batch_size=50"]
SHORT = ["train.num_epochs=4", "model.hidden_sizes=[16],[32]", LR]
STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}


def search(*words, folder="found"):
    return cli.main(["-m", *COMMON, f"hydra.sweep.dir={folder}", *words])


def trials_of(folder):
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/optuna.db")
    try:
        return optuna.load_study(study_name="search", storage=storage).get_trials()
    finally:
        storage.remove_session()
        storage.engine.dispose()


def summary_of(folder, number):
    return json.loads(Path(folder, str(number), "summary.json").read_text())


def events_of(folder):
    lines = [json.loads(line) for line in Path(folder, "ledger.jsonl").read_text().splitlines()]
    return [(line["job"], line["state"]) for line in lines if line["kind"] == "state"]


def agrees(folder):
    """The study, ledger, directories and journals agree. Returns the numbers of the finished and pruned trials."""
    sweep = ledger.read(Path(folder))
    (goal,) = sweep.objectives
    good = []
    for trial in trials_of(folder):
        job = sweep.jobs.get(trial.number)
        if job is None:
            assert trial.state == TrialState.FAIL  # a kill between the trial's creation and its entry in the ledger
            continue
        summary = summary_of(folder, trial.number)
        assert trial.state == STATES[job.state] and summary["status"] == job.state and job.trial == trial.params
        series = read_series(Path(folder, str(trial.number)))[goal["metric"]]
        if job.state == "finished":
            assert (
                trial.values
                == [summary["best"]["value"]]
                == [series[2].max() if goal["direction"] == "maximize" else series[2].min()]
            )
        if trial.intermediate_values:
            assert list(trial.intermediate_values.values()) == list(series[2])
            assert list(trial.intermediate_values) == list(range(1, summary["num_epochs"] + 1))
        good += [trial.number] if job.state in ("finished", "pruned") else []
    assert len({job.overrides for job in sweep.jobs.values()}) == len(sweep.jobs)
    return good


def test_search_prunes_and_continues_with_more(own_folder, capfd):
    words = [*SHORT, "hydra.sweeper.startup_trials=2", "hydra.sweeper.warmup_epochs=2", "hydra.sweeper.n_trials=7"]
    assert search(*words) == 0
    assert agrees("found") == list(range(7))
    output = capfd.readouterr().out
    plan = output[: output.index("job 0 started")]
    lines = """slots    cpu, cpu (2)
        search   tpe, 7 trials, seed 0
        goal     minimize val/loss
        pruner   median, after 2 epochs, once 2 trials have run to their end
        space    model.hidden_sizes  [16], [32]
        optimizer.lr        1e-06 to 0.1, logarithmic"""
    assert all(line.strip() in plan for line in lines.splitlines())
    pruned = [number for number in range(7) if summary_of("found", number)["status"] == "pruned"]
    assert pruned and all(2 <= summary_of("found", number)["num_epochs"] < 4 for number in pruned)
    whole = [trial for trial in trials_of("found") if trial.state == TrialState.COMPLETE]
    best = min(whole, key=lambda trial: trial.value)
    assert json.loads(Path("found/report.json").read_text())["best_job"] == best.number
    assert capfd.readouterr().err == ""

    before = {number: Path(f"found/{number}/summary.json").stat().st_mtime_ns for number in range(7)}
    assert search(*words[:-1], "hydra.sweeper.n_trials=8", "sweep.resume=found", folder="other") == 0
    assert agrees("found") == list(range(8)) and not Path("other").exists()
    assert "\nbefore   " in capfd.readouterr().out
    assert before == {number: Path(f"found/{number}/summary.json").stat().st_mtime_ns for number in range(7)}


def kill_after(process, num_lines, *, all_of_it):
    """Kill the process at that many lines in the ledger. all_of_it: Also kill the jobs, which have separate sessions."""
    path = Path("found/ledger.jsonl")
    while process.poll() is None and not (path.exists() and path.read_bytes().count(b"\n") >= num_lines):
        time.sleep(0.003)
    if process.poll() is None:
        children = psutil.Process(process.pid).children(recursive=True) if all_of_it else []
        for pid in (process.pid, *(child.pid for child in children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.communicate()
    return process.returncode


def test_search_killed_repeatedly_completes(warm, own_folder):
    moments = random.Random(0)
    num_trials, num_lines, codes = 5, 0, []
    words = ["-m", *COMMON, *SHORT, "hydra.sweep.dir=found", f"hydra.sweeper.n_trials={num_trials}"]
    words += ["hydra.sweeper.startup_trials=2", "sweep.grace_seconds=10", "hydra.sweeper.metric=val/accuracy"]
    again = []
    for round_ in range(3):
        num_lines += moments.randint(2, 7)
        codes.append(kill_after(warm.command(own_folder, *words, *again), num_lines, all_of_it=round_ % 2 == 0))
        again = ["sweep.resume=last", "hydra.sweep.dir=found"]
        num_lines = Path("found/ledger.jsonl").read_bytes().count(b"\n")
    assert codes.count(-signal.SIGKILL) >= 2, codes
    last = warm.command(own_folder, *words, *again)
    output, _ = last.communicate()
    assert last.returncode == 0, output
    assert len(agrees("found")) == num_trials
    assert all(job.is_done for job in ledger.read(Path("found")).jobs.values())
    again = OmegaConf.load("found/0/rerun.yaml").train.early_stopping  # the metric decides which epoch is the best
    assert (again.metric, again.mode) == ("val/accuracy", "max")
    optimized = [state for _, state in events_of("found") if state in ("finished", "pruned", "failed")]
    assert len(optimized) == num_trials  # each ended once


def test_search_with_two_metrics_has_front(own_folder, capfd):
    metrics = "hydra.sweeper.metric=[val/loss,speed/samples_per_second]"
    assert search(*SHORT, metrics, "hydra.sweeper.sampler=nsga2", "hydra.sweeper.n_trials=2") == 0
    found = trials_of("found")
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 2
    for trial in found:
        summary = summary_of("found", trial.number)
        assert trial.values == [summary["best"]["value"], summary["metrics"]["speed/samples_per_second"]]
    output = capfd.readouterr().out
    assert "minimize val/loss, maximize speed/samples_per_second" in output and "none (pruning needs" in output


MISTAKES = {
    "settings": (
        [LR, "SAMPLER=tpee", "N_TRIALS=0", "SEED=-1", "BATCH=0", "WARMUP_EPOCHS=-1", "METRIC=null", "DIRECTION=up"],
        ["sampler=tpe", "n_trials=1", "seed=0", "batch=1", "warmup_epochs=1", "metric=val/loss", "direction=minimize"],
    ),
    "other settings": (
        [LR, "SAMPLER=annealing", "METRIC=[]", "N_TRIALS=many", "PRUNER=medain"],
        ["sampler=tpe", "metric=val/loss", "pruner=median"],
    ),
    "a metric's name, a grid of an interval": (
        [LR, "METRIC=accuracy", "SAMPLER=grid"],
        ["metric=val/accuracy", "optimizer.lr=0.001,0.01,0.1"],
    ),
    "a metric without rows, one number for cmaes": (
        ["model=mlp,cnn", LR, "METRIC=val/loss", "data.val_fraction=0", "SAMPLER=cmaes"],
        ["data.val_fraction=0.1", "sampler=tpe"],
    ),
    "a metric of the end, no number for cmaes": (
        ["model=mlp,cnn", "METRIC=test/loss", "PRUNER=median", "SAMPLER=cmaes"],
        ["pruner=none", "sampler=tpe"],
    ),
    "two metrics": (
        [LR, "METRIC=[val/loss,val/accuracy]", "DIRECTION=[minimize]", "PRUNER=median", "SAMPLER=cmaes"],
        ["direction=[minimize,maximize]", "pruner=none", "sampler=nsga2"],
    ),
    "nothing to search": (["seed=1"], ["optimizer.lr=tag(log,interval(1e-4,1e-1))"]),
    "whole numbers": (["train.batch_size=interval(8,64)"], ["train.batch_size=int(interval(8,64))"]),
    "params": ([LR, "PARAMS={seed:'range(1,x)'}"], ["hydra.sweeper.params: {seed: "]),
    "a swept setting": ([LR, "SAMPLER=tpe,random"], ["set hydra.sweeper.sampler to one value"]),
    # errors of the composed jobs
    "a job's key": ([LR, "train.num_epoch=3"], ["train.num_epochs=3"]),
    "values of jobs": (
        ["train.batch_size=16,-3", "train.ema_decay=interval(0.5,1)", "device=cpu,cuda:97"],
        ["train.batch_size=1", "train.ema_decay=0.999", "device=cpu"],
    ),
    "nothing to resume": ([LR, "sweep.resume=last"], ["remove sweep.resume"]),
}


@pytest.mark.parametrize(("words", "mends"), MISTAKES.values(), ids=MISTAKES)
def test_search_errors_come_before_writing(words, mends, own_folder, capfd):
    words = [
        re.sub(r"^(\+?)([A-Z_]+)=", lambda match: f"{match[1]}hydra.sweeper.{match[2].lower()}=", word)
        for word in words
    ]
    common = [word for word in COMMON if not any(word.split("=")[0] == other.split("=")[0] for other in words)]
    assert cli.main(["-m", *common, "hydra.sweep.dir=found", *words]) == 2
    error = capfd.readouterr().err.replace("`", "")
    fixes = [problem.split("error:")[0] for problem in error.split("help:")[1:]]
    assert all(any(mend in fix for fix in fixes) for mend in mends), error
    assert "Traceback" not in error and not list(own_folder.iterdir())


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (["hydra.sweeper.n_trials=4", "seed=1,2"], "hydra/sweeper=optuna hydra.sweeper.n_trials=4"),
        (["hydra/sweeper=optunaa", "seed=1,2"], "hydra/sweeper=optuna"),
        ([LR], f"hydra/sweeper=optuna '{LR}'"),
    ],
)
def test_interval_without_search_suggests_optuna(words, mend, own_folder, capfd):
    assert cli.main(["-m", *words]) == 2
    assert mend in capfd.readouterr().err and not list(own_folder.iterdir())


def test_search_without_packages_names_the_install(own_folder, capfd, monkeypatch):
    from runner.sweep.search import sweeper as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert search(LR, "train.batch_size=int(interval(8,64))", "hydra.sweeper.sampler=cmaes") == 2
    output = capfd.readouterr().err.replace("`", "")
    assert output.count(install("search")) == 2 and not list(own_folder.iterdir())
