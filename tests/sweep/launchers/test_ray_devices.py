from __future__ import annotations

import pickle
from functools import partial

import pytest
from refused import problems_of

from runner.device import Hardware
from runner.sweep.launchers.ray import RayCluster, devices_in, fits_nowhere, in_words


@pytest.mark.parametrize(
    ("policy", "has_gpus", "devices"),
    [
        (("auto",), True, ("cuda",)),
        (("auto",), False, ("cpu",)),
        (("all",), True, ("cuda",)),
        (("cuda",), True, ("cuda",)),
        (("cpu",), True, ("cpu",)),
        (("cuda", "cpu"), False, ("cpu",)),
        (("cuda:1", "cpu"), True, ("cpu",)),
        (("mps", "auto"), True, ("cuda",)),
    ],
)
def test_a_policy_takes_the_first_that_the_cluster_has(policy, has_gpus, devices):
    assert devices_in(policy, Hardware(), has_gpus=has_gpus) == devices


@pytest.mark.parametrize(
    ("policy", "has_gpus"),
    [
        (("cuda",), False),
        (("cuda:7",), False),
        (("cuda:7",), True),
        (("mps",), True),
        (("xpu:1",), False),
    ],
    ids=str,
)
def test_what_the_cluster_has_not_is_said_with_its_mend(policy, has_gpus, messages):
    messages(problems_of(devices_in, policy, Hardware(), has_gpus=has_gpus))


def test_the_question_travels_to_the_process_that_checks_the_jobs():
    ask = pickle.loads(pickle.dumps(partial(devices_in, has_gpus=True)))
    assert ask(("auto",), Hardware()) == ("cuda",)


@pytest.mark.parametrize(
    ("device", "num_gpus", "gpu_slots", "demand"),
    [
        ("cpu", None, 4, {"CPU": 2, "moon": 1}),
        ("cpu", 2, 1, {"CPU": 2, "moon": 1}),
        ("cuda", None, 1, {"CPU": 2, "GPU": 1, "moon": 1}),
        ("cuda", None, 4, {"CPU": 2, "GPU": 0.25, "moon": 1}),
        ("cuda", 2, 4, {"CPU": 2, "GPU": 2, "moon": 1}),
    ],
)
def test_a_job_asks_for_gpus_by_its_device(device, num_gpus, gpu_slots, demand):
    cluster = RayCluster(num_cpus=2, num_gpus=num_gpus, resources={"moon": 1})
    cluster._gpu_slots = gpu_slots
    assert cluster.demand(device) == demand


def test_a_demand_that_no_single_living_node_could_ever_meet_fits_nowhere():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 1.0, "GPU": 1.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    assert not fits_nowhere({"CPU": 1, "GPU": 1}, nodes)
    assert fits_nowhere({"CPU": 2, "GPU": 1}, nodes)
    assert in_words({"CPU": 2, "GPU": 0.5}) == "2 CPU, 0.5 GPU"
