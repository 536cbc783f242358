import io

import pytest
from rich.console import Console
from synthetic_sweep import Folder

from runner.sweep.report import build, text


def printed(folder, width=80):
    """Return the report as a pipe gets it."""
    file = io.StringIO()
    text.show(build.read_report(folder), Console(file=file, width=width, highlight=False, soft_wrap=True))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_fit_the_terminal(grid_folder, search_folder, width):
    for folder in (grid_folder, search_folder):
        assert max(len(line.rstrip()) for line in printed(folder, width).splitlines()) <= width


def test_the_best_job_stands_first_and_a_line_holds_a_job(grid_folder):
    lines = printed(grid_folder).splitlines()
    assert lines[0] == "16 jobs: 12 finished, 2 skipped, 1 failed, 1 killed"
    assert lines[1].split() == ["job", "name", "val/accuracy", "step", "test/accuracy"]
    assert lines[2].split()[:4] == ["4", "device=cpu", "model=cnn", "seed=2"]
    assert [int(line.split()[0]) for line in lines[2:18]][-4:] == [12, 13, 14, 15]
    assert "(skipped)" in lines[14] and "(failed)" in lines[16] and "(killed)" in lines[17]


def test_a_wide_terminal_shows_everything(grid_folder):
    head = printed(grid_folder, 200).splitlines()[1].split()
    assert head == [
        "job",
        "name",
        "state",
        "val/accuracy",
        "step",
        "epoch",
        "test/accuracy",
        "test/loss",
        "steps/s",
        "samples/s",
        "trained",
    ]


def test_seeds_and_failures_are_shown(grid_folder):
    text = printed(grid_folder)
    rows = {tuple(line.split()) for line in text.splitlines()}
    assert ("device=cpu", "model=cnn", "3", "0.9775", "±", "0.0033") in rows
    assert ("device=cpu", "model=mlp", "3", "undecided:", "~1", "seed", "0.9331", "±", "0.0055") in rows
    failures = " ".join(text[text.index("failures") :].split())
    assert "14/console.log" in failures and "died of signal 11" in failures and "no Apple GPU" in failures
    assert "12/console.log" not in failures  # the job did not run


def test_what_failed_in_the_same_way_is_told_once_and_whole(tmp_path):
    sweep = Folder(tmp_path)
    for seed in range(9):
        sweep.job(
            (f"seed={seed}",), "failed", error="another" if seed == 4 else f"{'long ' * 50}; write model.outputs=2"
        )
    text = printed(sweep.close(), 140)
    failures = text[text.index("failures") :]
    assert failures.count("model.outputs=2") == 1 and "another" in failures
    assert "seed=0; likewise 1, 2, 3, 5, 6, 7, 8 " in failures


@pytest.mark.parametrize(
    ("seeds", "title"),
    [((0,), "over folds, mean (95 % interval)"), ((0, 1), "over seeds and folds, mean (95 % interval)")],
)
def test_folds_are_told_with_their_interval(tmp_path, write, seeds, title):
    sweep = write.folder(tmp_path / "folds")
    for seed in seeds:
        for fold in range(5):
            best = {"metric": "val/loss", "mode": "min", "value": 1 + fold / 10 + seed, "step": 3}
            sweep.job((f"data.fold={fold}", f"seed={seed}"), summary={"best": best, "num_steps": 3})
    said = printed(sweep.close())
    mean = "1.2000 (1.0800 to 1.3200)" if seeds == (0,) else "1.7000 (1.2000 to 2.2000)"
    assert title in said and mean in said and "±" not in said
    page = build.write(tmp_path / "folds").folder.joinpath("report.html").read_text()
    assert f"best mean (95 %) over {title.split(',')[0].removeprefix('over ')}" in page and mean in page


def test_what_a_person_wrote_is_no_markup(tmp_path, write):
    sweep = write.folder(tmp_path)
    sweep.job(("a=[/red]",), "failed", name="model.hidden_sizes=[bold] [/red]", error="ValueError: [/nothing] [link=x]")
    text = printed(sweep.close(), 200)
    assert "model.hidden_sizes=[bold] [/red]" in text and "ValueError: [/nothing] [link=x]" in text


def test_no_jobs_are_told_too(tmp_path, write):
    assert printed(write.folder(tmp_path).close()) == "0 jobs\n"
