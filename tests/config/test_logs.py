"""A log that can't be made is told with its key, before anything is made."""

import copy
import functools
import logging
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf, open_dict, read_write
from refused import problems_of

from runner.cli import train
from runner.config import logs, trust
from runner.config.compose import composer
from runner.errors import RunnerError
from runner.experiment import claim

#: below a log
WRONG = [
    "version=2",
    "root=5",
    "root.level=NOPE",
    "root.level=0.5",
    "handlers.console.level=NOPE",
    "root.handlers=[nope]",
    "root.handlers=file",
    "root.filters=[nope]",
    "loggers.mine.handlers=[nope]",
    "handlers.console.formatter=nope",
    "handlers.console.nope=5",
    "handlers.new={class: logging.FileHandler, filename: 5}",
    "handlers.new={class: logging.FileHandler, filename: a, mode: NOPE}",
    "handlers.new={class: logging.FileHandler, filename: a, encoding: NOPE}",
    "formatters.simple.format=5",
    "formatters.simple.style=5",
    "handlers=5",
    "incremental=true",
    "handlers.console.stream=5",
]
SOUND = [
    "job_logging.root=null",
    "job_logging.root.level=15",
    "verbose=true",
    "verbose=[hydra, runner]",
    "job_logging.handlers.file.mode=x",
    "job_logging.handlers.rolled={class: logging.handlers.RotatingFileHandler, filename: a, maxBytes: 10}",
    "job_logging.handlers.console={class: logging.NullHandler}",
]


@functools.cache
def composed():
    return composer([])([])


def hydra_with(*words):
    """Hydra's settings with these in them: one composition for all."""
    cfg = copy.deepcopy(composed())
    with read_write(cfg), open_dict(cfg):
        for word in words:
            key, _, value = word.partition("=")
            OmegaConf.update(cfg, f"hydra.{key}", yaml.safe_load(value), merge=False)
    return cfg.hydra


def told(hydra):
    return trust.hydra_problems(hydra) or logs.problems(hydra)


@pytest.mark.parametrize(
    "word", [*(f"job_logging.{word}" for word in WRONG), "job_logging={version: 1}", "verbose=[5]"]
)
def test_log_that_fails_is_refused(word, messages):
    (problem,) = messages(told(hydra_with(word)))
    if word.startswith("job_logging."):
        (other,) = told(hydra_with(word.replace("job_logging", "hydra_logging")))
        assert other.source.partition("=")[0] == problem.source.partition("=")[0].replace(
            "job_logging", "hydra_logging"
        )


def test_it_is_told_before_anything_else():
    with pytest.raises(RunnerError, match=r"hydra\.hydra_logging\.root=.*nope"):
        composer([])(["hydra.hydra_logging.root.handlers=[nope]"])


def test_a_sound_log_is_taken_and_nothing_is_written_or_changed(own_folder, capfd):
    before = logging.getLogger().handlers[:], logging.getLogger().level
    for word in SOUND:
        assert not told(hydra_with(word)), word
    assert (logging.getLogger().handlers[:], logging.getLogger().level) == before
    assert not list(own_folder.iterdir()) and capfd.readouterr() == ("", "")


def test_a_runs_log_is_called_runner_whatever_the_job_is_called(tmp_path):
    hydra = hydra_with("job.name=a/b", f"runtime.output_dir={tmp_path}")
    assert logs.files(hydra)["hydra.job_logging.handlers.file.filename"] == tmp_path / claim.LOG


@pytest.mark.parametrize(
    "word", ["job_logging.handlers.file.filename=nowhere/x.log", "output_subdir=../a", "output_subdir=/a"]
)
def test_file_outside_the_run_is_refused(own_folder, word, messages):
    messages(problems_of(train.hydra_files, hydra_with(word), Path("run").absolute()))
    assert not list(own_folder.iterdir())


def test_a_file_that_was_there_is_somebodys_and_stays(tmp_path):
    folder, own, new = tmp_path / "run", tmp_path / "mine.log", tmp_path / "new.log"
    own.write_text("mine")
    with claim.RunDirectory(folder) as directory:
        directory.expect([own, new])
        new.write_text("of the run")
        directory.leave_nothing()
    assert own.read_text() == "mine" and not new.exists() and not folder.exists()
