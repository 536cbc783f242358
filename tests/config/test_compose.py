"""Hydra's composition for a command: once, checked, from our search path, without replacing any part of Hydra."""

import ast
import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from omegaconf import MISSING, OmegaConf

from runner import cli
from runner.cli.arguments import parse
from runner.cli.table import COMMANDS, MULTIRUN
from runner.cli.train import check
from runner.config import compose
from runner.errors import RunnerError
from runner.version import PACKAGES


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every composition."""
    found, load = [], ConfigLoaderImpl.load_configuration

    def counted(*settings, **more):
        found.append(settings)
        return load(*settings, **more)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    return found


def composed(words):
    """Return the configuration of `python -m runner WORDS`, with Hydra's settings."""
    given = parse(COMMANDS["train"], words)
    flags, overrides = given.flags, given.overrides
    loader = compose.CheckedLoader(flags)
    with compose.hydra_with(loader):
        return compose.compose_job(loader, flags, overrides, is_sweep=bool(MULTIRUN & set(flags)))


@pytest.mark.parametrize("words", [["seed=3", "model=mlp"], ["hydra.mode=RUN", "hydra.job.name=other"]])
def test_run_is_composed_once_as_hydra_does(words, own_folder, calls):
    ours = composed(words)
    assert len(calls) == 1
    with_mode = [*words, *(["hydra.mode=RUN"] if "hydra.mode=RUN" not in words else [])]
    hydras = ConfigLoaderImpl(compose._search_path([])).load_configuration("config", with_mode, RunMode.RUN)
    hydras.data.name = "digits"  # all that is added
    assert OmegaConf.to_container(ours) == OmegaConf.to_container(hydras)


def test_composition_that_fails_is_tried_once(own_folder, calls):
    with pytest.raises(Exception, match="seedd"):
        composed(["seedd=3"])
    assert len(calls) == 1
    (own_folder / "mine.yaml").write_text(
        "defaults: [config, _self_]\nhydra: {callbacks: {x: {_target_: os.makedirs}}}\n"
    )
    with pytest.raises(RunnerError, match="makedirs"):
        composed(["-cd", ".", "-cn", "mine"])
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [config, _self_]\nhydra: {mode: MULTIRUN}\n", ["seed=1,2"]),
        ("defaults: [config, _self_]\nhydra: {mode: MULTIRUN}\n", []),
        (
            "defaults: [schema, base, {model: '???'}, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {model: 'mlp,cnn'}}}\n",
            [],
        ),
    ],
)
def test_file_may_request_sweep(text, words, own_folder):
    (own_folder / "mine.yaml").write_text(text)
    assert composed(["-cd", ".", "-cn", "mine", *words]).hydra.mode == RunMode.MULTIRUN


@pytest.mark.parametrize(
    ("words", "count"), [(["seedd=3"], 1), (["seed=3", "modle=mlp"], 1), (["seed=3", "model=mpl"], 4)]
)
def test_failed_composition_is_explained_without_repeating_it(words, count, own_folder, calls, capfd):
    assert cli.main(words) == 2
    assert words[-1] in capfd.readouterr().err
    assert len(calls) == count


LIBRARY = r"(?:hydra|omegaconf|argparse)"
LIBRARIES = ("hydra", "omegaconf", "argparse")


def patched(source):
    """Return the lines that write or delete an attribute of a module or class of these libraries."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in LIBRARIES
    }
    written = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    written += [call.args[0] for call in calls if getattr(call.func, "id", "") in ("setattr", "delattr")]
    # not of an object that a call returns
    return [
        node.lineno for node in written if (text := ast.unparse(node)).partition(".")[0] in names and "(" not in text
    ]


def test_nothing_of_hydra_is_replaced():
    assert patched("from hydra.core.plugins import Plugins\nPlugins.discover = None\n") == [2]
    assert patched("import argparse\nx, argparse.ArgumentParser.error = 1, 2\n") == [2]
    assert patched("import hydra.core as core\nsetattr(core, 'x', 1)\ndel core.y\ncore.z += 1\n") == [3, 4, 2]
    files = [*(PACKAGES / "runner").rglob("*.py")]
    assert len(files) > 100
    assert {str(file): lines for file in files if (lines := patched(file.read_text()))} == {}


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
    choices = compose.composer([])(words).hydra.runtime.choices
    assert (choices["hydra/launcher"], choices["hydra/sweeper"]) == (launcher, sweeper)


def test_rerun_has_our_launcher_and_sweeper(own_folder):
    (own_folder / "rerun.yaml").write_text("defaults: [schema, base, _self_]\n")
    choices = compose.composer(["-cd", ".", "-cn", "rerun"])([]).hydra.runtime.choices
    assert (choices["hydra/launcher"], choices["hydra/sweeper"]) == ("slots", "grid")


def test_experiment_with_optuna_runs_a_search(experiments):
    small = ["data=iris", "model=linear", "train.num_epochs=1", "tracking.enabled=false", "device=cpu"]
    assert cli.main(["-m", "experiment=search", *small, "hydra.sweep.dir=sweep"]) == 0
    jobs = json.loads((experiments / "sweep/report.json").read_text())["jobs"]
    rates = {word for job in jobs for word in job["overrides"] if word.startswith("optimizer.lr=")}
    assert len(rates) == 2


@pytest.mark.parametrize("flag", [["-cd", "named"], ["--config-dir=named"]])
def test_named_directory_is_searched_first(own_folder, flag):
    for place, seed in (("named", 1), ("conf", 2)):
        (own_folder / place / "model").mkdir(parents=True)
        (own_folder / place / "config.yaml").write_text(f"defaults: [schema, base, model: mlp, _self_]\nseed: {seed}\n")
        (own_folder / place / "model/mlp.yaml").write_text(f"_target_: nets.Net\nwidth: {seed}\n")
    for words, seed in ((flag, 1), ([], 2), ([*flag, "-cn", "config"], 1)):
        cfg = composed(words)
        assert (cfg.seed, cfg.model.width) == (seed, seed)


def test_run_directory_replaces_no_built_in_file(own_folder):
    (own_folder / "run/hydra/launcher").mkdir(parents=True)
    (own_folder / "run/rerun.yaml").write_text("defaults: [schema, base, _self_]\n")
    (own_folder / "run/hydra/launcher/slots.yaml").write_text("_target_: runner.sweep.Slots\nsetup: [rm -r x]\n")
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
    assert compose.composed_with(compose.composer([]), words).data.name == name


@dataclass
class Net:
    """In hydra-zen's form: the path of the definition."""

    _target_: str = "runner.models.mlp.MLP"
    in_features: Any = "${facts.in_features}"
    out_features: int = MISSING
    hidden_sizes: list[int] = field(default_factory=lambda: [8])


def test_structured_config_is_a_model(own_folder, monkeypatch):
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))
    ConfigStore.instance().store(group="model", name="structured", node=Net)
    words = ["model=structured", "model.hidden_sizes=[4,4]", "model.out_features=3", "device=cpu", "data=iris"]
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


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "digits"),
        (["data=iris"], "iris"),
        (["data.name=mine"], "mine"),
        (["data._target_=my_parts.points"], "points"),  # unrelated data would have the file's name
    ],
)
def test_data_has_name_of_option_or_own_target(words, name, own_folder):
    (own_folder / "my_parts.py").write_text("def points():\n    return [1.0], [1.0]\n")
    assert composed(words).data.name == name
