"""The same run by 1, 2 and 4 processes: equal curves, up to rounding."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runner.tracking.journal_reader import read_series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).with_name("rank_cases.py")
CASES, FEW = map(runpy.run_path(str(SCRIPT)).get, ("CASES", "FEW"))
#: float32 sums in another order
RTOL = 1e-5


@pytest.fixture(scope="module")
def trained(warm, tmp_path_factory):
    """The directories of all cases, by the number of processes."""
    root = tmp_path_factory.mktemp("trained")
    process = warm.program(
        [sys.executable, str(SCRIPT), str(root)], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    told, _ = process.communicate()
    assert process.returncode == 0, told  # prints the error of the first process that fails, early
    return root


@pytest.mark.parametrize(
    ("num", "case"), [(2, case) for case in CASES if case != "norms"] + [(4, case) for case in FEW]
)
def test_curves_are_those_of_one_process(trained, num, case):
    alone, together = (read_series(trained / str(count) / case) for count in (1, num))
    assert alone.keys() == together.keys() and "train/loss" in alone
    for name in alone:
        assert alone[name][0].tolist() == together[name][0].tolist(), name  # each step once, and the same ones
        if not name.startswith("speed/"):
            np.testing.assert_allclose(together[name][2], alone[name][2], rtol=RTOL, err_msg=name)


@pytest.mark.parametrize("num", [2, 4])
def test_one_summary_and_one_log_tell_of_all(trained, num):
    summary, alone = (
        json.loads((trained / str(count) / "one row left" / "summary.json").read_text()) for count in (num, 1)
    )
    assert (summary["num_processes"], alone["num_processes"]) == (num, 1)
    for key in ("num_steps", "num_samples", "num_epochs", "ending"):
        assert summary[key] == alone[key]
    assert summary["host_reads"]["points"] == alone["host_reads"]["points"]
    assert summary["host_reads"]["unexpected"] == 0


def test_a_model_in_parts_is_not_read_by_the_host(trained):
    summary = json.loads((trained / "2" / "accumulated in parts" / "summary.json").read_text())
    assert (summary["num_processes"], summary["host_reads"]["unexpected"]) == (2, 0)


def test_a_training_that_stops_early_does_so_everywhere(trained):
    summary = json.loads((trained / "2" / "stopped early" / "summary.json").read_text())
    assert (summary["ending"], summary["num_epochs"]) == ("patience", 2)


def test_a_model_with_norms_trains(trained):
    """Each process normalizes with its rows, so that the curves differ; all evaluate with the first one's statistics."""
    alone, together = (read_series(trained / count / "norms") for count in ("1", "2"))
    assert alone["train/loss"][0].tolist() == together["train/loss"][0].tolist()
    assert np.isfinite(together["val/loss"][2]).all()
