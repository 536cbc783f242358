import json

import numpy as np
import pytest

from runner.sweep.jobs import ledger
from runner.sweep.report.results import as_keys, differing_keys, read_results


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
def test_overrides_read_by_key(overrides, keys):
    assert as_keys(overrides) == keys


def test_a_trained_job_tells_its_best_with_epoch_and_seconds(tmp_path, write):
    sweep = write.folder(tmp_path)
    write.train(sweep, ("device=cuda\\:0", "seed=1"), device="cuda:0")
    result = only(sweep)
    series_step = result.curves["val/accuracy"].steps[np.argmax(result.curves["val/accuracy"].values)]
    assert (result.best.metric, result.best.mode, result.best.step) == ("val/accuracy", "max", series_step)
    assert result.best.epoch == series_step // 100
    assert result.best.seconds == pytest.approx(result.best.step * 128 / result.samples_per_second, abs=0.002)
    assert result.device == "cuda:0" and result.keys["device"] == "cuda:0" and result.overrides[0] == "device=cuda\\:0"


@pytest.mark.parametrize(("metric", "mode"), [("val/accuracy", "max"), ("val/loss", "min")])
def test_a_best_without_a_mode_takes_it_from_its_metric(tmp_path, write, metric, mode):
    sweep = write.folder(tmp_path)
    sweep.job(("seed=1",), summary={"best": {"metric": metric, "value": 0.5, "step": 3}})
    best = only(sweep).best
    assert (best.mode, best.epoch, best.seconds) == (mode, None, None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"metrics": null, "best": null, "seconds": null}', '{"best": {"metric": null}}']
)
def test_a_summary_that_was_cut_off_or_says_little_is_no_obstacle(tmp_path, write, text):
    sweep = write.folder(tmp_path)
    number = sweep.job(("seed=1",), "killed", error="the process died of signal 9\nmore", device="cpu", summary={})
    (tmp_path / str(number) / "summary.json").write_text(text)
    result = only(sweep)
    assert (result.state, result.error, result.device) == ("killed", "the process died of signal 9", "cpu")
    assert result.best is None and result.metrics == {} and result.seconds_train is None


@pytest.mark.parametrize(
    ("words", "rerun", "seed", "fold"),
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
def test_a_jobs_seed_and_fold_by_its_words_else_by_what_it_left(tmp_path, write, words, rerun, seed, fold):
    sweep = write.folder(tmp_path)
    number = sweep.job(words, summary={})
    (tmp_path / str(number) / "rerun.yaml").write_text(rerun)
    result = only(sweep)
    assert (result.seed, result.fold) == (seed, fold)


def test_values_that_are_no_numbers_have_no_value(tmp_path, write):
    sweep = write.folder(tmp_path)
    best = {"metric": "val/loss", "value": float("nan"), "step": 1}
    sweep.job(("seed=1",), summary={"best": best, "metrics": {"test/loss": float("inf"), "x": None, "y": "1"}})
    result = only(sweep)
    assert result.value("val/loss") is None and result.value("test/loss") == float("inf")
    assert list(result.metrics) == ["test/loss", "x"] and result.value("x") is None
    reached = [result.reached(name, "min") for name in ("val/loss", "test/loss", "x", "z")]
    assert reached == [None, float("inf"), float("inf"), None]


def test_the_summary_tells_the_reason_when_the_ledger_has_none(tmp_path, write):
    sweep = write.folder(tmp_path)
    sweep.job(("seed=1",), "failed", summary={"error": "ValueError: odd\nat line 3"})
    assert only(sweep).error == "ValueError: odd"


def test_a_job_without_a_folder_does_not_read_the_sweeps_own(tmp_path, write):
    sweep = write.folder(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"metrics": {"test/loss": 1.0}}))
    job = ledger.Job(0, ("seed=1",), "seed=1", state="skipped", error="no such device")
    sweep.ledger.plan(job)
    sweep.ledger.note(job)
    result = only(sweep)
    assert result.metrics == {} and result.curves == {} and result.state == "skipped"


def test_a_torn_journal_gives_what_is_whole(tmp_path, write):
    sweep = write.folder(tmp_path)
    number = write.train(sweep, ("seed=1",))
    path = tmp_path / str(number) / "journal" / "journal.bin"
    path.write_bytes(path.read_bytes()[:9000])
    result = only(sweep)
    assert 0 < len(result.curves["train/loss"].steps) < 600
    assert "val/accuracy" not in result.curves and result.best.seconds is None and result.best.value > 0


def test_keys_that_all_jobs_share_do_not_set_them_apart(tmp_path, write):
    sweep = write.folder(tmp_path)
    for seed in (1, 2):
        sweep.job(("model=cnn", f"seed={seed}", *(["train.compile=true"] if seed == 2 else [])))
    assert differing_keys(read_results(ledger.read(sweep.close()))) == ["seed", "train.compile"]
