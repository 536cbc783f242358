import sys
from pathlib import Path

import pytest

from runner.config.identity import as_typed
from runner.errors import (
    Problem,
    RunnerError,
    as_facts,
    first_line,
    for_a_shell,
    nearest,
    nearest_files,
    path_problems,
    print_error,
)


def test_problem_is_shown_in_three_lines():
    problem = Problem("optimizer.rl=0.1", "there is no key `optimizer.rl`", "", ("optimizer.lr=0.1",), ("a note",))
    assert str(RunnerError(problem)).splitlines() == [
        "error: there is no key `optimizer.rl`",
        "  --> optimizer.rl=0.1",
        "help: use `optimizer.lr=0.1`",
        "note: a note",
    ]


def test_several_problems_end_with_their_number(capsys):
    print_error(RunnerError(Problem("a", "b", "c=1"), Problem("d", "e", "f=1")))
    text = "error: b\n  --> a\nhelp: use `c=1`\n\nerror: e\n  --> d\nhelp: use `f=1`\n\n"
    assert capsys.readouterr().err == text + "error: 2 problems found; nothing was started\n"


@pytest.mark.parametrize(
    ("variables", "has_terminal", "is_colored"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_errors_are_red_on_terminals_only(variables, has_terminal, is_colored, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: has_terminal)
    print_error(RunnerError(Problem("a", "b", "c=1")))
    text = capsys.readouterr().err
    assert text.startswith("\033[1;31merror:\033[0m b" if is_colored else "error: b")
    assert ("\033[1;36mhelp:" in text) is is_colored


@pytest.mark.parametrize(
    ("source", "message", "sentence"),
    [
        ("data.num_rows=1", "it must be 2 or more", "`data.num_rows` must be 2 or more"),
        ("model=gpt", "it takes tokens", "`model=gpt` takes tokens"),
        ("model._target_=a.B", "it has no parameters", "`a.B` has no parameters"),
        ("resume run", "it has finished", "it has finished"),
        ("a.b=1", "items are missing", "items are missing"),
    ],
)
def test_sentence_names_the_setting(source, message, sentence):
    assert Problem(source, message, "").sentence == sentence


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("data.fold=4/5, or all: -m 'data.fold=range(5)'", "use `data.fold=4/5`, or all: `-m 'data.fold=range(5)'`"),
        ("device=cuda:0 (here: cuda:0, cpu)", "use `device=cuda:0` (here: cuda:0, cpu)"),
        ("python -m runner resume run a=12, or another", "run `python -m runner resume run a=12`, or another"),
        ("remove .cuda()", "remove .cuda()"),
        ("a whole file", "use a whole file"),
        ("'a=x y' or --format onnx", "use `'a=x y'` or `--format onnx`"),
        ("train.a=1 train.b=(2), or less", "use `train.a=1 train.b=(2)`, or less"),
    ],
)
def test_help_marks_what_can_be_typed(text, advice):
    assert Problem("a", "b", text).advice == advice


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
    problem = Problem("a", "b", text)
    assert str(problem).replace("`", "").endswith(typed) and problem.help == text


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
    problem = Problem.suggest("a", "b", ["model.hidden_sizes=[8]", "x=1", "x=1", "y=2", "z=3"], "c")
    assert problem.help == "use `'model.hidden_sizes=[8]'` or `x=1` or `y=2`"
    assert Problem.suggest("a", "b", [], "c").help == "c"
    (found,) = as_facts(RunnerError(problem))["faults"]
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
    assert [problem.help for problem in path_problems("data.path", path, is_written=is_written)] == [fix] * (
        fix is not None
    )


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
    assert as_facts(RunnerError(Problem("a", "b", fix)))["faults"][0]["suggestions"] == suggestions
