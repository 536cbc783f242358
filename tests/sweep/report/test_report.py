"""A sweep's report from its directory: the results of its jobs, their order, the groups of seeds, the text and the files."""

import csv
import io
import json
import math
import statistics
import subprocess
import sys

import numpy as np
import pytest
from refused import problems_of
from rich.console import Console
from scipy import stats
from synthetic_sweep import Folder
from waiting import LONGEST

from runner.errors import harmless
from runner.sweep.jobs import ledger
from runner.sweep.report import build, tables
from runner.sweep.report.report import Mean, configurations, in_words, over_seeds
from runner.sweep.report.results import (
    BestOfJob,
    Goal,
    JobResult,
    as_fold,
    as_keys,
    best_first,
    differing_keys,
    find_front,
    find_goals,
    read_results,
)

LOSS, ACCURACY = Goal("val/loss", "min"), Goal("val/accuracy", "max")
INF, NAN = math.inf, math.nan


def only(sweep):
    (result,) = read_results(ledger.read(sweep.close()))
    return result


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("device=cuda\\:0", "seed=2"), {"device": "cuda:0", "seed": "2"}),
        (("+optimizer.lr=0.1", "++train.compile=true"), {"optimizer.lr": "0.1", "train.compile": "true"}),
        (("name='a b'", 'data.path="x=y.npz"'), {"name": "a b", "data.path": "x=y.npz"}),
        (("model.hidden_sizes=[512,512]", "~scheduler"), {"model.hidden_sizes": "[512,512]", "scheduler": ""}),
    ],
)
def test_overrides_are_read_by_key(overrides, keys):
    assert as_keys(overrides) == keys


def test_trained_job_has_best_value_and_device(tmp_path, write):
    sweep = write.folder(tmp_path)
    write.train(sweep, ("device=cuda\\:0", "seed=1"), device="cuda:0")
    result = only(sweep)
    step = result.curves["val/accuracy"].steps[np.argmax(result.curves["val/accuracy"].values)]
    assert (result.best.metric, result.best.mode, result.best.step) == ("val/accuracy", "max", step)
    assert result.device == "cuda:0" and result.keys["device"] == "cuda:0" and result.overrides[0] == "device=cuda\\:0"


def test_summary_has_what_the_ledger_lacks(tmp_path, write):
    sweep = write.folder(tmp_path)
    summary = {"error": "ValueError: odd\nat line 3", "best": {"metric": "val/loss", "value": 0.5, "step": 3}}
    sweep.job(("seed=1",), "failed", summary=summary)
    result = only(sweep)
    assert (result.error, result.best.mode) == ("ValueError: odd", "min")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"metrics": null, "best": null, "seconds": null}', '{"best": {"metric": null}}']
)
def test_incomplete_summary_gives_a_result(tmp_path, write, text):
    sweep = write.folder(tmp_path)
    number = sweep.job(("seed=1",), "killed", error="the process died of signal 9\nmore", device="cpu", summary={})
    (tmp_path / str(number) / "summary.json").write_text(text)
    result = only(sweep)
    assert (result.state, result.error, result.device) == ("killed", "the process died of signal 9", "cpu")
    assert result.best is None and result.metrics == {} and result.seconds_train is None


@pytest.mark.parametrize(
    ("overrides", "rerun", "seed", "fold"),
    [
        (("data.fold=2", "seed=3"), "", 3, "2/5"),
        (("data.fold=2/7",), "seed: 4\ndata:\n  seed: 9\n  fold: 2/7\n", 4, "2/7"),
        (
            ("data.fold=2",),
            "data:\n  fold: 2\n  augment:\n    num_folds: 4\n  num_folds: 9\nmodel:\n  a: 1\n",
            0,
            "2/9",
        ),
        ((), "data:\n  fold: null\n  num_folds: null\nmodel:\n  fold: 3\n", 0, None),
        ((), "seed: 5\ndata:\n  path: a.csv\n  fold: 1\n  num_folds: null\nmodel:\n  fold: 3\n", 5, "1/5"),
        (("data.fold=null",), "", 0, None),
    ],
)
def test_seed_and_fold_of_overrides_or_rerun(tmp_path, write, overrides, rerun, seed, fold):
    sweep = write.folder(tmp_path)
    number = sweep.job(overrides, summary={})
    (tmp_path / str(number) / "rerun.yaml").write_text(rerun)
    result = only(sweep)
    assert (result.seed, result.fold) == (seed, fold)


