"""The place that launchers give a process in its environment."""

import pytest

from runner.errors import RunnerError
from runner.ranks.around import Place, place_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
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


def place(environ, host="node7"):
    return place_of(environ, first_host=lambda nodes: host)


def test_torchrun():
    assert place(TORCHRUN) == Place(3, 4, 1, 2, "node1", 1234, "torchrun")


def test_srun():
    assert place(SRUN) == Place(5, 7, 1, 3, "node7", 15_042, "srun")


def test_srun_without_scontrol_goes_by_the_launching_node():
    assert place(SRUN, host="").address == "10.0.0.1"


def test_torchrun_inside_of_a_job_of_slurm_wins():
    assert place(SRUN | TORCHRUN).by == "torchrun"


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2)]
)
def test_tasks_of_a_node(tasks, node, expected):
    found = place(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)})
    assert found.local_num == expected


ALONE = [
    {},
    {"WORLD_SIZE": "4"},
    {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
    {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    {name: value for name, value in SRUN.items() if "STEP" not in name},  # a batch script's own process
]


@pytest.mark.parametrize("environ", ALONE)
def test_alone(environ):
    assert place(environ) is None


@pytest.mark.parametrize(
    "environ", [TORCHRUN | {"RANK": "four"}, TORCHRUN | {"RANK": "4"}, TORCHRUN | {"LOCAL_RANK": "2"}]
)
def test_what_names_no_place_is_refused(environ):
    with pytest.raises(RunnerError, match="unset"):
        place(environ)
