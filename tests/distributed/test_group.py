"""Processes that come together, or do not."""

import socket
import threading
from datetime import timedelta

import pytest
import torch

from runner import cli
from runner.distributed import group
from runner.distributed.environment import RankInfo, UnmetError
from runner.distributed.group import join

SRUN = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(group, "MOST_APART", timedelta(seconds=0.2))


@pytest.fixture
def port():
    """Of this machine, that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("rank", "so"),
    [(0, "not all of them were there after 0:00:00.2"), (1, "process 1 did not reach the first one in 0:00:00.2")],
)
def test_of_srun_a_process_that_does_not_come_is_told_with_what_to_look_at(rank, so, port):
    with pytest.raises(UnmetError) as raised:
        join(RankInfo(rank, 2, rank, 2, "127.0.0.1", port, "srun"), backend="gloo", device=torch.device("cpu"))
    (problem,) = raised.value.problems
    assert problem.source == f"srun with 2 processes, which meet at 127.0.0.1:{port}"
    assert so in problem.message and "\n" not in problem.message
    assert "srun --output=%t.log" in problem.help and f"port {port}" in problem.help


def test_a_port_that_is_taken_is_told_as_one():
    with socket.socket() as one, pytest.raises(UnmetError) as raised:
        one.bind(("", 0))
        one.listen()
        place = RankInfo(0, 2, 0, 2, "127.0.0.1", one.getsockname()[1], "srun")
        join(place, backend="gloo", device=torch.device("cpu"))
    (problem,) = raised.value.problems
    assert "something else listens there" in problem.message and "one such srun at a time" in problem.help


def test_of_srun_a_first_process_that_ends_before_all_are_there_is_told(port):
    stores = [torch.distributed.TCPStore("127.0.0.1", port, 3, True, wait_for_workers=False)]
    ending = threading.Timer(0.3, stores.clear)
    ending.start()
    with pytest.raises(UnmetError, match="process 1 lost the others before all were there"):
        join(RankInfo(1, 3, 1, 3, "127.0.0.1", port, "srun"), backend="gloo", device=torch.device("cpu"))
    ending.join()


@pytest.mark.parametrize("rank", [0, 1])
def test_each_that_waited_tells_it(rank, port, own_folder, monkeypatch, capsys):
    for name, value in (SRUN | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("runner.distributed.environment.FIRST_PORT", port)
    words = ["device=cpu", "model=linear", "tracking.enabled=false", "hydra.run.dir=run"]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "--> srun with 2 processes" in said and "Traceback" not in said
    assert not (own_folder / "run").exists()
