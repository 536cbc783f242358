"""Grids: the launchers and sweepers that a sweep works with, and more seeds until the best configuration is decided."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from refused import problems_of

from runner import cli
from runner.config import compose
from runner.experiment.summary import Summary
from runner.sweep.grid import add_jobs, check, until_decided
from runner.sweep.hydra_plugins import part_problems
from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.report import build
from runner.tools.compare import compare
from runner.tracking.journal import Journal

LAUNCHERS = "use `hydra/launcher=slots`, `hydra/launcher=ray` or `hydra/launcher=slurm`"
SWEEPERS = "use `hydra/sweeper=grid` or `hydra/sweeper=optuna`"


def test_launchers_of_conf_are_accepted(own_folder):
    for launcher, sweeper in (("slots", "grid"), ("ray", "optuna"), ("slurm", "grid"), ("submitit_slurm", "optuna")):
        cfg = compose.composer([])([f"hydra/launcher={launcher}", f"hydra/sweeper={sweeper}"])
        assert not part_problems(cfg.hydra), (launcher, sweeper)


def test_other_launchers_and_sweepers_are_refused_together(own_folder, capfd):
    assert cli.main(["-m", "hydra/launcher=basic", "hydra/sweeper=basic", "seed=1,2"]) == 2
    error = capfd.readouterr().err
    sources = ("--> hydra/launcher=basic", "--> hydra/sweeper=basic")
    assert all(text in error for text in (*sources, f"help: {LAUNCHERS}", f"help: {SWEEPERS}"))
    joblib = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
    parts = {"launcher": {"_target_": joblib}, "sweeper": {"_target_": "runner.sweep.Grid"}}
    (problem,) = part_problems(OmegaConf.create(parts))
    assert (problem.source, problem.help) == (f"hydra.launcher._target_={joblib}", LAUNCHERS)


OTHER = """
from dataclasses import replace
from runner.sweep import Slots

class Mine(Slots):
    def open(self, *given):
        return replace(super().open(*given), words="a queue of another package")
"""


@pytest.mark.slow
def test_launcher_of_another_package_runs_jobs(own_folder, warm_jobs, monkeypatch, capfd):
    site = own_folder / "site/other-1.0.dist-info"
    site.mkdir(parents=True)
    (own_folder / "site/other_launchers.py").write_text(OTHER)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(own_folder / "site"))
    monkeypatch.setenv("RUNNER_ALLOW", "other_launchers")
    command = ["-m", "hydra.launcher._target_=other_launchers.Mine", "model=linear,mlp", "data=iris", "device=cpu"]
    command += ["train.num_steps=1", "tracking.enabled=false", "task.plots=false"]
    assert cli.main(command) == 2  # its package doesn't name it as a launcher
    (site / "entry_points.txt").write_text("[runner.launchers]\nmine = other_launchers:Mine\n")
    assert cli.main(command) == 0
    assert "slots    a queue of another package" in capfd.readouterr().out


MLP, CNN = ("model=mlp", "train.num_epochs=1"), ("model=cnn", "train.num_epochs=1")
ADDED = "until:  6 more seeds of each, {} jobs"
BETTER = "until:  {} seeds: model=cnn compared with model=mlp: better"


def noise(seed, of=0):
    return float(np.random.default_rng([seed, of]).normal())


def clearly(model, seed):
    return noise(seed) * 0.1 + (model == "mlp")


class Made:
    """A sweep whose jobs' results are a function of their overrides and seed."""

    def __init__(self, folder, value, *, max_seeds=32, seeds=(0, 1), folds=((),)):
        self.value, self.said, self.folder = value, [], folder
        jobs = [((*own, *fold, f"seed={seed}"), "") for own in (MLP, CNN) for fold in folds for seed in seeds]
        self.sweep = Sweep(folder, "0" * 32, 0, ("model=mlp,cnn",))
        self.ledger = Ledger(folder)
        self.ledger.begin(self.sweep)
        config = OmegaConf.create({"sweep": {"max_seeds": max_seeds, "until": "decided"}})
        functions = {"in_groups": list, "say": self.said.append, "prepare": self.prepare}
        self.context = SimpleNamespace(sweep=self.sweep, ledger=self.ledger, config=config, prepared=[], **functions)
        for number, (overrides, name) in enumerate(jobs):
            self.sweep.jobs[number] = Job(number, overrides, name)
            self.context.prepared.append(self.prepare(self.sweep.jobs[number]))
        self.begin()

    def begin(self):
        self.source = until_decided(self.context, [(job.overrides, "") for job in self.sweep.jobs.values()])

    def prepare(self, job):
        job.folder_name = str(job.number)
        return PreparedJob(job, None)

    def run(self):
        """Run all jobs, one after the other. Returns the number of seeds of each configuration."""
        while (prepared := self.source.next(0)) is not None:
            job = prepared.job
            keys = dict(text.split("=") for text in job.overrides)
            value = self.value(keys["model"], int(keys["seed"]))
            job.state = "finished" if value is not None else "failed"
            best = {"metric": "val/loss", "mode": "min", "value": value, "step": 1}
            folder = self.folder / job.folder_name
            folder.mkdir()
            (folder / "summary.json").write_text(json.dumps({"status": job.state, "best": best, "num_steps": 1}))
            self.ledger.plan(job)
            self.ledger.note(job)
            self.source.ended(job, Summary())
        self.ledger.close()
        return [sum(own <= set(job.overrides) for job in self.sweep.jobs.values()) for own in ({MLP[0]}, {CNN[0]})]


