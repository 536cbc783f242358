"""Hydra's two compositions of a run are one, and the same."""

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from runner import cli
from runner.cli.check_first import CheckFirst
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


@pytest.mark.parametrize(("words", "count"), [(["seedd=3"], 3), (["seed=3", "modle=mlp"], 4)])  # with a group's options
def test_what_failed_is_not_composed_again_to_be_explained(composed, words, count, capfd):
    assert cli.main(words) == 2
    assert "write: " in capfd.readouterr().err
    assert len(composed.calls) == count
