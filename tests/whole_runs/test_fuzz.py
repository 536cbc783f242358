"""Any arguments on the command line end in a run, an error message, or a failed run: never in a traceback."""

import contextlib
import copy
import functools
import io
import os
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from runner import cli
from runner.config import override_errors
from runner.config.compose import composer, known_keys
from runner.config.validate import problems, shared_data_settings
from runner.device import Hardware
from runner.errors import RunnerError
from runner.experiment.check import check
from runner.runs import find
from runner.sweep.report import tables

HERE = Hardware()
SMALL = ("data=synthetic", "data.num_rows=40", "data.num_features=3", "model=mlp", "train.num_steps=1", "device=cpu")
KEYS = [
    *known_keys(),
    "hydra.run.dir",
    "hydra.job.name",
    "hydra.verbose",
    "hydra.searchpath",
    "hydra.mode",
    "model.x.y.z",
]
GROUPS = ["data", "model", "task", "optimizer", "scheduler", "train", "experiment", "tracking", "hydra/launcher"]
#: strings with a meaning in YAML or the grammar of overrides
PIECES = [
    *"+~@:=,()[]{}'\"\\$#!&*|>%-./ \t\n\0",
    "${", "}", "${oc.env:HOME}", "${oc.env:", "${facts.num_steps}", "${nothing}", "${model}", "${.}", "???", "null",
    "true", "nan", "inf", "-inf", "1e999", "0x10", "range(1,3)", "choice(1,2)", "interval(0,1)", "glob(*)", "sort(2,1)",
    "\x1b[31m", "\u202e", "é", "😀", "_target_", "a", "0", "-1", "10000000000000000000000", "1_0", "~", "!!python/name:os.system",
]  # fmt: skip
text = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**40), 10**40), st.floats(), text, st.text(max_size=8)
)
values = st.recursive(
    plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)), max_leaves=6
)
keys = st.one_of(
    st.sampled_from(KEYS), st.sampled_from(GROUPS), text, st.builds("{}.{}".format, st.sampled_from(KEYS), text)
)
written = st.one_of(
    text,
    values.map(lambda value: yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("\n...\n").strip()),
)  # fmt: skip
override = st.builds(
    lambda sign, key, package, equals, value: f"{sign}{key}{package}{equals}{value}",
    st.sampled_from(["", "", "", "", "+", "++", "~"]),
    keys,
    st.sampled_from(["", "", "", "", "@b", "@", "@a.b:c"]),
    st.sampled_from(["=", "=", "=", "=", ""]),
    written,
)


