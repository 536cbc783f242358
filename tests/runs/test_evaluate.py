"""`python -m runner evaluate`: the run's splits again, and other data in the order of the run's classes."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from refused import problems_of

from runner.cli.arguments import parse
from runner.cli.table import COMMANDS
from runner.experiment.directory import BEST, Run
from runner.experiment.terminal import readable
from runner.runs import evaluate
from runner.runs.evaluate import _whole, is_other, leave_own_rows
from runner.tracking.journal import Journal
from runner.training import checkpoint

QUIET = ("tracking.enabled=false", "task.plots=false")


@pytest.mark.parametrize("name", ["digits", "table", "sizes", "raw"])
def test_evaluate_own_splits_equals_run(name, run):
    folder = Path(f"outputs/{name}/run")
    code, out, _ = run("evaluate", str(folder), "device=cpu")
    assert code == 0
    found, summary = (
        json.loads((folder / "evaluation.json").read_text()),
        json.loads((folder / "summary.json").read_text()),
    )
    assert found["metrics"]["val/loss"] == summary["best"]["value"]
    tested = {name: value for name, value in summary["metrics"].items() if name.startswith("test/")}
    assert {name: value for name, value in found["metrics"].items() if name.startswith("test/")} == tested
    assert found["in_the_run"] == found["metrics"]
    assert found["is_own_data"] and found["notes"] == [] and found["rows"].keys() == {"val", "test"}
    assert readable(found["metrics"]["test/loss"]) in out and "written" in out


@pytest.mark.parametrize(
    ("step", "weights", "expected"),
    [
        (12, BEST, {"val/loss": 0.5, "test/loss": 0.6}),
        (30, BEST, {"val/loss": 0.3}),  # the run was extended, then killed: its test used the weights of step 12
        (24, "checkpoints/step-24.pt", {"val/loss": 0.7}),
    ],
)
def test_evaluate_hides_test_of_other_weights(step, weights, expected, tmp_path):
    with Journal(tmp_path) as journal:
        journal.points(("val/loss",), [12, 24], [0, 0], [[0.5], [0.7]])
        journal.points(("test/loss",), [24], [0], [[0.6]])
        journal.points(("val/loss",), [30], [0], [[0.3]])
    assert evaluate._then(Run(tmp_path, weights), step) == expected


def test_evaluate_other_data_keeps_class_order(run, table):
    table(Path("shuffled.csv"), 60, start=9, order=-1)
    first = [Path(name).read_text().splitlines()[1].split(",")[3] for name in ("train.csv", "shuffled.csv")]
    assert first == ["low", "high"]  # so the classes of the file have the opposite order
    code, out, _ = run("evaluate", "outputs/table/run", "data.path=shuffled.csv", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["rows"] == {"test": 60} and not found["is_own_data"]
    assert found["metrics"]["test/accuracy"] > 0.9
    assert list(Path("outputs/table/run/evaluations").glob("mine-*.json"))
    code, out, _ = run("evaluate", "outputs/table/run", "data.path=shuffled.csv", "data.limit=10", "--json")
    assert json.loads(out)["rows"] == {"test": 10}


class CheckedError(Exception):
    """Ends the command at its check of the configuration."""


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """Return the configuration that `evaluate` would check, for a run with this configuration."""

    def call(cfg, *words):
        def stop(*_):
            raise CheckedError

        cfg = OmegaConf.create({"data": {}, "train": {}, "placement": {}} | cfg)
        monkeypatch.setattr(evaluate, "find_trained", lambda *_, **__: Run(tmp_path))
        monkeypatch.setattr(evaluate, "configuration_of", lambda *_: cfg)
        monkeypatch.setattr(evaluate, "check", stop)
        with pytest.raises(CheckedError):
            evaluate.evaluate(parse(COMMANDS["evaluate"], ["run", *words]))
        return cfg

    return call


def test_evaluate_compiled_run_is_eager(checked):
    cfg = checked({"train": {"compile": True, "cuda_graph": True}})
    assert (cfg.train.compile, cfg.train.cuda_graph) == (False, False)


@pytest.mark.parametrize(
    ("words", "of_ours", "of_another"),
    [
        (["data.in_memory=false", "data.num_workers=0"], False, True),
        (["+data.augment.crop=4", "data.decode=workers"], False, True),
        (["data.in_memory=false", "data.path=other.csv"], True, True),
        (["data=images", "data.decode=once"], True, True),
        (["data.residency=stream", "train.precision=bf16"], False, False),
    ],
)
def test_evaluate_residency_changes_no_data(words, of_ours, of_another):
    """Otherwise, rows of the run's training would be measured as a test."""
    assert is_other(words, target="runner.data.table") == of_ours
    assert is_other(words, target="my_data.table") == of_another


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["data.path=new.csv"], {"test_path": None, "limit": None}),
        (["data.path=new.csv", "data.test_path=old.csv", "data.limit=5"], {"test_path": "old.csv", "limit": 5}),
        (["data.target=kind"], {"test_path": "old.csv", "limit": None}),
    ],
)
def test_evaluate_other_data_ignores_test_file(words, left):
    cfg = OmegaConf.create({"data": {"_target_": "runner.data.table", "test_path": "old.csv", "limit": 5}})
    leave_own_rows(cfg, words)
    assert {name: cfg.data[name] for name in left} == left


def test_evaluate_other_data_needs_targets(messages):
    cfg = OmegaConf.create({"data": {"_target_": "runner.data.arrays", "path": "x.npy", "targets_path": "y.npy"}})
    messages(problems_of(leave_own_rows, cfg, ["data.path=x.npy"]))
    leave_own_rows(cfg, ["data.path=x.npy", "data.targets_path=y.npy"])


