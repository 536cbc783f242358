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

#: below a log: what is set, the key that is told and the reason
WRONG = {
    "version=2": ("version=2", "no version but 1"),
    "root=5": ("root=5", "it is a group of keys"),
    "root.handlers=[nope]": ("root.handlers=[nope]", "list of this log's handlers, and they are: console"),
    "root.handlers=file": ("root.handlers=file", "list of this log's handlers"),
    "root.filters=[nope]": ("root.filters=[nope]", "they are: none"),
    "loggers.mine.handlers=[nope]": ("loggers.mine.handlers=[nope]", "list of this log's handlers"),
    "handlers.console.formatter=nope": ("handlers.console={", "Unable to set formatter 'nope'"),
    "handlers.console.nope=5": ("handlers.console={", "unexpected keyword argument 'nope'"),
    "handlers.new={class: logging.FileHandler, filename: 5}": ("handlers.new={", "filename is a text, and 5 is not"),
    "handlers.new={class: logging.FileHandler, filename: a, mode: NOPE}": ("handlers.new={", "invalid mode: 'NOPE'"),
    "handlers.new={class: logging.FileHandler, filename: a, mode: r}": ("handlers.new={", "not writable"),
    "handlers.new={class: logging.FileHandler, filename: a, encoding: NOPE}": ("handlers.new={", "unknown encoding"),
    "formatters.simple.format='%(nope)s'": ("formatters.simple={format: '%(nope)s'}", "not found in record: 'nope'"),
    "formatters.simple.format=5": ("formatters.simple={format: 5}", "got 'int'"),
    "formatters.simple.style=5": ("formatters.simple={format:", "Style must be one of"),
    "handlers=5": ("handlers=5", "it is a group of keys"),
    "incremental=true": ("incremental=true", "by increments"),
    "handlers.console.stream=5": ("handlers.console.stream=5", "to a file or to a stream"),
}
SOUND = [
    "job_logging.root=null",
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


@pytest.mark.parametrize("log", ["job_logging", "hydra_logging"])
@pytest.mark.parametrize("word", WRONG)
def test_what_a_log_can_not_be_made_of_is_told_with_its_key(word, log):
    asked, so = WRONG[word]
    (problem,) = told(hydra_with(f"{log}.{word}"))
    assert problem.source.startswith(f"hydra.{log}.{asked}") and so in problem.message and problem.help, problem


def test_a_log_without_a_root_and_names_that_are_none():
    (problem,) = told(hydra_with("job_logging={version: 1}"))
    assert "a log has a root" in problem.message
    (problem,) = told(hydra_with("verbose=[5]"))
    assert "the names of the logs" in problem.message


def test_it_is_told_before_anything_else():
    with pytest.raises(RunnerError, match=r"hydra\.hydra_logging\.root\.handlers=\[nope\]"):
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
    ("word", "asked", "so"),
    [
        ("job_logging.handlers.file.filename=nowhere/x.log", "handlers.file.filename=", "No such file"),
        ("output_subdir=../a", "hydra.output_subdir=../a", "leads out of the run's folder"),
        ("output_subdir=/a", "hydra.output_subdir=/a", "leads out of the run's folder"),
    ],
)
def test_what_hydra_can_not_write_or_writes_elsewhere_is_refused(own_folder, word, asked, so):
    hydra = hydra_with(word)
    (problem,) = problems_of(train.hydra_files, hydra, Path("run").absolute())
    assert asked in problem.source and so in problem.message and not list(own_folder.iterdir())


def test_a_file_that_was_there_is_somebodys_and_stays(tmp_path):
    folder, own, new = tmp_path / "run", tmp_path / "mine.log", tmp_path / "new.log"
    own.write_text("mine")
    with claim.RunDirectory(folder) as directory:
        directory.expect([own, new])
        new.write_text("of the run")
        directory.leave_nothing()
    assert own.read_text() == "mine" and not new.exists() and not folder.exists()
