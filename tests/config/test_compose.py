"""Hydra's two compositions of a run are one, and the same."""

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, OmegaConf

from runner import cli
from runner.cli.check_first import CheckFirst, check
from runner.config import compose
from runner.errors import RunnerError

QUIET = ["hydra.run.dir=run", "hydra.output_subdir=null", "hydra/job_logging=none"]


@pytest.fixture
def composed(monkeypatch, own_folder):
    """What `python -m runner WORDS` hands to a job, all of Hydra's own with it; `calls` are the compositions for that."""
    monkeypatch.setattr(CheckFirst, "on_run_start", lambda self, config, **more: None)
    monkeypatch.setattr(CheckFirst, "on_multirun_start", lambda self, config, **more: None)
    calls = []

    def counted(loader, *settings, **more):
        calls.append(settings)
        return load(loader, *settings, **more)

    load = compose._load
    monkeypatch.setattr(compose, "_load", counted)

    def of(words):
        taken = []

        @hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")
        def job(cfg):
            taken.append((OmegaConf.to_container(cfg), OmegaConf.to_container(HydraConfig.get())))

        calls.clear()
        with compose.hydra_session(["runner", *words]):
            job()
        return taken

    of.calls = calls
    return of


@pytest.mark.parametrize(
    "words", [["seed=3", "model=mlp", "+optimizer.x=1"], ["hydra.mode=RUN", "hydra.job.name=other"]]
)
def test_what_is_composed_once_is_what_hydra_composes(composed, monkeypatch, words):
    (ours,) = composed([*words, *QUIET])
    count = len(composed.calls)
    monkeypatch.setattr(compose._Once, "mode", lambda self, *settings, **more: compose._mode(*settings, **more))
    (hydras,) = composed([*words, *QUIET])
    assert ours == hydras
    assert (count, len(composed.calls)) == (2 if "hydra.mode=RUN" in words else 1, 2)


def test_a_mistake_and_what_is_refused_are_composed_once(composed, own_folder):
    load, mode = ConfigLoaderImpl.load_configuration, Hydra.get_mode
    with pytest.raises(Exception, match="seedd"):
        composed(["seedd=3"])
    assert len(composed.calls) == 1
    (own_folder / "mine.yaml").write_text(
        "defaults: [config, _self_]\nhydra: {callbacks: {x: {_target_: os.makedirs}}}\n"
    )
    with pytest.raises(RunnerError, match="makedirs"):
        composed(["-cd", ".", "-cn", "mine"])
    assert len(composed.calls) == 1
    assert (ConfigLoaderImpl.load_configuration, Hydra.get_mode) == (load, mode)


