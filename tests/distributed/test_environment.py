"""The rank and world size that launchers put in a process's environment."""

import pytest

from runner import cli
from runner.distributed.environment import RankInfo, rank_here
from runner.errors import RunnerError

TORCHRUN = dict(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_ADDR="node1", MASTER_PORT="1234")
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1230042",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


def read(environ, host="node7"):
    return rank_here(environ, first_host=lambda nodes: host)


def test_rank_here_reads_torchrun_before_srun():
    of_torchrun = RankInfo(3, 4, 1, 2, "node1", 1234, "torchrun")
    assert read(TORCHRUN) == read(SRUN | TORCHRUN) == of_torchrun
    assert read(SRUN) == RankInfo(5, 7, 1, 3, "node7", 15_042, "srun")
    assert read(SRUN, host="").address == "10.0.0.1", "without scontrol, the node that has started srun"


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2)]
)
def test_tasks_of_a_node(tasks, node, expected):
    found = read(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)})
    assert found.local_num == expected


ALONE = [
    {},
    {"WORLD_SIZE": "4"},
    {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
    {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    {name: value for name, value in SRUN.items() if "STEP" not in name},  # the process of a batch script
]


@pytest.mark.parametrize("environ", ALONE)
def test_single_process_has_no_rank(environ):
    assert read(environ) is None


@pytest.mark.parametrize(
    "environ", [TORCHRUN | {"RANK": "four"}, TORCHRUN | {"RANK": "4"}, TORCHRUN | {"LOCAL_RANK": "2"}]
)
def test_impossible_ranks_are_refused(environ):
    with pytest.raises(RunnerError, match="unset"):
        read(environ)


def test_a_sweep_that_a_file_asks_for_is_refused_in_each_of_several_processes(own_folder, monkeypatch, capsys):
    for name, value in (TORCHRUN | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    (own_folder / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {mode: MULTIRUN}\n")
    assert cli.main(["-cd", ".", "-cn", "mine", "hydra.sweep.dir=sweep"]) == 2
    assert "hydra.mode: MULTIRUN, in a file" in (said := capsys.readouterr().err)
    assert "torchrun has started 4 processes, and a sweep starts its jobs itself" in said
    assert [path.name for path in own_folder.iterdir()] == ["mine.yaml"]