def test_other_values_than_numbers_are_left_out(tmp_path, write):
    sweep = write.folder(tmp_path)
    best = {"metric": "val/loss", "value": NAN, "step": 1}
    sweep.job(("seed=1",), summary={"best": best, "metrics": {"test/loss": INF, "x": None, "y": "1"}})
    result = only(sweep)
    assert result.value("val/loss") is None and result.value("test/loss") == INF
    assert list(result.metrics) == ["test/loss", "x"] and result.value("x") is None
    assert [result.reached(name, "min") for name in ("val/loss", "test/loss", "x", "z")] == [None, INF, INF, None]


def test_job_without_directory_reads_no_other(tmp_path, write):
    sweep = write.folder(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"metrics": {"test/loss": 1.0}}))
    job = ledger.Job(0, ("seed=1",), "seed=1", state="skipped", error="no such device")
    sweep.ledger.plan(job)
    sweep.ledger.note(job)
    result = only(sweep)
    assert result.metrics == {} and result.curves == {} and result.state == "skipped"


def test_torn_journal_gives_its_complete_part(tmp_path, write):
    sweep = write.folder(tmp_path)
    number = write.train(sweep, ("seed=1",))
    path = tmp_path / str(number) / "journal" / "journal.bin"
    path.write_bytes(path.read_bytes()[:9000])
    result = only(sweep)
    assert 0 < len(result.curves["train/loss"].steps) < 600
    assert "val/accuracy" not in result.curves and result.best.value > 0


def test_differing_keys_leave_out_shared_values():
    jobs = [("model=cnn", "seed=1"), ("model=cnn", "seed=2", "train.compile=true")]
    assert differing_keys([as_keys(overrides) for overrides in jobs]) == ["seed", "train.compile"]


# the order of the jobs


def ranked(job, state="finished", **metrics):
    metrics = {f"val/{name}": value for name, value in metrics.items() if value is not None}
    return JobResult(job, f"job {job}", (), {}, state, str(job), metrics=metrics)


def order(results, *goals):
    return [result.job for result in best_first(results, goals)]


@pytest.mark.parametrize(
    ("goal", "values", "expected"),
    [
        (LOSS, [3.0, 1.0, 2.0], [1, 2, 0]),
        (ACCURACY, [3.0, 1.0, 2.0], [0, 2, 1]),
        (LOSS, [None, 1.0, NAN, INF, 2.0], [1, 4, 3, 0, 2]),
        (ACCURACY, [1.0, 1.0, 2.0], [2, 0, 1]),
        (ACCURACY, [0.5, INF, 0.9, -INF], [2, 0, 1, 3]),
    ],
)
def test_best_value_comes_first_and_none_last(goal, values, expected):
    name = goal.metric.removeprefix("val/")
    assert order([ranked(job, **{name: value}) for job, value in enumerate(values)], goal) == expected


def test_states_are_grouped_and_values_order_them():
    states = ["failed", "skipped", "planned", "pruned", "finished", "killed", "running", "finished", "pruned", "odd"]
    results = [ranked(job, state, loss=10.0 - job) for job, state in enumerate(states)]
    assert order(results, LOSS) == [7, 4, 8, 3, 9, 6, 2, 1, 5, 0]
    assert order([ranked(2), ranked(0), ranked(1)]) == [0, 1, 2]


def test_goals_are_objectives_or_the_usual_metric():
    results = [ranked(job) for job in range(3)]
    for result, goal in zip(results, (LOSS, ACCURACY, ACCURACY), strict=True):
        result.best = BestOfJob(goal.metric, goal.mode, 0.5, 1)
    assert find_goals((), results) == (ACCURACY,) and find_goals((), [ranked(0)]) == ()
    directions = (("val/loss", "minimize"), ("val/accuracy", "maximize"))
    objectives = [{"metric": metric, "direction": direction} for metric, direction in directions]
    assert find_goals(objectives, []) == (LOSS, ACCURACY)