def often(num_examples):
    """Return a decorator of a test of that many examples, the same ones each time."""
    how = settings(
        max_examples=num_examples,
        derandomize=False,  # Hypothesis would enable it in CI
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed("0")(how(test))


def ends_in_words(words):
    """Run the command in a temporary directory; the test fails unless the command returns an exit code."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main(list(words))
        finally:
            os.chdir(before)
    shown = out.getvalue() + err.getvalue()
    assert code in (0, 1, 2), words
    assert "Traceback" not in shown, shown
    assert code != 2 or "error: " in shown or "usage:" in shown, shown
    return code


@often(5)
@given(st.lists(override, min_size=1, max_size=3))
def test_random_overrides_compose_or_give_error(words):
    ends_in_words([*words, "--cfg", "job"])


@often(25)
@given(st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=4))
def test_random_values_are_valid_or_give_error(given_values):
    """Sets values that only a file can hold, as no override can write them."""
    cfg = copy.deepcopy(small())
    OmegaConf.set_struct(cfg, False)
    for key, value in given_values:
        with contextlib.suppress(OmegaConfBaseException, AssertionError):  # it can't be composed
            OmegaConf.update(cfg, key, value, merge=True)
    with contextlib.suppress(RunnerError):
        check(cfg, HERE)


@functools.cache
def small():
    cfg = composer([])(list(SMALL))
    with open_dict(cfg):
        del cfg.hydra  # as long as all other keys together, and copied for each example
    return cfg


@pytest.mark.parametrize(
    "text", ["${nothing}", "a${nothing}=", "${nope:1}", "${oc.env:NOPE}", "${facts.num_steps}", "${model}"]
)
def test_dangling_reference_anywhere_is_reported(text):
    wanted = [key for key in KEYS if not key.startswith(("hydra", "model.x"))]
    keys = sorted({*wanted, *(key.rpartition(".")[0] for key in wanted)} - {"", "data"})
    for key in keys[len(text) % 8 :: 8]:  # an eighth, others for each text
        if text in ("${facts.num_steps}", "${model}") and not key.startswith(("train.", "device", "seed")):
            continue  # an argument may refer to a fact, and a text to any text
        cfg = copy.deepcopy(small())
        OmegaConf.set_struct(cfg, False)
        try:
            OmegaConf.update(cfg, key, text, merge=False)
        except OmegaConfBaseException:  # it can't be composed
            continue
        with pytest.raises(RunnerError):
            check(cfg, HERE)
            pytest.fail(f"{key}={text} is taken")


def test_random_dangling_reference_gives_error():
    words = ["train.precision=${nothing}", "device=${nope:1}", "train=???", "seed=${facts.num_steps}", "model=${train}"]
    for word in words:  # all other settings are defaults, as each argument costs a composition
        assert ends_in_words(["model=mlp", word]) == 2, word


@often(5)
@given(text | st.text(max_size=30), st.sampled_from(["model", "train", "experiment"]))
def test_random_text_file_gives_error(content, group):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / group / "any.yaml"
        file.parent.mkdir()
        file.write_text(content, errors="replace")
        ends_in_words(["-cd", folder, f"{group}=any", "--cfg", "job"])


@pytest.mark.slow
@often(2)
@given(st.lists(st.tuples(st.sampled_from([key for key in KEYS if not key.startswith("hydra")]), values), max_size=1))
def test_random_run_finishes_or_gives_error(given_values):
    words = [f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}" for key, value in given_values]
    ends_in_words(
        [*SMALL, *words, "train.num_steps=1", "tracking.enabled=false", "data.num_workers=0", "hydra.run.dir=run"]
    )


#: past failures of such commands, all fixed
MET = {
    "a key of the schema that is taken away": ["~seed"],
    "a log's level that there is none of": ["hydra.job_logging.root.level=NOPE"],
    "a log's level between two": ["hydra.job_logging.root.level=.5"],
    "a log that Python does not make": ["+hydra.job_logging.handlers.file.nope=5"],
    "a group that is taken away": ["~sweep"],
    "a list that has a gap": ["optimizer.lr=[???,2]"],
    "a null in a list where a number is wanted": ["model=mlp", "+model.dropout=[null]"],
}


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # logging leaves its file open at a wrong level
@pytest.mark.parametrize("words", MET.values(), ids=MET)
def test_strange_setting_is_refused_and_leaves_nothing(words, own_folder, capsys):
    assert cli.main([*SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert "error: " in error and "Traceback" not in error
    assert not list(own_folder.iterdir())


#: combined with an error in the data, which is found after the run directory is created
WRITTEN = {
    "a log that is called as the job is": ["hydra/job_logging=default", "hydra.job.name=mine"],
    "a folder of Hydra's with another name": ["hydra.output_subdir=a/b"],
}


@pytest.mark.parametrize("words", WRITTEN.values(), ids=WRITTEN)
def test_refused_run_leaves_no_file_of_hydra(words, own_folder, capsys):
    assert cli.main([*SMALL, "data.limit=2", *words]) == 2
    assert "of 2 rows is less than one row" in capsys.readouterr().err
    assert not list(own_folder.rglob("*.*"))


def test_folder_without_run_is_not_searched(tmp_path):
    """`resume /` used to read the whole disk first."""
    (tmp_path / "leads_out").symlink_to("/")
    with pytest.raises(RunnerError, match="is not a run directory"):
        find.find(str(tmp_path))


def test_error_with_empty_text_is_reported(monkeypatch):
    problem = override_errors.explain(
        AssertionError(), [], compose=lambda words: small(), check=lambda cfg: None
    ).problems[0]
    assert problem.message.startswith("AssertionError")


def test_table_of_one_unnamed_job_fits():
    assert tables._fit({"job": ["0"]}, "name", ["state"], 80) == {"job": ["0"]}


def test_data_number_written_as_text_is_read():
    cfg = copy.deepcopy(small())
    cfg.data.limit = "7"
    assert shared_data_settings(cfg)["limit"] == 7


def test_group_reference_does_not_reach_next_check():
    cfg = copy.deepcopy(small())
    for reference in ("${model}", "${facts.input_shape}"):
        cfg.facts.input_shape = [1, 8]
        cfg.train.num_processes = reference
        assert any("num_processes" in problem.source for problem in problems(cfg))
        assert not [problem for problem in problems(small()) if "num_processes" in problem.source]
