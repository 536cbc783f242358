"""A log that can't be created is reported with its key, before anything is written."""

import copy
import functools
import gc

import pytest
import yaml
from omegaconf import OmegaConf, open_dict, read_write
from refused import problems_in, problems_of

from runner import cli
from runner.cli import train
from runner.config.compose import composer
from runner.experiment.directory import LOG


@functools.cache
def composed():
    return composer([])([])


def hydra_with(*words):
    """Return Hydra's settings with these changes: one composition for all tests."""
    cfg = copy.deepcopy(composed())
    with read_write(cfg), open_dict(cfg):
        for word in words:
            key, _, value = word.partition("=")
            OmegaConf.update(cfg, f"hydra.{key}", yaml.safe_load(value), merge=False)
    return cfg.hydra


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python's logging leaves a file open
@pytest.mark.parametrize(
    "word",
    [
        "hydra_logging.root.handlers=[nope]",
        "hydra_logging.version=2",
        "job_logging.root.level=NOPE",
        "job_logging.handlers.file.filename=nowhere/x.log",
        "job_logging.handlers=5",
        "+job_logging.handlers.file.nope=5",
        "+job_logging.handlers.new={class:logging.FileHandler,filename:5}",
        "job_logging.formatters.simple.format=5",
        "verbose=[5]",
    ],
)
def test_log_that_fails_is_refused(word, own_folder, capfd):
    sign, key = ("+", word[1:]) if word[0] == "+" else ("", word)
    words = ["data=iris", "model=linear", "device=cpu", "tracking.enabled=false", f"{sign}hydra.{key}"]
    assert cli.main([*words, "--json"]) == 2
    (problem,) = problems_in(capfd.readouterr().out)
    log = "hydra.job_logging" if key.startswith("job") else "hydra.hydra_logging"
    assert (problem.source, problem.code) == (log, "bad-value")
    gc.collect()
    assert not list(own_folder.iterdir())


def test_run_log_name_ignores_job_name(tmp_path):
    hydra = hydra_with("job.name=a/b", f"runtime.output_dir={tmp_path}")
    assert hydra.job_logging.handlers.file.filename == f"{tmp_path}/{LOG}"


@pytest.mark.parametrize("word", ["output_subdir=../a", "output_subdir=/a"])
def test_directory_outside_the_run_is_refused(own_folder, word, messages):
    messages(problems_of(train.check_hydra, hydra_with(word)))
    assert not list(own_folder.iterdir())