@pytest.mark.parametrize(
    ("folds", "seeds", "max_seeds", "counts", "lines"),
    [
        (3, (0, 1), 32, [24, 24], [ADDED.format(36), BETTER.format(8)]),
        (1, range(12), 8, [12, 12], [BETTER.format(12)]),  # more seeds than it may add: one look
    ],
)
def test_clear_difference_ends_at_the_first_look(tmp_path, folds, seeds, max_seeds, counts, lines):
    each = [(f"data.fold={fold}",) for fold in range(folds)] if folds > 1 else [()]
    made = Made(tmp_path, clearly, folds=each, seeds=seeds, max_seeds=max_seeds)
    assert (made.run(), made.said) == (counts, lines)
    assert build.write(tmp_path).winner == "model=cnn"


def test_small_difference_takes_more_equal_seeds(tmp_path):
    made = Made(
        tmp_path, lambda model, seed: clearly(model, seed) * 0.8 + noise(seed) + 0.7 * noise(seed, 1 + (model == "mlp"))
    )
    assert made.run() == [32, 32]
    seeds = [
        {text for job in made.sweep.jobs.values() if own in job.overrides for text in job.overrides if "seed" in text}
        for own in (MLP[0], CNN[0])
    ]
    assert seeds[0] == seeds[1]
    assert "undecided: about" in made.said[1] and made.said[-1].endswith("better")


def test_without_a_difference_it_gives_up(tmp_path):
    made = Made(tmp_path, lambda model, seed: noise(seed, model == "mlp"), max_seeds=16)
    assert made.run() == [16, 16]
    assert made.said[-1] == "until:  undecided with 16 seeds of each, as many as it may be"
    assert made.source.next(0) is None and sum("undecided with" in line for line in made.said) == 1  # printed once
    assert build.write(tmp_path).winner is None


def test_configuration_that_always_fails_ends_it(tmp_path):
    made = Made(tmp_path, lambda model, seed: None if model == "mlp" else 0.5)
    assert made.run() == [8, 8]
    assert "no two configurations have a value to compare" in made.said[-1]


def test_skipped_configurations_get_no_more_seeds(tmp_path):
    made = Made(tmp_path / "some", clearly)
    for number, own in ((4, MLP), (5, CNN)):
        overrides = ("device=cuda:0", *own, "seed=0")
        made.sweep.jobs[number] = Job(number, overrides, "", state="skipped", folder_name=str(number))
        made.ledger.plan(made.sweep.jobs[number])
        made.ledger.note(made.sweep.jobs[number])
    made.begin()
    assert made.run() == [9, 9]  # including the skipped one
    assert made.said[-1] == BETTER.format(8)
    made = Made(tmp_path / "others", clearly)
    for job in list(made.sweep.jobs.values()):
        job.state = "skipped" if MLP[0] in job.overrides else job.state
    made.context.prepared[:] = [each for each in made.context.prepared if each.job.state != "skipped"]
    made.begin()
    assert (made.run(), made.said) == ([2, 2], ["until:  nothing to decide: all but one were skipped"])


