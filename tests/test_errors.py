from pathlib import Path

import pytest

from runner.config.identity import as_typed
from runner.errors import (
    Fault,
    RunnerError,
    as_facts,
    first_line,
    for_a_shell,
    nearest,
    nearest_files,
    path_faults,
)


def test_a_fault_says_what_was_asked_what_is_so_and_what_to_write():
    text = str(RunnerError(Fault("device=cud", "there is no device cud", "device=cuda")))
    assert [line.split(":")[0].strip() for line in text.splitlines()] == ["asked", "so", "write"]
    assert "device=cuda" in text


def test_all_faults_are_printed():
    error = RunnerError(Fault("a", "b", "c"), Fault("d", "e", "f"))
    assert len(error.faults) == 2
    assert str(error).count("write:") == 2


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("data.size=64 or data.size=[48,64]", "data.size=64 or 'data.size=[48,64]'"),
        ("train.hooks=[], and ++a.b=[[1],[2]]", "'train.hooks=[]', and '++a.b=[[1],[2]]'"),
        ("task.metrics={NAME: {_target_: ...}}", "'task.metrics={NAME: {_target_: ...}}'"),
        ("'device=[cuda:1,cpu]' or device=cpu", "'device=[cuda:1,cpu]' or device=cpu"),
        ("DataLoader(..., num_workers=...), x[0]", "DataLoader(..., num_workers=...), x[0]"),
    ],
)
def test_what_to_write_can_be_typed_in_any_shell(text, typed):
    """zsh takes brackets without quotes for a pattern: "no matches found"."""
    assert for_a_shell(text) == typed
    fault = Fault("a", "b", text)
    assert str(fault).endswith(typed) and fault.fix == text


def test_the_files_that_a_path_may_have_meant(own_folder):
    for name in ("my sets/people & co.csv", "my sets/other.csv", "my sets/notes.txt", "here.csv"):
        (own_folder / name).parent.mkdir(exist_ok=True)
        (own_folder / name).touch()

    def found(path):
        return [str(hit) for hit in nearest_files(Path(path), lambda file: file.suffix == ".csv")]

    people = "my sets/people & co.csv"
    assert (
        found("my sets/peple & co.csv")
        == found("my set/people & co.csv")
        == found("mysets/poeple & co.csv")
        == [people]
    )
    assert found("my sets/zzz.npz") == ["my sets/other.csv", people]
    assert found("my set/zzz.npz") == found("nothing/of/the/kind.csv") == []
    assert as_typed("data.path", people) == """'data.path="my sets/people & co.csv"'"""
    assert as_typed("data.path", "a/b.csv") == "data.path=a/b.csv"


def test_nearest_ignores_case_and_keeps_the_real_spelling():
    assert nearest("relu", ["ReLU", "Tanh"]) == ["ReLU"]
    assert nearest("zzz", ["ReLU"]) == []


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("so\nand so"), "so"),
        (KeyError(), "KeyError"),
        (OSError("\n  late \n"), "late"),
        ("a text\nmore", "a text"),
    ],
)
def test_the_first_line_of_what_an_error_says(error, line):
    assert first_line(error) == line


def test_suggestions_can_be_typed_in_a_shell():
    fault = Fault.suggest("a", "b", ["model.hidden_sizes=[8]", "x=1", "x=1", "y=2", "z=3"], "c")
    assert fault.fix == "model.hidden_sizes=[8] or x=1 or y=2" and Fault.suggest("a", "b", [], "c").fix == "c"
    (found,) = as_facts(RunnerError(fault))["faults"]
    assert found["suggestions"] == ["'model.hidden_sizes=[8]'", "x=1", "y=2"]


@pytest.mark.parametrize(
    ("path", "is_written", "fix"),
    [
        ("s3://lab/data/people.csv", False, "aws s3 cp s3://lab/data/people.csv ., then data.path=people.csv"),
        ("https://x.org/w.pt?download=1", False, "curl -LO https://x.org/w.pt?download=1, then data.path=w.pt"),
        ("az://lab/sets/", False, "copy az://lab/sets/ here, then data.path=sets"),
        ("file:///tmp/a.csv", False, "data.path=/tmp/a.csv"),
        (str(Path("s3://lab/1")), True, "data.path=PATH on this machine; copy it to s3://lab/1 afterwards"),
        ("/dev/zero", False, "data.path=FILE"),
        *((path, False, None) for path in ("a.csv", "C:/a.csv", "sets/*.csv", "/dev", "../a:b/c")),
    ],
)
def test_path_that_is_no_local_file_is_refused(path, is_written, fix):
    assert [fault.fix for fault in path_faults("data.path", path, is_written=is_written)] == [fix] * (fix is not None)


@pytest.mark.parametrize(
    ("fix", "suggestions"),
    [
        ("device=cuda or 'device=[cuda:1,cpu]'", ["device=cuda", "'device=[cuda:1,cpu]'"]),
        ("--format onnx or --format pt2", ["--format onnx", "--format pt2"]),
        ("data.path=FILE", []),
        ("seed=... or seed=1", []),
        ("seed=1 in the file", []),
    ],
)
def test_fix_of_overrides_gives_suggestions(fix, suggestions):
    assert as_facts(RunnerError(Fault("a", "b", fix)))["faults"][0]["suggestions"] == suggestions