def test_a_file_that_asks_for_a_sweep_over_what_the_words_leave_open_gets_one(composed, own_folder):
    """The mode is asked for in a composition that takes values with commas, and defaults without a value."""
    (own_folder / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {mode: MULTIRUN}\n")
    quiet = ["hydra.sweep.dir=sweep", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    taken = composed(["-cd", ".", "-cn", "mine", "hydra/launcher=basic", "hydra/sweeper=basic", "seed=1,2", *quiet])
    assert [cfg["seed"] for cfg, _ in taken] == [1, 2]


@pytest.mark.parametrize(("words", "count"), [(["seedd=3"], 2), (["seed=3", "modle=mlp"], 4)])  # with a group's options
def test_what_failed_is_not_composed_again_to_be_explained(composed, words, count, capfd):
    assert cli.main(words) == 2
    assert "help: " in capfd.readouterr().err
    assert len(composed.calls) == count


EXPERIMENTS = {
    "slurm": "defaults: [override /hydra/launcher: slurm]\nhydra: {launcher: {partition: gpu}}\n",
    "search": "defaults: [override /hydra/sweeper: optuna]\n"
    "hydra: {sweeper: {n_trials: 2, direction: minimize, params: {optimizer.lr: 'interval(0.01,0.1)'}}}\n",
}


@pytest.fixture
def experiments(own_folder):
    (own_folder / "conf/experiment").mkdir(parents=True)
    for name, text in EXPERIMENTS.items():
        (own_folder / f"conf/experiment/{name}.yaml").write_text(f"# @package _global_\n{text}")
    return own_folder


@pytest.mark.parametrize(
    ("words", "launcher", "sweeper"),
    [
        ([], "slots", "grid"),
        (["experiment=slurm"], "slurm", "grid"),
        (["experiment=search"], "slots", "optuna"),
        (["+experiment@_global_=search", "experiment=slurm"], "slurm", "optuna"),
        (["experiment=slurm", "hydra/launcher=slots", "~hydra.launcher.partition"], "slots", "grid"),
    ],
)
def test_experiment_overrides_launcher_and_sweeper(experiments, words, launcher, sweeper):
    with compose.hydra_session(["runner"]):
        choices = compose.composer([])(words).hydra.runtime.choices
    assert (choices["hydra/launcher"], choices["hydra/sweeper"]) == (launcher, sweeper)


def test_rerun_has_our_launcher_and_sweeper(own_folder):
    (own_folder / "rerun.yaml").write_text("defaults: [schema, base, _self_]\n")
    with compose.hydra_session(["runner"]):
        choices = compose.composer(["-cd", ".", "-cn", "rerun"])([]).hydra.runtime.choices
    assert (choices["hydra/launcher"], choices["hydra/sweeper"]) == ("slots", "grid")


def test_experiment_with_optuna_runs_a_search(experiments):
    small = ["data=iris", "model=linear", "train.num_epochs=1", "tracking.enabled=false", "device=cpu"]
    assert cli.main(["-m", "experiment=search", *small, "hydra.sweep.dir=sweep"]) == 0
    jobs = json.loads((experiments / "sweep/report.json").read_text())["jobs"]
    rates = {word for job in jobs for word in job["overrides"] if word.startswith("optimizer.lr=")}
    assert len(rates) == 2


@pytest.mark.parametrize("flag", [["-cd", "named"], ["--config-dir=named"]])
def test_named_directory_is_searched_first(composed, own_folder, flag):
    for place, seed in (("named", 1), ("conf", 2)):
        (own_folder / place / "model").mkdir(parents=True)
        (own_folder / place / "config.yaml").write_text(f"defaults: [schema, base, model: mlp, _self_]\nseed: {seed}\n")
        (own_folder / place / "model/mlp.yaml").write_text(f"_target_: nets.Net\nwidth: {seed}\n")
    for words, seed in ((flag, 1), ([], 2), ([*flag, "-cn", "config"], 1)):
        (cfg, _), *others = composed([*words, *QUIET])
        assert (cfg["seed"], cfg["model"]["width"], others) == (seed, seed, [])


def test_run_directory_replaces_no_built_in_file(own_folder):
    (own_folder / "run/hydra/launcher").mkdir(parents=True)
    (own_folder / "run/rerun.yaml").write_text("defaults: [schema, base, _self_]\n")
    (own_folder / "run/hydra/launcher/slots.yaml").write_text("_target_: runner.sweep.Slots\nsetup: [rm -r x]\n")
    with compose.hydra_session(["runner", "-cd", "run", "-cn", "rerun"]):
        cfg = compose.composer(["-cd", "run", "-cn", "rerun"])([])
    assert "setup" not in cfg.hydra.launcher


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["data._target_=sets.toy"], "toy"),
        (["experiment=toy"], "toy"),
        (["data._target_=sets.toy", "data.name=mine"], "mine"),
        (["data=iris"], "iris"),
    ],
)
def test_data_is_named_after_its_target(experiments, words, name):
    (experiments / "conf/experiment/toy.yaml").write_text("# @package _global_\ndata: {_target_: sets.toy}\n")
    with compose.hydra_session(["runner"]):
        assert compose.composed_with(compose.composer([]), words).data.name == name


@dataclass
class Net:
    """As hydra-zen writes it: by the path of the definition."""

    _target_: str = "runner.models.mlp.MLP"
    in_features: Any = "${facts.in_features}"
    out_features: int = MISSING
    hidden_sizes: list[int] = field(default_factory=lambda: [8])


def test_structured_config_is_a_model(own_folder, monkeypatch):
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    ConfigStore.instance().store(group="model", name="structured", node=Net)
    words = ["model=structured", "model.hidden_sizes=[4,4]", "model.out_features=3", "device=cpu", "data=iris"]
    with compose.hydra_session(["runner"]):
        cfg = compose.composed_with(compose.composer([]), words)
    check(cfg)
    assert (cfg.model._target_, cfg.model.hidden_sizes) == ("runner.models.MLP", [4, 4])


def test_file_whose_aliases_explode_is_refused(own_folder, capfd):
    values = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    values += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    (own_folder / "conf/model").mkdir(parents=True)
    (own_folder / "conf/model/bomb.yaml").write_text("\n".join(["_target_: nets.Net", *values]))
    (own_folder / "conf/model/loop.yaml").write_text("_target_: nets.Net\na: &a [*a]\n")
    (own_folder / "conf/model/fine.yaml").write_text("_target_: nets.Net\na: &a {b: [1, 2]}\nc: {<<: *a, d: 3}\n")
    for option in ("bomb", "loop"):
        assert cli.main([f"model={option}"]) == 2
        assert f"conf/model/{option}.yaml\n" in (told := capfd.readouterr().err) and "aliases" in told
    assert cli.main(["model=fine", "--cfg", "job"]) == 0