def test_compare_and_report_are_as_sure_as_the_sweep(tmp_path):
    """Eight pairs with two small opposite ones: significant for one analysis, but not for one of four."""
    values = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1, -0.1]
    made = Made(tmp_path, lambda model, seed: values[seed] * (model == "mlp"), max_seeds=8, seeds=range(8))
    assert made.run() == [8, 8]
    assert build.write(tmp_path).winner == "model=cnn"
    with Ledger(tmp_path) as book:  # resumed with a higher maximum
        book.note_max_seeds(64)
    assert build.write(tmp_path).winner is None
    for names in ([str(tmp_path)], [f"{tmp_path}:model=cnn", f"{tmp_path}:model=mlp"]):
        assert [each.verdict for each in compare(names)] == ["undecided"]


def test_equal_configurations_seldom_get_a_winner(tmp_path, monkeypatch):
    """The three analyses together, each of which may name a winner."""
    monkeypatch.setattr("runner.sweep.report.significance.DRAWS", 200)
    wins = 0
    for number in range(12):
        made = Made(tmp_path / str(number), lambda model, seed, at=2 * number: noise(seed, (model == "mlp") + at))
        made.run()
        wins += made.said[-1].endswith("better")
    assert wins <= 2  # with a probability of one in twenty, more than 2 of 12 occur in 1 of 50 trials


@pytest.mark.parametrize("what", ["the same as another's", "a run's"])
def test_add_jobs_in_used_directory_raises(tmp_path, what, messages):
    made = Made(tmp_path, lambda model, seed: 0.5)
    if what == "a run's":
        with Journal(tmp_path / "5") as journal:
            journal.event("start", uid="1")
    else:
        made.context.prepare = lambda job: setattr(job, "folder_name", job.overrides[0]) or PreparedJob(job, None)
    before = made.ledger.path.read_text()
    messages(problems_of(add_jobs, made.context, [(*MLP, "seed=2"), (*MLP, "seed=3")], {"seed"}))
    assert made.ledger.path.read_text() == before
    made.ledger.close()


@pytest.mark.parametrize(
    ("jobs", "max_seeds"),
    [
        ([(("seed=1",), ""), (("seed=2",), "")], 32),
        ([(("data.fold=0",), ""), (("data.fold=1",), "")], 32),
        ([(("model=mlp",), ""), (("model=cnn",), "")], 5),
    ],
)
def test_until_with_nothing_to_decide_raises(jobs, max_seeds, messages):
    messages(problems_of(check, jobs, OmegaConf.create({"max_seeds": max_seeds})))


@pytest.mark.slow
def test_stopped_sweep_resumes_with_the_added_seeds(own_folder, warm_jobs, capsys):
    arguments = ["-m", "model=linear,mlp", "data=iris", "seed=0,1", "sweep.until=decided", "sweep.max_seeds=8"]
    arguments += ["optimizer.lr=0.01", "train.num_epochs=2", "tracking.enabled=false", "tracking.log_model=false"]
    arguments += ["task.plots=false", "hydra.sweep.dir=s"]
    better = "until:  8 seeds: model=mlp compared with model=linear: better"
    assert cli.main(arguments) == 0
    assert better in capsys.readouterr().out
    ledger = own_folder / "s" / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    first_added = next(at for at, line in enumerate(lines) if '"kind": "job"' in line and "seed=2" in line)
    begun = [at for at, line in enumerate(lines) if at > first_added and '"state": "running"' in line][3]
    ledger.write_text("\n".join(lines[: begun + 1]) + "\n")  # like after a kill in the middle of the fourth added job
    assert cli.main([*arguments, "sweep.resume=s"]) == 0
    text = capsys.readouterr().out
    assert better in text and "more seeds" not in text
    report = json.loads((own_folder / "s" / "report.json").read_text())
    assert (report["counts"], report["winner"]) == ({"finished": 16}, "model=mlp")
