"""A disk that becomes full in the middle of a run, and later has space again."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from own_disks import in_its_own_disks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "support" / "full_disk.py"
WORDS = ("model=mlp", "device=cpu", "task.plots=false", "train.checkpoint_every_steps=20", "metrics.pull_every=20")


@pytest.mark.parametrize("tracked", ["true", "false"])
def test_full_disk_ends_run_that_can_resume(tracked, warm, tmp_path, empty_store):
    if in_its_own_disks() is None:
        pytest.skip("no mount namespaces for this account")
    (tmp_path / "disk").mkdir()
    shutil.copy(empty_store, tmp_path / "runs.db")
    words = [f"tracking.enabled={tracked}", f"tracking.uri=sqlite:///{tmp_path}/runs.db", "tracking.grace_seconds=2"]
    command = [sys.executable, str(SCRIPT), str(tmp_path / "disk"), *WORDS, *words]
    process = warm.program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told, _ = process.communicate()
    before, _, after = told.partition("second ")
    assert "first 1" in before and after.startswith("0"), told
    assert "Traceback" not in told and "Logging error" not in told, told
    assert "the disk is full" in before and "python -m runner resume run" in before
    assert "last.pt" in before and "writing" not in before
    assert '"status": "finished"' in after
