import pytest

from runner.errors import Fault, RunnerError, first_line, for_a_shell, nearest


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
