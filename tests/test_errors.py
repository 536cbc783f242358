import re
import sys
from pathlib import Path

import pytest

from runner.config.identity import as_typed
from runner.errors import Problem, RunnerError, as_facts, first_line, nearest, nearest_files, path_problems, print_error
from runner.version import HERE


def test_problem_is_shown_in_three_lines():
    problem = Problem("optimizer.rl=0.1", "there is no key `optimizer.rl`", "use `optimizer.lr=0.1`", notes=("a note",))
    assert str(RunnerError(problem)).splitlines() == [
        "error: there is no key `optimizer.rl`",
        "  --> optimizer.rl=0.1",
        "help: use `optimizer.lr=0.1`",
        "note: a note",
    ]


def test_several_problems_end_with_their_number(capsys):
    print_error(RunnerError(Problem("a", "b", "use `c=1`"), Problem("d", "e", "use `f=1`")))
    text = "error: b\n  --> a\nhelp: use `c=1`\n\nerror: e\n  --> d\nhelp: use `f=1`\n\n"
    assert capsys.readouterr().err == text + "error: 2 problems found; nothing was started\n"


@pytest.mark.parametrize(
    ("variables", "has_terminal", "is_colored"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False), ({}, False, False)],
)
def test_errors_are_red_on_terminals_only(variables, has_terminal, is_colored, monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: has_terminal)
    print_error(RunnerError(Problem("a", "b", "use `c=1`")))
    text = capsys.readouterr().err
    assert text.startswith("\033[1;31merror:\033[0m b" if is_colored else "error: b")
    assert ("\033[1;36mhelp:" in text) is is_colored


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("data.size=[48,64]", "'data.size=[48,64]'"),
        ("seed=1 ++a.b=[[1],[2]]", "seed=1 '++a.b=[[1],[2]]'"),
        ("task.metrics={NAME: {_target_: ...}}", "'task.metrics={NAME: {_target_: ...}}'"),
        ("'device=[cuda:1,cpu]'", "'device=[cuda:1,cpu]'"),
    ],
)
def test_suggestion_can_be_typed_in_any_shell(text, typed):
    """zsh takes unquoted brackets for a pattern: "no matches found"."""
    problem = Problem.suggest("a", "b", [text])
    assert (problem.suggestions, problem.help) == ((typed,), f"use `{typed}`")


def test_suggestions_are_three_different_ones():
    problem = Problem.suggest("a", "b", ["x=1", "x=1", "y=2", "z=3", "u=4"], "c")
    assert problem.help == "use `x=1`, `y=2` or `z=3`" and Problem.suggest("a", "b", [], "c").help == "c"
    (found,) = as_facts(RunnerError(problem))["faults"]
    assert found["suggestions"] == ("x=1", "y=2", "z=3")


def test_every_error_code_is_documented():
    sources = "".join(file.read_text() for file in HERE.rglob("*.py"))
    codes = set(re.findall(r'code="([\w-]+)"', sources)) | {Problem("", "", "").code}
    assert codes <= set(re.findall(r"`([\w-]+)`", (HERE / "docs/reference.md").read_text()))


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


@pytest.mark.parametrize(
    ("path", "is_written", "fix"),
    [
        ("s3://lab/data/people.csv", False, "copy it here, then use `data.path=people.csv`"),
        ("https://x.org/w.pt?download=1", False, "copy it here, then use `data.path=w.pt`"),
        ("az://lab/sets/", False, "copy it here, then use `data.path=sets`"),
        (str(Path("s3://lab/1")), True, "use `data.path=PATH`, and copy it there afterwards"),
        ("/dev/zero", False, "use `data.path=FILE`"),
        *((path, False, None) for path in ("a.csv", "C:/a.csv", "sets/*.csv", "/dev", "../a:b/c")),
    ],
)
def test_path_to_remote_file_is_refused(path, is_written, fix):
    assert [problem.help for problem in path_problems("data.path", path, is_written=is_written)] == [fix] * (
        fix is not None
    )


def test_help_is_quoted_for_a_shell():
    problem = Problem("a=1", "no", "use `a=[1,2]`, or 'b={c: 1}'", ("a=[1,2]",))
    assert problem.help == "use `'a=[1,2]'`, or 'b={c: 1}'" and problem.suggestions == ("'a=[1,2]'",)
