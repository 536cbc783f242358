"""Plans of the runner's models: each would run on hardware that this machine lacks, and reads nothing."""

import functools

import pytest
from judge import CASES, plan_models
from simulated import run_simulated

pytestmark = pytest.mark.slow
NAMES = {"cuda:1": sorted(CASES), "mps": ["cnn on signals"]}


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """In a directory without conf/, whose files would replace the runner's."""
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda device: run_simulated("cpu", plan_models, device, NAMES[device], cwd=folder))


@pytest.mark.parametrize(("device", "name"), [(device, name) for device in NAMES for name in NAMES[device]])
def test_each_would_run_and_reads_nothing(name, device, judged):
    answer = judged(device)[name]
    assert "problems" not in answer, answer
    assert (answer["findings"], answer["unknown"], answer["host_reads"]) == ([], "", [])
    assert answer["memory"]["peak_bytes"] > answer["num_parameters"]
    assert answer["step"]["flops"] > 0