def test_evaluate_limit_of_own_splits_raises(messages):
    messages(problems_of(_whole, SimpleNamespace(given={"val": [1], "test": [2]}), 5, 0))


def test_evaluate_reads_columns_of_the_run(run):
    lines = Path("train.csv").read_text().splitlines()[:30]
    more = [f"{number},{line}" for number, line in enumerate(lines)]
    Path("more.csv").write_text("\n".join(["id" + more[0][1:], *more[1:]]) + "\n")
    assert run("evaluate", "outputs/table/run", "data.path=more.csv")[0] == 0


def test_evaluate_with_another_source(run):
    x, y = np.random.default_rng(0).random((30, 1, 8, 8), np.float32), np.arange(30) % 3
    np.savez("all.npz", x=x, y=y)
    np.savez("split.npz", x_train=x, y_train=y, x_val=x[:5], y_val=y[:5], x_test=x[:6], y_test=y[:6])
    for path, rows in (("all.npz", {"test": 30}), ("split.npz", {"val": 5, "test": 6})):
        code, out, _ = run("evaluate", "outputs/digits/run", "data=arrays", f"data.path={path}", "--json")
        assert code == 0
        assert json.loads(out)["rows"] == rows


def test_evaluate_unsuitable_data_raises(run):
    np.savez("wide.npz", x=np.zeros((4, 5), np.float32), y=[0, 1, 2, 3])
    np.savez("strange.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=["0", "1", "eleven", "3"])
    np.savez("numbers.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=[0.5, 1.5, 2.0, 3.0])
    for path, output in {
        "wide.npz": "takes rows of shape [1, 8, 8], and this data has [5]",
        "strange.npz": "this data has eleven",
        "numbers.npz": "help: use `data.kind=classification`",
    }.items():
        code, _, err = run("evaluate", "outputs/digits/run", "data=arrays", f"data.path={path}")
        assert code == 2, path
        assert output in err


def test_evaluate_changed_data_warns(run, tmp_path):
    before = Path("train.csv").read_text()
    try:
        Path("train.csv").write_text(before.replace("1004,", "1003,"))
        code, out, _ = run("evaluate", "outputs/table/run")
    finally:
        Path("train.csv").write_text(before)
    assert code == 0 and "its fingerprint differs" in out


def test_evaluate_repeats_runs_best_weights(run, tmp_path):
    """A run whose best weights are averaged ones and not the last, on a fold, with a value for each class."""
    pytest.importorskip("torchmetrics")
    folder, f1 = str(tmp_path / "run"), "torchmetrics.classification.MulticlassF1Score, num_classes: 3, average: none"
    words = ["data=iris", "model=linear", "device=cpu", "train.num_epochs=3", "train.ema_decay=0.9", *QUIET]
    words += ["data.fold=2/6", "data.sampler={setosa:1,versicolor:2,virginica:0}"]
    words += ["train.early_stopping={metric: val/loss, mode: max}", f"task.metrics={{f1: {{_target_: {f1}}}}}"]
    assert run(*words, f"hydra.run.dir={folder}")[0] == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert 0 < summary["best"]["step"] < summary["num_steps"]
    code, out, _ = run("evaluate", folder, "device=cpu", "--json")
    found = json.loads(out)
    assert code == 0 and found["in_the_run"] == found["metrics"] and found["rows"] == {"val": 23, "test": 15}
    assert found["metrics"]["test/loss"] == summary["metrics"]["test/loss"]
    assert {"test/f1_setosa", "test/f1_versicolor", "test/f1_virginica"} <= found["metrics"].keys()
    for word, so in (
        ("data.fold=3/6", "split differently"),
        ("data.num_folds=6", "split differently"),
        ("data.sampler=balanced", "measures every row once"),
        ("data.sampler.setosa=2", "measures every row once"),
    ):
        code, _, err = run("evaluate", folder, word)
        assert code == 2 and so in err and f"help: remove `{word.partition('=')[0][:12]}" in err
    last, best = (checkpoint.load(tmp_path / f"run/checkpoints/{name}.pt") for name in ("last", "best"))
    checkpoint.save({**best, "average": last["average"]}, tmp_path / "run/checkpoints/best.pt")
    code, out, _ = run("evaluate", folder, "train.precision=bf16", "train.eval_batch_size=7", "device=cpu", "--json")
    found = json.loads(out)  # of the weights that are there now
    assert (
        code == 0 and found["precision"] == "bf16" and found["metrics"]["test/loss"] < summary["metrics"]["test/loss"]
    )


def test_evaluate_keeps_channels_last(run, tmp_path):
    words = ("model=cnn", "data=synthetic", "data.num_rows=100", "data.shape=[3,32,32]", "train.num_steps=2")
    assert run("device=cpu", f"hydra.run.dir={tmp_path}/run", *QUIET, *words)[0] == 0
    code, out, _ = run("evaluate", f"{tmp_path}/run", "device=cpu", "--json")
    assert code == 0 and json.loads(out)["metrics"] == json.loads(out)["in_the_run"]


@pytest.mark.parametrize("is_own", [True, False])
def test_evaluate_that_cannot_write_raises(tmp_path, is_own, messages):
    (tmp_path / evaluate.OWN).mkdir()
    (tmp_path / evaluate.OTHERS).write_text("a file where a folder is to be")
    report = {"is_own_data": is_own, "data": "digits", "fingerprint": "0" * 64}
    messages(problems_of(evaluate._write, Run(tmp_path), report))
