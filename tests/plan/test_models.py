"""Plans of the models that come with the runner: on hardware that is not here each would run and reads nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from once import once

sys.path.insert(0, str(Path(__file__).parent))

from judge_models import CASES

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """In a folder without a conf/ of its own, whose files would stand before the runner's."""
    folder = tmp_path_factory.mktemp("models")

    @once
    def outcome(device):
        answer = folder / f"{device.partition(':')[0]}.json"
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "judge_models.py"), device, str(answer)]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=290
        )
        return (json.loads(answer.read_text()), "") if done.returncode == 0 else (None, done.stderr)

    def answers(device):
        found, error = outcome(device)
        assert found is not None, error
        return found

    return answers


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
@pytest.mark.parametrize("name", CASES)
def test_each_would_run_and_reads_nothing(name, device, judged):
    answer = judged(device)[name]
    assert "faults" not in answer, answer
    assert (answer["findings"], answer["unknown"], answer["host_reads"]) == ([], "", [])
    assert answer["memory"]["peak_bytes"] > answer["num_parameters"]
    assert answer["step"]["flops"] > 0
