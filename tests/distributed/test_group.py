"""Processes that form a group, or fail to."""

import socket
from datetime import timedelta

import pytest
import torch

from runner import cli
from runner.distributed import group
from runner.distributed.environment import RankInfo, UnmetError
from runner.distributed.group import join

SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(group, "JOIN_TIMEOUT", timedelta(seconds=0.2))


@pytest.fixture
def port():
    """A free port on this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_srun_without_all_processes_names_the_place(rank, port):
    with pytest.raises(UnmetError) as raised:
        join(RankInfo(rank, 2, rank, 2, "127.0.0.1", port, "srun"), backend="gloo", device=torch.device("cpu"))
    (problem,) = raised.value.problems
    assert problem.source == f"srun with 2 processes, which meet at 127.0.0.1:{port}"
    assert f"process {rank} did not meet the others" in problem.message and "\n" not in problem.message
    assert "srun --output=%t.log" in problem.help and f"port {port}" in problem.help


def test_each_that_waited_reports_it(port, own_folder, monkeypatch, capsys):
    for name, value in (SRUN | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("runner.distributed.environment.FIRST_PORT", port)
    words = ["device=cpu", "model=linear", "tracking.enabled=false", "hydra.run.dir=run"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "--> srun with 2 processes" in said and "Traceback" not in said
    assert not (own_folder / "run").exists()
