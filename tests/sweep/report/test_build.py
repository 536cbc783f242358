import csv
import json
import subprocess
import sys

import pytest
from refused import problems_of
from waiting import LONGEST

from runner.errors import harmless
from runner.sweep.report import build

FIELDS = "job name overrides state device error metrics best num_steps num_epochs steps_per_second samples_per_second seconds_train run_id"


@pytest.fixture(scope="module")
def written(grid_folder):
    return build.write(grid_folder), json.loads((grid_folder / "report.json").read_text())


def test_the_report_says_what_happened(written):
    found, _ = written
    assert found.counts == {"finished": 12, "skipped": 2, "failed": 1, "killed": 1}
    assert (
        found.exit_code == 1
        and found.command == "python -m runner -m device=cpu,cuda:0,mps model=mlp,cnn seed=1,2,3 train.num_epochs=6"
    )
    values = [result.value("val/accuracy") for result in found.results[:12]]
    assert values == sorted(values, reverse=True) and found.best is found.results[0]
    assert [result.job for result in found.results[12:]] == [12, 13, 14, 15]
    assert [result.job for result in found.failures] == [14, 15] and [result.job for result in found.skipped] == [
        12,
        13,
    ]
    assert found.keys == ["device", "model", "seed"]


def test_report_json_holds_all_of_it_as_plain_values(written):
    found, plain = written
    assert plain["exit_code"] == 1 and plain["counts"] == found.counts and plain["began_ms"] == found.began_ms
    assert plain["overrides"] == list(found.overrides) and plain["objectives"] == []
    assert plain["goals"] == [{"metric": "val/accuracy", "mode": "max"}]
    assert plain["best_job"] == plain["jobs"][0]["job"] == found.best.job
    assert all(set(FIELDS.split()) <= set(job) for job in plain["jobs"])
    assert plain["jobs"][0]["best"] == {
        "metric": "val/accuracy",
        "mode": "max",
        "value": found.best.best.value,
        "step": 600,
        "epoch": 6,
        "seconds": found.best.best.seconds,
    }
    assert plain["jobs"][0]["folder"] == str(found.best.job)
    assert plain["seeds"][0]["means"]["val/accuracy"]["n"] == 3
    assert plain["failures"][1] == {
        "job": 15,
        "name": "device=cpu model=odd seed=1",
        "state": "killed",
        "error": "the process died of signal 11 (segmentation fault)",
        "log": "15/console.log",
    }
    assert [each["error"] for each in plain["skipped"]] == ["mps: this machine has no Apple GPU; here: cpu, cuda:0"] * 2


def test_report_csv_has_a_line_for_each_job_and_a_column_for_each_key_and_metric(written, grid_folder):
    found, _ = written
    with (grid_folder / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["job"] for line in lines] == [str(result.job) for result in found.results]
    assert (lines[0]["model"], lines[0]["seed"], lines[0]["state"]) == ("cnn", found.best.keys["seed"], "finished")
    assert float(lines[0]["test/accuracy"]) == found.best.metrics["test/accuracy"]
    assert float(lines[0]["best_value"]) == found.best.best.value
    assert lines[-1]["best_value"] == "" and "segmentation" in lines[-1]["error"]


FORMULAS = ["=cmd|'/c calc'!A1", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]


def test_a_spreadsheet_takes_no_text_of_report_csv_for_a_formula(tmp_path, write):
    sweep = write.folder(tmp_path)
    for formula in FORMULAS:
        sweep.job((f"lr=-1e-3,{formula}", f"{formula}=1"), name=formula, summary={"metrics": {"=x": -1.5}})
    sweep.job(("lr=-0.1",), "failed", error="=HYPERLINK(1)")
    build.write(sweep.close())
    with (tmp_path / "report.csv").open(newline="") as file:
        head, *lines = csv.reader(file)
    assert {line[1] for line in lines} >= {f"'{harmless(formula)}" for formula in FORMULAS}
    assert {line[head.index("'=x")] for line in lines} == {"-1.5", ""}
    assert [line[head.index("lr")] for line in lines][-1] == "-0.1", "a number stays one"
    starts = [cell for line in (head, *lines) for cell in line if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert set(starts) == {"-1.5", "-0.1"}


def test_the_same_folder_gives_the_same_files(written, grid_folder):
    names = ("report.json", "report.csv", "report.html")
    before = [(grid_folder / name).read_bytes() for name in names]
    build.write(grid_folder)
    assert [(grid_folder / name).read_bytes() for name in names] == before
    assert not list(grid_folder.glob(".report*"))  # no partial file remains


def test_json_holds_no_nan(tmp_path, write):
    sweep = write.folder(tmp_path)
    metrics = {"test/loss": float("nan"), "train/loss": float("inf")}
    best = {"metric": "val/loss", "mode": "min", "value": float("inf"), "step": 1}
    sweep.job(("seed=1",), summary={"metrics": metrics, "best": best})
    sweep.job(("seed=2",), summary={"metrics": metrics, "best": best})
    build.write(sweep.close())

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    plain = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert (
        plain["jobs"][0]["metrics"] == {"test/loss": None, "train/loss": None}
        and plain["jobs"][0]["best"]["value"] is None
    )


@pytest.mark.parametrize(
    "states", [[], ["planned"], ["failed"], ["skipped", "killed"], ["finished"], ["interrupted", "running"]]
)
def test_a_sweep_that_reached_little_has_a_report(tmp_path, write, states):
    sweep = write.folder(tmp_path, words=())
    for number, state in enumerate(states):
        sweep.job((f"seed={number}",), state)
    found = build.write(sweep.close())
    assert found.best is None and found.goals == () and len(found.results) == len(states)
    assert found.exit_code == int(bool({"failed", "killed", "planned", "interrupted"} & {*states}))
    assert len((tmp_path / "report.csv").read_text().splitlines()) == 1 + len(states)


def test_a_search_is_judged_by_its_objectives(search_folder):
    found = build.read_report(search_folder)
    assert found.goals[0].metric == "val/accuracy" and found.counts == {"finished": 36, "pruned": 4, "failed": 1}
    assert found.seeds == []


def test_two_goals_have_a_front(tmp_path, write):
    objectives = ({"metric": "val/accuracy", "direction": "maximize"}, {"metric": "test/loss", "direction": "minimize"})
    found = build.write(write.search(tmp_path, 12, objectives=objectives))
    assert found.results[0].job in found.front and found.best is found.results[0]
    assert json.loads((tmp_path / "report.json").read_text())["pareto_front"] == list(found.front)


def test_a_folder_without_a_sweep_is_refused(tmp_path, messages):
    (tmp_path / "one").mkdir()
    messages(problems_of(build.read_report, tmp_path / "one"))


@pytest.mark.slow
def test_importing_it_loads_nothing_heavy():
    heavy = "{'torch', 'mlflow', 'optuna', 'plotly', 'matplotlib', 'hydra'}"
    code = f"import sys; import runner.sweep.report.build, runner.sweep.report.text; sys.exit(str(sorted({heavy} & set(sys.modules))) if {heavy} & set(sys.modules) else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stderr
