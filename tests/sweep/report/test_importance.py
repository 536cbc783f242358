import shutil
import sys

import pytest
from synthetic_sweep import study

from runner.sweep.report.report import read_importance, read_report


def test_without_a_study_nothing_is_known(tmp_path):
    assert read_importance(tmp_path) == {}


def test_without_optuna_nothing_is_known(tmp_path, monkeypatch):
    (tmp_path / "optuna.db").touch()
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert read_importance(tmp_path) == {}


@pytest.mark.slow
def test_what_moved_the_values_mattered(tmp_path, search_folder):
    pytest.importorskip("optuna")
    shutil.copytree(search_folder, tmp_path / "sweep")
    study(tmp_path / "sweep")
    shares = read_report(tmp_path / "sweep").importance
    assert next(iter(shares)) == "optimizer.lr" and set(shares) == {"optimizer.lr", "model.width", "optimizer"}
    assert sum(shares.values()) == pytest.approx(1) and shares == read_importance(tmp_path / "sweep")


@pytest.mark.slow
@pytest.mark.parametrize("num_trials", [0, 10])
def test_few_trials_say_nothing(tmp_path, num_trials):
    pytest.importorskip("optuna")
    study(tmp_path, num_trials)
    assert read_importance(tmp_path) == {}


def test_a_study_that_cannot_be_read_says_nothing(tmp_path):
    pytest.importorskip("optuna")
    (tmp_path / "optuna.db").write_bytes(b"this is no database, and long enough to be looked at as one" * 50)
    assert read_importance(tmp_path) == {}