def test_front_has_what_no_other_job_beats():
    results = [ranked(0, loss=1.0, accuracy=0.5), ranked(1, loss=2.0, accuracy=0.9), ranked(2, loss=2.0, accuracy=0.8)]
    results += [ranked(3, loss=1.0, accuracy=0.5), ranked(4, loss=0.5), ranked(5, "pruned", loss=0.1, accuracy=1.0)]
    assert find_front(results, (LOSS, ACCURACY)) == {0, 1, 3}
    assert order(results, LOSS, ACCURACY) == [0, 3, 1, 2, 4, 5]
    assert find_front(results, (LOSS,)) == set()


# groups of seeds and folds


def make(job, *overrides, state="finished", **metrics):
    metrics = {name.replace("_", "/"): value for name, value in metrics.items()}
    keys = as_keys(overrides)
    seed, fold = int(keys.get("seed", 0)), as_fold(keys.get("data.fold", ""), keys.get("data.num_folds", ""))
    return JobResult(job, " ".join(overrides), overrides, keys, state, str(job), seed, fold, metrics=metrics)


def made(values, key="seed", metric="val_loss"):
    """Return a result for each model's value, one per seed (or other key)."""
    jobs = [(model, number, value) for model, each in values.items() for number, value in enumerate(each)]
    return [make(at, f"model={model}", f"{key}={n}", **{metric: value}) for at, (model, n, value) in enumerate(jobs)]


def test_jobs_that_differ_in_seed_are_a_group():
    results = made({"cnn": (1.0, 2.0, 4.0), "mlp": (0.5, 0.7)})
    for result in results:
        result.metrics |= {"test/loss": result.metrics["val/loss"] + 1, "train/loss": 0.0}
    results.append(make(9, "model=cnn", "seed=9", state="failed", val_loss=100.0))
    first, second = over_seeds(results, (LOSS,))
    assert (first.name, second.name, second.jobs) == ("model=mlp", "model=cnn", (0, 1, 2))
    mean = second.means["val/loss"]
    assert (mean.mean, mean.std, mean.n) == (pytest.approx(7 / 3), pytest.approx(statistics.stdev((1, 2, 4))), 3)
    assert list(second.means) == ["val/loss", "test/loss"] and second.means["test/loss"].mean == pytest.approx(10 / 3)


def test_highest_mean_is_first_if_maximized():
    results = made({"cnn": (0.9, 0.8), "linear": (0.5, 0.7), "mlp": (0.95, 0.9)}, metric="val_accuracy")
    results += [make(9 + seed, "model=gru", f"seed={seed}", val_loss=1.0) for seed in (0, 1)]  # without a value: last
    names = [group.name for group in over_seeds(results, (ACCURACY,))]
    assert names == ["model=mlp", "model=cnn", "model=linear", "model=gru"]


@pytest.mark.parametrize(
    "results",
    [
        [],
        [make(0, "seed=1", val_loss=1.0)],
        [make(0, "lr=1", "seed=1"), make(1, "lr=2", "seed=2")],
        [make(0, "lr=1", val_loss=1.0), make(1, "lr=1", val_loss=1.0)],  # a search may choose the same values twice
    ],
)
def test_single_seeds_make_groups_empty(results):
    assert over_seeds(results, (LOSS,)) == []


def test_missing_and_infinite_values_make_no_mean():
    results = [make(0, "model=a", "seed=1", val_loss=1.0), make(1, "model=a", "seed=2")]
    groups = over_seeds([*results, make(2, "model=b", "seed=1", val_loss=2.0)], (LOSS,))
    first = groups[0].means["val/loss"]
    assert (first.n, first.std, first.low, groups[1].jobs, in_words(groups)) == (1, None, None, (2,), "seeds")
    (group,) = over_seeds([make(0, "seed=1", val_loss=1.0), make(1, "seed=2", val_loss=INF)], (LOSS,))
    assert group.name == "all" and math.isnan(group.means["val/loss"].mean) and group.means["val/loss"].std is None


def bca(values):
    """Compute the interval with scipy, as a user would."""
    rng = np.random.default_rng(0)
    return stats.bootstrap((np.array(values),), np.mean, n_resamples=9999, rng=rng).confidence_interval


