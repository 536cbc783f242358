"""A disk that gets full in the middle of a run, and has room again."""

import os
import subprocess
import sys

import pytest
from own_disks import in_its_own_disks

from runner.version import PACKAGES

pytestmark = pytest.mark.slow

#: a disk of 4 MiB that only these processes see; a file takes all that is left as soon as there are checkpoints
SCRIPT = """
set -eu
mount -t tmpfs -o size=4m tmpfs disk
cd disk
run() { "$PYTHON" -m runner "$@" > ../output 2>&1; }
run $WORDS train.num_epochs=100000 hydra.run.dir=run & process=$!
until [ -e run/checkpoints/last-before.pt ]; do sleep 0.02; done
dd if=/dev/zero of=filler bs=1k 2> /dev/null || true
code=0; wait $process || code=$?
echo "first $code"
cat ../output; ls run/checkpoints
rm filler
code=0; run resume run train.num_epochs=400 || code=$?
echo "second $code"
cat ../output run/summary.json
"""
WORDS = "model=mlp device=cpu train.checkpoint_every_steps=20 metrics.pull_every=20"


@pytest.mark.parametrize("tracked", ["true", "false"])
def test_a_full_disk_ends_the_run_with_a_word_and_it_goes_on_when_there_is_room(tracked, tmp_path):
    command = in_its_own_disks()
    if command is None:
        pytest.skip("no mount namespaces for this account")
    (tmp_path / "disk").mkdir()
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(PACKAGES),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WORDS": f"{WORDS} tracking.enabled={tracked} tracking.uri=sqlite:///{tmp_path}/runs.db tracking.grace_seconds=2",
    }
    done = subprocess.run(
        [*command, "bash", "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    before, _, after = done.stdout.partition("second ")
    assert "first 1" in before and after.startswith("0"), done.stdout + done.stderr
    assert "Traceback" not in done.stdout and "Logging error" not in done.stdout, done.stdout
    assert "the disk is full" in before and "python -m runner resume run" in before
    assert "last.pt" in before and "writing" not in before
    assert '"status": "finished"' in after
