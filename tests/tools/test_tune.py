"""tune: the settings that are tried or refused, the ones that win or lose, and the file that it writes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from refused import problems_of
from torch.utils.data import DataLoader, TensorDataset

from runner import run as run_experiment
from runner.config.compose import composed_with, composer
from runner.data.loading.own_loader import OwnLoader
from runner.device import backends
from runner.errors import Problem, RunnerError
from runner.experiment.build import prepare
from runner.experiment.build_data import prepare_data
from runner.tools.tune import measure, tune
from runner.tools.tune.measure import LOST_TURNS, MAX_TURNS, MIN_TURNS, SpeedComparison, compare, difference, is_same
from runner.tools.tune.tune import TuneOption, in_words, options, with_settings

COMMON = ["device=cpu", "data.limit=400", "train.batch_size=32", "train.num_epochs=1"]
WORDS = [*COMMON, "model=mlp", "model.hidden_sizes=[8]"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))


def cfg_of(*words):
    return composed_with(composer([]), [*(COMMON if words and words[0].startswith("model=") else WORDS), *words])


def options_of(*words, with_precision=False):
    cfg = cfg_of(*words)
    parts = prepare(cfg, torch.device("cpu"))
    return {option.name: option for option in options(cfg, parts, with_precision=with_precision)}


def test_what_may_win_is_tried():
    found = options_of(with_precision=True)
    assert found["train.precision"].tries == ({"train.precision": "bf16"},)
    assert found["train.compile"].tries == ({"train.compile": True},)
    halves = ({"train.batch_size": 16, "train.accumulate_steps": 2}, {"train.batch_size": 8, "train.accumulate_steps": 4})  # fmt: skip
    assert found["train.accumulate_steps"].tries == halves
    assert options_of("train.compile=true")["train.compile"].tries == ({"train.compile": False},)
    assert options_of("data.residency=stream")["data.residency"].tries == ({"data.residency": "auto"},)


@pytest.mark.parametrize(
    ("words", "name", "why"),
    [
        ([], "train.precision", "--precision"),
        ([], "data.residency", "on the device"),
        (["placement.guard=always"], "train.compile", "single operations"),
        (["model=cnn"], "train.accumulate_steps", "batch norm"),
        (["model.dropout=0.1"], "train.compile", "dropout"),
        (["model=gru", "data=synthetic", "data.shape=[2,20]", "data.num_rows=64"], "train.compile", "recurrent"),
    ],
)
def test_tune_skips_and_reports_hopeless_settings(words, name, why):
    option = options_of(*words)[name]
    assert not option.tries and why in option.why_not


def test_custom_stream_gets_no_worker_proposal():
    cfg = cfg_of()
    parts = prepare(cfg, torch.device("cpu"))
    own = OwnLoader(DataLoader(TensorDataset(torch.ones(8, 1))), setting="data=mine")
    found = options(cfg, replace(parts, splits=replace(parts.splits, train=own)), with_precision=False)
    (option,) = [each for each in found if each.name == "data.num_workers"]
    assert not option.tries and "your own stream" in option.why_not


def test_tuned_numbers_equal_up_to_rounding():
    losses = np.linspace(2, 1, 50)
    assert difference(losses, losses * 1.01) == pytest.approx(0.01)
    assert is_same(losses, losses * (1 + 1e-6), precision="fp32")
    assert is_same(losses, np.r_[losses[:5], losses[5:] * 1.01], precision="fp32")  # rounding differences grow
    assert not is_same(losses, losses * 1.01, precision="fp32")
    assert is_same(losses, losses * 1.01, precision="bf16")


@pytest.mark.parametrize(
    ("ratios", "num_turns", "is_faster"),
    [
        ([0.9] * MAX_TURNS, MAX_TURNS, True),
        ([0.9] * 9 + [1.1] * 3, MAX_TURNS, True),
        ([0.9] * 8 + [1.1] * 4, MAX_TURNS, False),
        ([0.99] * MAX_TURNS, MAX_TURNS, False),
        ([1.01] * MAX_TURNS, LOST_TURNS, False),
    ],
)
def test_a_gain_is_beyond_noise_or_none(ratios, num_turns, is_faster):
    def taking(*seconds):
        left = iter(seconds)
        return SimpleNamespace(seconds_a_step=lambda _: next(left))

    found = compare(taking(*[1.0] * MAX_TURNS), taking(*ratios), seconds=60.0)
    assert len(found.ratios) == num_turns and found.is_faster is is_faster


def test_long_steps_get_fewer_turns():
    slow = [SimpleNamespace(seconds_a_step=lambda _, ratio=ratio: ratio) for ratio in (1.0, 0.97)]
    assert len(compare(*slow, seconds=-1.0).ratios) == MIN_TURNS  # the time is over


def test_tune_candidates_have_same_first_losses(monkeypatch):
    cfg, threads = cfg_of(), []
    monkeypatch.setattr(backends, "use_in_thread", threads.append)
    data = prepare_data(cfg, torch.device("cpu"))
    one, other = (measure.Candidate(cfg, torch.device("cpu"), read=data) for _ in range(2))
    try:
        assert one.parts.source is other.parts.source is data.source
        other.seconds_a_step(0.05)
        assert measure.MIN_FIRST_STEPS <= len(one.losses) <= len(other.losses) == measure.NUM_LOSSES
        assert np.array_equal(one.losses, other.losses[: len(one.losses)])
        assert difference(one.losses, other.losses) == 0
        assert threads == [torch.device("cpu")] * 2
    finally:
        one.close()
        other.close()


def test_tune_schedule_at_end_keeps_last_rate():
    Path("conf/scheduler").mkdir(parents=True)
    Path("conf/scheduler/one.yaml").write_text(
        "_target_: torch.optim.lr_scheduler.OneCycleLR\n_partial_: true\nmax_lr: 0.01\ntotal_steps: ${facts.num_steps}\n"
    )
    cfg = cfg_of("scheduler=one", "train.num_epochs=3", "train.batch_size=200")
    found = measure.Candidate(cfg, torch.device("cpu"), read=prepare_data(cfg, torch.device("cpu")))
    try:
        found.seconds_a_step(0.0)
        schedule, num_steps = found.parts.schedule.scheduler, found.parts.limits.num_steps
        assert len(found.losses) > num_steps == schedule.last_epoch
        assert found.parts.optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    finally:
        found.close()


class Fake:
    """A run whose step takes 1 s times the factor of each setting."""

    open = 0

    def __init__(self, cfg, device, *, read):
        factors = {"a": cfg.a, "b": cfg.b}
        if "refused" in factors.values():
            raise RunnerError(Problem("a", "it goes with nothing", "b"))
        self.time = float(np.prod([float(value) for value in factors.values()]))
        self.step_seconds, self.setup_seconds, self.threads = self.time, 1.0, 2
        if cfg.train.compile:
            self.time, self.setup_seconds = self.time * 0.5, cfg.compiling
        precision = cfg.train.precision
        if precision != "fp32":
            self.time *= 0.5
        self.losses = np.full(50, 1.0 if cfg.b == 0.25 else 2.0 if precision == "fp32" else 2.1)
        self.parts = SimpleNamespace(limits=SimpleNamespace(num_steps=100), precision=SimpleNamespace(name=precision))
        Fake.open += 1

    def close(self):
        Fake.open -= 1


def as_fast(one, other, *, seconds):
    return SpeedComparison((other.time / one.time,) * MAX_TURNS, other.time)


@pytest.fixture
def search(monkeypatch):
    monkeypatch.setattr(tune, "Candidate", Fake)
    monkeypatch.setattr(tune, "compare", as_fast)
    monkeypatch.setattr(tune, "prepare_data", lambda cfg, device: prepare_data(cfg_of(), device))
    cfg = OmegaConf.create({"a": 1, "b": 1, "compiling": 10.0, "train": {"compile": False, "precision": "fp32"}})
    made = tune.TuneSearch(cfg, torch.device("cpu"), seconds=60.0)
    yield made
    made.close()
    assert Fake.open == 0


def outcomes(search):
    return {in_words(row.settings): row.outcome.partition(":")[0] for row in search.rows}


def test_tune_winner_is_kept_for_next_try(search):
    search.take(TuneOption("a", ({"a": 0.5}, {"a": 0.4}, {"a": 0.9})))
    search.take(TuneOption("b", ({"b": 2.0}, {"b": 0.25}, {"b": "refused"})))
    search.take(TuneOption("c", why_not="it can't win"))
    search.confirm()
    assert outcomes(search) == {"a=0.5": "wins", "a=0.4": "wins", "a=0.9": "slower", "b=2.0": "slower", "b=0.25": "other numbers", "b=refused": "refused", "c=": "not tried"}  # fmt: skip
    assert search.settings == {"a": 0.4} and search.ratio == pytest.approx(0.4)
    assert {in_words(row.settings): row.ratio for row in search.rows}["b=2.0"] == pytest.approx(0.8)


def test_tune_reference_is_winning_precision(search):
    search.take(TuneOption("train.precision", ({"train.precision": "bf16"},)))
    search.take(TuneOption("b", ({"b": 0.25}, {"b": 0.5})))
    assert outcomes(search) == {"train.precision=bf16": "wins", "b=0.25": "other numbers", "b=0.5": "wins"}
    assert search.settings == {"train.precision": "bf16", "b": 0.5}


def test_tune_rejects_loser_and_what_is_late(search, monkeypatch):
    search.take(TuneOption("a", ({"a": 0.5},)))
    monkeypatch.setattr(tune, "compare", lambda one, other, *, seconds: SpeedComparison((1.01,) * MAX_TURNS, 1.0))
    search.confirm()
    assert search.settings == {} and search.ratio == 1.0
    assert search.rows[-1].outcome.startswith("at the end no faster")
    search.seconds = search._end = 0.0
    search.take(TuneOption("b", ({"b": 0.5},)))
    assert search.settings == {} and "--seconds" in search.rows[-1].outcome


@pytest.mark.parametrize(
    ("first", "compiling", "outcome"),
    [
        (1.0, 10.0, "wins"),
        (1.0, 60.0, "too short a run: 60 s of compiling are not won back"),
        (0.2, 15.0, "too short a run: 15 s of compiling are not won back"),  # 20 s would become 15 + 10 s
        (0.1, 10.0, "not tried: it takes 8 s or more, and the run's steps take 10.0 s"),
    ],
)
def test_tune_compilation_counts_its_own_time(search, first, compiling, outcome):
    if first < 1:
        search.take(TuneOption("a", ({"a": first},)))
    search.cfg.compiling = compiling
    search.take(TuneOption("train.compile", ({"train.compile": True},)))
    assert search.rows[-1].outcome == outcome
    assert ("train.compile" in search.settings) is (outcome == "wins")


def test_tune_refuses_run_that_does_not_fit(search, monkeypatch, messages):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tune, "Candidate", fail)
    messages(problems_of(tune.TuneSearch, search.cfg, torch.device("cpu"), seconds=1.0))


def test_tune_file_is_overlay_with_command(run, monkeypatch):
    monkeypatch.setattr(measure, "MAX_FIRST_SECONDS", 0.0)  # its losses include those of later steps
    Path("conf").mkdir()
    code, out, err = run("tune", *WORDS, "--seconds", "0.5", "--name", "mine", "--json")
    assert code == 0, err
    found = json.loads(out)
    lines = Path("conf/tuned/mine.yaml").read_text().splitlines()
    assert lines[1] == f"# {found['use']}" and lines[1].endswith("tuned=mine")
    assert "as it is" in err and "takes " in err and "not tried" in err
    assert found["losses_compared"] > 0 and found["losses_differ_by"] < 1e-3
    cfg = cfg_of("tuned=mine")
    assert with_settings(cfg, found["settings"]) == cfg
    summary = run_experiment([*WORDS, "tuned=mine", "tracking.enabled=false", "hydra.run.dir=run"])
    assert summary["status"] == "finished"


@pytest.mark.timeout(300)  # a closed run reports no more losses, and waiting for them would never end
def test_tune_command_keeps_users_file(run, monkeypatch):
    monkeypatch.setattr(measure, "MAX_FIRST_SECONDS", 0.0)
    Path("mine").mkdir()
    Path("mine/big.yaml").write_text("defaults: [config, {override model: mlp}, _self_]\nmodel: {hidden_sizes: [8]}\n")
    words = ["tune", "-cd", "mine", "-cn", "big", *COMMON, "--seconds", "0.001"]
    for _ in range(2):  # the second call replaces its file
        code, out, err = run(*words, "--name", "own", "--json")
        assert code == 0, err
        found = json.loads(out)  # also without time, the losses are compared
        assert found["settings"] == {} and found["losses_compared"] >= measure.MIN_FIRST_STEPS
        assert json.loads(out)["use"].startswith("python -m runner -cd mine -cn big device=cpu ")
    Path("conf/tuned/own.yaml").write_text("# @package _global_\n")
    code, _, err = run(*words, "--name", "own")
    assert code == 2 and "did not write it" in err and "--name own_2" in err
    assert Path("conf/tuned/own.yaml").read_text() == "# @package _global_\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.num_processes=2"], "train.num_processes=1"),
        (["--name", "a/b"], "--name fast"),
        (["--seconds", "0"], "--seconds 30"),
    ],
)
def test_a_mistake_says_what_to_write(words, said, run):
    code, _, err = run("tune", *WORDS, *words)
    assert code == 2 and said in err
    assert not Path("conf").exists()