def test_folds_are_a_group_with_an_interval():
    losses = {"cnn": (1.0, 2.0, 4.0, 3.5, 3.0), "mlp": (0.5, 0.7, 0.4, 0.6, 0.6)}
    groups = over_seeds(made(losses, "data.fold"), (LOSS,))
    assert [(each.name, each.num_seeds, each.num_folds) for each in groups] == [
        ("model=mlp", 1, 5),
        ("model=cnn", 1, 5),
    ]
    assert in_words(groups) == "folds"
    for group, values in zip(groups, (losses["mlp"], losses["cnn"]), strict=True):
        mean, expected = group.means["val/loss"], bca(values)
        assert (mean.mean, mean.n) == (pytest.approx(statistics.fmean(values)), 5)
        assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high))


def test_folds_of_a_seed_are_one_value():
    seeds = np.random.default_rng(1).normal(size=8).tolist()
    jobs = [(seed, fold, value + 0.01 * fold) for seed, value in enumerate(seeds) for fold in range(5)]
    results = [make(at, f"seed={seed}", f"data.fold={fold}", val_loss=x) for at, (seed, fold, x) in enumerate(jobs)]
    (group,) = groups = over_seeds(results, (LOSS,))
    assert (group.num_seeds, group.num_folds, in_words(groups)) == (8, 5, "seeds and folds")
    expected, of_all = bca([value + 0.02 for value in seeds]), bca([value for _, _, value in jobs])
    mean = group.means["val/loss"]
    assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high), abs=0.01) and mean.n == 40
    assert mean.high - mean.low > 2 * (of_all.high - of_all.low)


def test_other_numbers_of_folds_are_other_configurations():
    folds = ["data.fold=0/5", "data.fold=1/5", "data.fold=0/3", "data.fold=2/3", "data.fold=null", "data.fold=4"]
    groups = configurations([make(at, fold, "seed=0", val_loss=1.0) for at, fold in enumerate(folds)])
    numbers = {name: [each.job for each in group] for name, group in groups.items()}
    assert numbers == {"data.fold=K/5": [0, 1], "data.fold=K/3": [2, 3], "data.fold=null": [4], "data.fold=K": [5]}


# the text


@pytest.mark.parametrize(
    ("show", "number", "text"),
    [
        *((tables.value, number, text) for number, text in ((None, ""), (0.98321, "0.9832"), (1.2e-5, "1.200e-05"))),
        *((tables.value, number, text) for number, text in ((1234.56, "1,234.6"), (INF, "inf"), (-2.5, "-2.5000"))),
        *((tables.speed, number, text) for number, text in ((159.4, "159"), (20_793.1, "20,793"), (0.034, "0.034"))),
        *((tables.speed, number, text) for number, text in ((0.0, "0"), (None, ""))),
        (tables.mean, Mean(0.5, None, 1), "0.5000"),
        (tables.mean, Mean(0.5, 0.0, 2), "0.5000 ± 0.0000"),
        (tables.mean, None, ""),
    ],
)
def test_numbers_are_readable(show, number, text):
    assert show(number) == text


def printed(folder, width=80):
    """Return the report as a pipe gets it."""
    file = io.StringIO()
    tables.show(build.read_report(folder), Console(file=file, width=width, highlight=False, soft_wrap=True))
    return file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit_the_terminal(grid_folder, search_folder, width):
    for folder in (grid_folder, search_folder):
        assert max(len(line.rstrip()) for line in printed(folder, width).splitlines()) <= width


def test_a_line_is_a_job_and_the_best_is_first(grid_folder):
    lines = printed(grid_folder).splitlines()
    assert lines[0] == "16 jobs: 12 finished, 2 skipped, 1 failed, 1 killed"
    assert lines[1].split() == ["job", "name", "val/accuracy", "step", "test/accuracy"]
    assert lines[2].split()[:4] == ["4", "device=cpu", "model=cnn", "seed=2"]
    assert [int(line.split()[0]) for line in lines[2:18]][-4:] == [12, 13, 14, 15]
    assert "(skipped)" in lines[14] and "(failed)" in lines[16] and "(killed)" in lines[17]
    wide = "job name state val/accuracy step test/accuracy test/loss steps/s samples/s trained"
    assert printed(grid_folder, 200).splitlines()[1].split() == wide.split()


