"""The directory that RUN means, and the suggestion if it is not that of one run."""

from pathlib import Path

import pytest
from refused import problems_of

from runner.errors import Problem, RunnerError
from runner.runs import find
from runner.tracking.ack import Ack, write_ack
from runner.tracking.journal_records import FILE as JOURNAL


@pytest.mark.parametrize(
    "wanted",
    [
        "my rum",
        "./my rum/",
        "elsewhere/other_rum",
        "outputs/day/frist",
        "0123456789abcdee",
        pytest.param("x" * 300, id="too long"),
        pytest.param("a\0b/c", id="with a zero"),
    ],
)
def test_a_name_that_is_no_run_s_says_the_nearest_that_is(own_folder, wanted, messages):
    for name in ("my run", "elsewhere/other_run", "outputs/day/first"):
        (own_folder / name / "journal").mkdir(parents=True)
        (own_folder / name / "rerun.yaml").touch()
        (own_folder / name / JOURNAL).touch()
    write_ack(own_folder / "outputs/day/first", Ack(run_id="0123456789abcdef"))
    messages(problems_of(find.locate, wanted, verb="diff"))


def test_where_no_run_is_none_is_said_to_be_the_last(own_folder, messages):
    for wanted in ("last", "nothing"):
        messages(problems_of(find.locate, wanted, verb="diff"))


@pytest.mark.parametrize("verb", ["resume", "evaluate"])
def test_a_sweep_is_many_runs(own_folder, verb, messages):
    (own_folder / "my sweep").mkdir()
    (own_folder / "my sweep/ledger.jsonl").touch()
    messages(problems_of(find.locate, "my sweep", verb=verb))


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("evaluate RUN", "evaluate RUN"),
        ("explain RUN --step 3", "explain RUN --step 3"),
        ("resume RUN train.num_epochs=99", "resume RUN train.num_epochs=99"),
        ("reproduce RUN", "reproduce RUN"),
        (
            "predict RUN --input x.csv --output y.csv",
            "predict RUN --input HERE/x.csv --output HERE/y.csv",
        ),
    ],
)
def test_from_another_folder_the_run_s_own_files_are_told_where_they_lie(
    words, again, home, run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("a\n1\n")
    inner = "outputs/table/run"
    code, _, err = run(*(str(home / inner) if word == "RUN" else word for word in words.split()))
    assert code == 2
    again = again.replace("RUN", inner).replace("HERE", str(tmp_path))
    assert f"error: `my_rows.py` is in {home}, where the run was started, and not here" in err
    assert f"help: run `cd {home} && python -m runner {again}`\n" in err


def test_what_was_moved_with_its_run_is_found_above_it(own_folder, monkeypatch):
    (folder := own_folder / "project/runs/a b").mkdir(parents=True)
    (own_folder / "project/rows.csv").touch()
    (own_folder / "here").mkdir()
    monkeypatch.chdir(own_folder / "here")
    (own_folder / "here/link").symlink_to(folder)
    mistakes = [
        Problem(f"data.path={name}", "so", "write") for name in ("rows.csv", "nowhere.csv", "../project/rows.csv")
    ]
    told = find.from_home(RunnerError(*mistakes), Path("link"), "evaluate", ["device=cpu"]).problems
    project = own_folder / "project"
    assert told[0].help == f"run `cd {project} && python -m runner evaluate 'runs/a b' device=cpu`"
    assert told[1:] == tuple(mistakes[1:])
