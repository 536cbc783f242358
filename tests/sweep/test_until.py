"""More seeds until the best configuration is decided: the added seeds, the end, and the state after a kill."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from refused import problems_of

from runner import cli
from runner.experiment.summary import Summary
from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.report import build
from runner.sweep.report.comparisons import looks
from runner.sweep.until import add_jobs, check, until_decided
from runner.tools.compare import compare
from runner.tracking.journal import Journal

MLP, CNN = ("model=mlp", "train.num_epochs=1"), ("model=cnn", "train.num_epochs=1")


def noise(seed, of=0):
    return float(np.random.default_rng([seed, of]).normal())


class Made:
    """A sweep whose jobs' results are a function of their overrides and seed."""

    def __init__(self, folder, value, *, max_seeds=32, seeds=(0, 1), folds=((),)):
        self.value, self.said, self.folder = value, [], folder
        jobs = [((*words, *fold, f"seed={seed}"), "") for words in (MLP, CNN) for fold in folds for seed in seeds]
        self.sweep = Sweep(folder, "0" * 32, 0, ("model=mlp,cnn",))
        self.ledger = Ledger(folder)
        self.ledger.begin(self.sweep)
        config = OmegaConf.create({"sweep": {"max_seeds": max_seeds, "until": "decided"}})
        self.context = SimpleNamespace(
            in_groups=list,
            sweep=self.sweep,
            ledger=self.ledger,
            config=config,
            say=self.said.append,
            prepare=self.prepare,
            prepared=[],
        )
        for number, (overrides, name) in enumerate(jobs):
            self.sweep.jobs[number] = Job(number, overrides, name)
            self.context.prepared.append(self.prepare(self.sweep.jobs[number]))
        self.source = until_decided(self.context, jobs)

    def prepare(self, job):
        job.folder_name = str(job.number)
        return PreparedJob(job, None)

    def run(self):
        """Run all jobs, one after the other. Returns the number of seeds of each configuration."""
        while (prepared := self.source.next(0)) is not None:
            job = prepared.job
            words = dict(word.split("=") for word in job.overrides)
            value = self.value(words["model"], int(words["seed"]))
            job.state = "finished" if value is not None else "failed"
            best = {"metric": "val/loss", "mode": "min", "value": value, "step": 1}
            (self.folder / job.folder_name).mkdir()
            (self.folder / job.folder_name / "summary.json").write_text(
                json.dumps({"status": job.state, "best": best, "num_steps": 1})
            )
            self.ledger.plan(job)
            self.ledger.note(job)
            self.source.ended(job, Summary())
        self.ledger.close()
        return [sum(words <= set(job.overrides) for job in self.sweep.jobs.values()) for words in ({MLP[0]}, {CNN[0]})]


def test_it_looks_at_numbers_of_seeds_that_are_known_before():
    assert [looks(size) for size in (5, 8, 9, 16, 20, 64)] == [[8], [8], [8, 9], [8, 16], [8, 16, 20], [8, 16, 32, 64]]


def test_a_clear_difference_ends_at_the_first_look(tmp_path):
    made = Made(tmp_path, lambda model, seed: noise(seed) * 0.1 + (model == "mlp"))
    assert made.run() == [8, 8]
    assert made.said == [
        "until:  6 more seeds of each, 12 jobs",
        "until:  8 seeds: model=cnn compared with model=mlp: better",
    ]
    assert build.write(tmp_path).winner == "model=cnn"


def test_more_seeds_come_in_all_folds(tmp_path):
    folds = [(f"data.fold={fold}",) for fold in range(3)]
    made = Made(tmp_path, lambda model, seed: noise(seed) * 0.1 + (model == "mlp"), folds=folds)
    assert made.run() == [24, 24]
    assert made.said == [
        "until:  6 more seeds of each, 36 jobs",
        "until:  8 seeds: model=cnn compared with model=mlp: better",
    ]
    assert build.write(tmp_path).winner == "model=cnn"


def test_a_small_difference_takes_more_and_each_configuration_gets_the_same_seeds(tmp_path):
    made = Made(
        tmp_path, lambda model, seed: noise(seed) + 0.7 * noise(seed, 1 + (model == "mlp")) + 0.8 * (model == "mlp")
    )
    assert made.run() in ([16, 16], [32, 32])
    by_model = [
        {
            word
            for job in made.sweep.jobs.values()
            if words <= set(job.overrides)
            for word in job.overrides
            if "seed" in word
        }
        for words in ({MLP[0]}, {CNN[0]})
    ]
    assert by_model[0] == by_model[1]
    assert "undecided: about" in made.said[1] and made.said[-1].endswith("better")


def test_without_a_difference_it_gives_up_and_says_so(tmp_path):
    made = Made(tmp_path, lambda model, seed: noise(seed, model == "mlp"), max_seeds=16)
    assert made.run() == [16, 16]
    assert made.said[-1] == "until:  undecided with 16 seeds of each, as many as it may be"
    assert made.source.next(0) is None and sum("undecided with" in line for line in made.said) == 1  # printed once
    assert build.write(tmp_path).winner is None