def test_seeds_and_failures_are_printed(grid_folder):
    text = printed(grid_folder)
    rows = {tuple(line.split()) for line in text.splitlines()}
    assert ("device=cpu", "model=cnn", "3", "0.9775", "±", "0.0033") in rows
    assert ("device=cpu", "model=mlp", "3", "undecided:", "~1", "seed", "0.9331", "±", "0.0055") in rows
    failures = " ".join(text[text.index("failures") :].split())
    assert "14/console.log" in failures and "died of signal 11" in failures and "no Apple GPU" in failures
    assert "12/console.log" not in failures  # the job did not run


def test_equal_failures_are_printed_once(tmp_path):
    sweep, error = Folder(tmp_path), f"{'long ' * 50}; write model.outputs=2"
    for seed in range(9):
        sweep.job((f"seed={seed}",), "failed", error="another" if seed == 4 else error)
    text = printed(sweep.close(), 140)
    failures = text[text.index("failures") :]
    assert failures.count("model.outputs=2") == 1 and "another" in failures
    assert "seed=0; likewise 1, 2, 3, 5, 6, 7, 8 " in failures


@pytest.mark.parametrize(
    ("seeds", "over", "mean"),
    [((0,), "folds", "1.2000 (1.0800 to 1.3200)"), ((0, 1), "seeds and folds", "1.7000 (1.2000 to 2.2000)")],
)
def test_folds_are_printed_with_their_interval(tmp_path, write, seeds, over, mean):
    sweep = write.folder(tmp_path / "folds")
    for seed in seeds:
        for fold in range(5):
            best = {"metric": "val/loss", "mode": "min", "value": 1 + fold / 10 + seed, "step": 3}
            sweep.job((f"data.fold={fold}", f"seed={seed}"), summary={"best": best, "num_steps": 3})
    text = printed(sweep.close())
    assert f"over {over}, mean (95 % interval)" in text and mean in text and "±" not in text
    page = build.write(tmp_path / "folds").folder.joinpath("report.html").read_text()
    assert f"best mean (95 %) over {over}" in page and mean in page


def test_users_text_is_not_markup(tmp_path, write):
    sweep = write.folder(tmp_path)
    sweep.job(("a=[/red]",), "failed", name="model.hidden_sizes=[bold] [/red]", error="ValueError: [/nothing] [link=x]")
    text = printed(sweep.close(), 200)
    assert "model.hidden_sizes=[bold] [/red]" in text and "ValueError: [/nothing] [link=x]" in text


# the files


@pytest.fixture(scope="module")
def written(grid_folder):
    return build.write(grid_folder), json.loads((grid_folder / "report.json").read_text())


def test_report_has_counts_order_and_failures(written):
    report, _ = written
    assert report.counts == {"finished": 12, "skipped": 2, "failed": 1, "killed": 1} and report.exit_code == 1
    overrides = "device=cpu,cuda:0,mps model=mlp,cnn seed=1,2,3 train.num_epochs=6"
    assert report.command == f"python -m runner -m {overrides}" and report.keys == ["device", "model", "seed"]
    values = [result.value("val/accuracy") for result in report.results[:12]]
    assert values == sorted(values, reverse=True) and report.best is report.results[0]
    assert [result.job for result in report.results[12:]] == [12, 13, 14, 15]
    assert [[each.job for each in some] for some in (report.skipped, report.failures)] == [[12, 13], [14, 15]]


def test_report_json_has_all_as_plain_values(written):
    report, plain = written
    keys = "uid command overrides began_ms exit_code counts objectives goals keys best_job pareto_front jobs seeds "
    assert list(plain) == (keys + "comparisons winner failures skipped").split()
    assert (plain["exit_code"], plain["counts"], plain["overrides"]) == (1, report.counts, list(report.overrides))
    assert plain["goals"] == [{"metric": "val/accuracy", "mode": "max"}]
    fields = "job name overrides keys state folder seed fold device error metrics best num_steps num_epochs "
    fields += "steps_per_second samples_per_second seconds_train run_id diverged"
    assert all(list(each) == fields.split() for each in plain["jobs"])
    assert plain["best_job"] == plain["jobs"][0]["job"] == report.best.job
    assert plain["jobs"][0]["best"] == vars(report.best.best)
    assert plain["seeds"][0]["means"]["val/accuracy"]["n"] == 3
    name, error = "device=cpu model=odd seed=1", "the process died of signal 11 (segmentation fault)"
    killed = {"job": 15, "name": name, "state": "killed", "error": error, "log": "15/console.log"}
    assert plain["failures"][1] == killed
    assert [each["error"] for each in plain["skipped"]] == ["mps: this machine has no Apple GPU; here: cpu, cuda:0"] * 2


def test_report_csv_has_a_line_per_job(written, grid_folder):
    report, _ = written
    with (grid_folder / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["job"] for line in lines] == [str(result.job) for result in report.results]
    assert (lines[0]["model"], lines[0]["seed"], lines[0]["state"]) == ("cnn", report.best.keys["seed"], "finished")
    assert float(lines[0]["test/accuracy"]) == report.best.metrics["test/accuracy"]
    assert float(lines[0]["best_value"]) == report.best.best.value
    assert lines[-1]["best_value"] == "" and "segmentation" in lines[-1]["error"]


FORMULAS = ["=cmd|'/c calc'!A1", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1"]


def test_report_csv_has_no_formulas(tmp_path, write):
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


def test_same_directory_gives_the_same_files(written, grid_folder):
    names = ("report.json", "report.csv", "report.html")
    before = [(grid_folder / name).read_bytes() for name in names]
    build.write(grid_folder)
    assert [(grid_folder / name).read_bytes() for name in names] == before
    assert not list(grid_folder.glob(".report*"))  # no partial file remains


def test_report_json_has_no_nan(tmp_path, write):
    sweep = write.folder(tmp_path)
    best = {"metric": "val/loss", "mode": "min", "value": INF, "step": 1}
    for seed in (1, 2):
        sweep.job((f"seed={seed}",), summary={"metrics": {"test/loss": NAN, "train/loss": INF}, "best": best})
    build.write(sweep.close())
    plain = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    job = plain["jobs"][0]
    assert job["metrics"] == {"test/loss": None, "train/loss": None} and job["best"]["value"] is None


@pytest.mark.parametrize(
    "states", [[], ["planned"], ["failed"], ["skipped", "killed"], ["finished"], ["interrupted", "running"]]
)
def test_a_sweep_without_values_has_a_report(tmp_path, write, states):
    sweep = write.folder(tmp_path, words=())
    for number, state in enumerate(states):
        sweep.job((f"seed={number}",), state)
    report = build.write(sweep.close())
    assert report.best is None and report.goals == () and len(report.results) == len(states)
    assert report.exit_code == int(bool({"failed", "killed", "planned", "interrupted"} & {*states}))
    assert len((tmp_path / "report.csv").read_text().splitlines()) == 1 + len(states)
    assert states or printed(tmp_path) == "0 jobs\n"


def test_a_search_is_ranked_by_its_objectives(search_folder, tmp_path, write):
    report = build.read_report(search_folder)
    assert report.goals == (ACCURACY,) and report.counts == {"finished": 36, "pruned": 4, "failed": 1}
    assert report.seeds == []
    objectives = ({"metric": "val/accuracy", "direction": "maximize"}, {"metric": "test/loss", "direction": "minimize"})
    report = build.write(write.search(tmp_path, 12, objectives=objectives))
    assert report.results[0].job in report.front and report.best is report.results[0]
    assert json.loads((tmp_path / "report.json").read_text())["pareto_front"] == list(report.front)


def test_a_directory_without_a_sweep_is_refused(tmp_path, messages):
    (tmp_path / "one").mkdir()
    messages(problems_of(build.read_report, tmp_path / "one"))


@pytest.mark.slow
def test_a_report_imports_nothing_heavy(grid_folder):
    code = "import sys; from pathlib import Path; from runner.sweep.report import build; seen = {*sys.modules}; "
    code += "build.write(Path(sys.argv[1])); print(*seen & {*'torch mlflow optuna plotly matplotlib hydra'.split()}, "
    code += "*{*sys.modules} & {'torch', 'mlflow'}, sep='')"
    command = [sys.executable, "-c", code, grid_folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    assert (done.stderr.strip(), done.stdout.strip(), done.returncode) == ("", "", 0)