def test_with_more_seeds_than_it_may_add_it_looks_once(tmp_path):
    made = Made(tmp_path, lambda model, seed: noise(seed) * 0.1 + (model == "mlp"), max_seeds=8, seeds=range(12))
    assert made.run() == [12, 12]
    assert made.said == ["until:  12 seeds: model=cnn compared with model=mlp: better"]


def test_where_one_configuration_always_fails_nothing_is_added_for_ever(tmp_path):
    made = Made(tmp_path, lambda model, seed: None if model == "mlp" else 0.5)
    assert made.run() == [8, 8]
    assert "no two configurations have a value to compare" in made.said[-1]


def test_a_configuration_whose_device_is_missing_gets_no_more_seeds(tmp_path):
    made = Made(tmp_path, lambda model, seed: noise(seed) * 0.1 + (model == "mlp"))
    for number, words in ((4, ("device=cuda:0", *MLP)), (5, ("device=cuda:0", *CNN))):
        made.sweep.jobs[number] = Job(number, (*words, "seed=0"), "", state="skipped", folder_name=str(number))
        made.ledger.plan(made.sweep.jobs[number])
        made.ledger.note(made.sweep.jobs[number])
    jobs = [(job.overrides, "") for job in made.sweep.jobs.values()]
    made.source = until_decided(made.context, jobs)
    assert made.run() == [9, 9]  # including the skipped one
    assert made.said[-1] == "until:  8 seeds: model=cnn compared with model=mlp: better"


def test_where_all_others_are_skipped_there_is_nothing_to_decide(tmp_path):
    made = Made(tmp_path, lambda model, seed: 0.5)
    for job in list(made.sweep.jobs.values()):
        if set(MLP) <= set(job.overrides):
            job.state = "skipped"
    made.context.prepared[:] = [each for each in made.context.prepared if each.job.state != "skipped"]
    made.source = until_decided(made.context, [(job.overrides, "") for job in made.sweep.jobs.values()])
    assert made.run() == [2, 2]
    assert made.said == ["until:  nothing to decide: all but one were skipped"]


def test_compare_and_the_report_are_as_sure_as_the_sweep_had_to_be(tmp_path):
    """Eight pairs with two small opposite ones: significant for one analysis, but not for one of four."""
    values = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1, -0.1]
    made = Made(tmp_path, lambda model, seed: values[seed] * (model == "mlp"), max_seeds=8, seeds=range(8))
    assert made.run() == [8, 8]
    assert build.write(tmp_path).winner == "model=cnn"
    with Ledger(tmp_path) as book:  # resumed with a higher maximum
        book.note_max_seeds(64)
    assert build.write(tmp_path).winner is None
    for words in ([str(tmp_path)], [f"{tmp_path}:model=cnn", f"{tmp_path}:model=mlp"]):
        assert [each.verdict for each in compare(words)] == ["undecided"]


def test_equal_configurations_get_a_winner_in_one_sweep_of_twenty_at_most(tmp_path, monkeypatch):
    """The three analyses together, each of which may name a winner."""
    monkeypatch.setattr("runner.sweep.report.significance.DRAWS", 200)
    wins = 0
    for number in range(40):
        (tmp_path / str(number)).mkdir()
        made = Made(
            tmp_path / str(number),
            lambda model, seed, number=number: noise(seed, (number, model == "mlp")[1] + 2 * number),
        )
        made.run()
        wins += made.said[-1].endswith("better")
    assert wins <= 5  # of 40; with a probability of one in twenty, more than 5 occur in 1 of 70 trials


@pytest.mark.parametrize("what", ["the same as another's", "a run's"])
def test_seeds_whose_folders_are_others_are_not_noted(tmp_path, what, messages):
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
def test_what_can_not_be_decided_is_refused(jobs, max_seeds, messages):
    messages(problems_of(check, jobs, OmegaConf.create({"max_seeds": max_seeds})))


@pytest.mark.slow
def test_a_sweep_that_is_stopped_among_the_added_seeds_goes_on_with_them(own_folder, warm_jobs, capsys):
    words = [
        "-m",
        "model=linear,mlp",
        "data=iris",
        "seed=0,1",
        "sweep.until=decided",
        "sweep.max_seeds=8",
        "optimizer.lr=0.01",
    ]
    words += [
        "train.num_epochs=2",
        "tracking.enabled=false",
        "tracking.log_model=false",
        "task.plots=false",
        "hydra.sweep.dir=s",
    ]
    assert cli.main(words) == 0
    assert "until:  8 seeds: model=mlp compared with model=linear: better" in capsys.readouterr().out
    ledger = own_folder / "s" / "ledger.jsonl"
    lines = ledger.read_text().splitlines()
    first_added = next(at for at, line in enumerate(lines) if '"kind": "job"' in line and "seed=2" in line)
    begun = [at for at, line in enumerate(lines) if at > first_added and '"state": "running"' in line][3]
    ledger.write_text("\n".join(lines[: begun + 1]) + "\n")  # like after a kill in the middle of the fourth added job
    assert cli.main([*words[:-1], "hydra.sweep.dir=s", "sweep.resume=s"]) == 0
    said = capsys.readouterr().out
    assert "until:  8 seeds: model=mlp compared with model=linear: better" in said and "more seeds" not in said
    report = json.loads((own_folder / "s" / "report.json").read_text())
    assert (report["counts"], report["winner"]) == ({"finished": 16}, "model=mlp")
