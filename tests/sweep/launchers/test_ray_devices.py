from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from refused import problems_of

from runner.device import Hardware
from runner.experiment.context import RunContext
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.launchers.ray import RayCluster, Site, devices_in, fits_nowhere, in_words, variables_of


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
def test_devices_in_takes_first_of_cluster(policy, has_gpus, devices):
    assert devices_in(policy, Hardware(), has_gpus=has_gpus) == devices


@pytest.mark.parametrize(
    ("policy", "has_gpus"),
    [(("cuda",), False), (("cuda:7",), False), (("cuda:7",), True), (("mps",), True), (("xpu:1",), False)],
    ids=str,
)
def test_devices_in_missing_device_has_help(policy, has_gpus, messages):
    messages(problems_of(devices_in, policy, Hardware(), has_gpus=has_gpus))


def test_devices_in_can_be_pickled():
    function = pickle.loads(pickle.dumps(partial(devices_in, has_gpus=True)))
    assert function(("auto",), Hardware()) == ("cuda",)


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
def test_demand_of_device_counts_gpus(device, num_gpus, gpu_slots, demand):
    cluster = RayCluster(num_cpus=2, num_gpus=num_gpus, resources={"moon": 1})
    cluster._gpu_slots = gpu_slots
    assert cluster.demand(device) == demand


def test_fits_nowhere_looks_at_single_nodes():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 1.0, "GPU": 1.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    assert not fits_nowhere({"CPU": 1, "GPU": 1}, nodes)
    assert fits_nowhere({"CPU": 2, "GPU": 1}, nodes)
    assert in_words({"CPU": 2, "GPU": 0.5}) == "2 CPU, 0.5 GPU"


class RayError(Exception):
    """Stands for Ray's."""


@pytest.fixture
def ray(monkeypatch):
    """Stands for the module, as an import of Ray changes the process."""
    module = SimpleNamespace(is_initialized=lambda: False, exceptions=SimpleNamespace(RayError=RayError))
    module.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def test_connect_without_listener_names_address(ray):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (problem,) = problems_of(RayCluster(address).connect)
    assert problem.message.startswith("Ray doesn't answer at")
    assert problem.source == f"hydra.launcher.address={address}"


def test_site_without_mark_shares_nothing(ray, tmp_path, monkeypatch):
    monkeypatch.setattr("runner.sweep.launchers.ray.ProcessPool", lambda environment: None)
    monkeypatch.chdir(tmp_path)
    site, mark = Site(str(tmp_path), {}), tmp_path / ".ray"
    shared = [asyncio.run(site.arrived(str(mark), "secret"))]
    for content in ("another sweep's", "secret"):
        mark.write_text(content)
        shared.append(asyncio.run(site.arrived(str(mark), "secret")))
    assert shared == [("node", False), ("node", False), ("node", True)]


def test_job_on_unsharing_node_fails_with_help(ray, tmp_path, capsys):
    """And a line says that no node has what the job needs."""
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}, "sweep": {"slots": {"cuda": 1}}})
    config.sweep.grace_seconds = 1
    cluster = RayCluster(resources={"moon": 1})
    cluster.setup(None, config)
    node = {"Alive": True, "Resources": {"CPU": 1.0}, "NodeManagerAddress": "10.0.0.1"}
    nodes = [{**node, "NodeID": "0", "NodeName": "here"}, {**node, "NodeID": "1", "NodeName": "away"}]
    actor = SimpleNamespace(arrived=SimpleNamespace(remote=lambda *mark: "promise"))
    remote = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda *arguments: actor))
    ray.nodes, ray.remote, ray.kill = lambda: nodes, lambda kind: remote, lambda actor: None
    ray.get, ray.wait = lambda promise: ("1", False), lambda promises, **options: (promises, [])
    cluster._ray = ray
    prepared = PreparedJob(Job(3, (), "seed=3", folder_name="3"), OmegaConf.create({}), devices=("cpu",))
    assert cluster.start(prepared, RunContext()) is None
    assert "waiting: no node of the cluster has 1 CPU, 1 moon; it is needed for seed=3" in capsys.readouterr().out
    assert cluster.ended(0) == []
    assert cluster.start(prepared, RunContext()) == "cpu at away"
    (ended,) = cluster.ended(0)
    assert (ended.number, ended.code) == (3, 1)
    assert f"away does not have the directory {tmp_path}" in ended.cause and "hydra.sweep.dir=" in ended.cause


@pytest.mark.parametrize("is_safe", [False, True])
def test_safe_path_reaches_actors(ray, is_safe, tmp_path, monkeypatch):
    flags = {name: getattr(sys.flags, name) for name in dir(sys.flags) if not name.startswith(("_", "n_"))}
    monkeypatch.setattr(sys, "flags", SimpleNamespace(**flags | {"safe_path": is_safe}))
    monkeypatch.chdir(tmp_path)
    cluster, options = RayCluster(), {}
    cluster._ray = ray
    ray.remote = lambda kind: SimpleNamespace(
        options=lambda **more: options.update(more) or SimpleNamespace(remote=str)
    )
    cluster.actor(object, {"CPU": 1, "GPU": 0.5, "moon": 1})
    variables = options["runtime_env"]["env_vars"]
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (1, 0.5, {"moon": 1})
    assert variables.get("PYTHONSAFEPATH") == ("1" if is_safe else None)
    assert (str(tmp_path) in variables["PYTHONPATH"].split(os.pathsep)) != is_safe


def test_variables_of_job_are_few():
    environment = {
        "HOME": "/h",
        "DATA": "/d",
        "MLFLOW_TRACKING_URI": "http://m",
        "RUNNER_ALLOW": "timm",
        "PATH": "/bin",
    }
    taken = variables_of("data: {path: '${oc.env:DATA}/x'}\nother: ${oc.env: ABSENT,1}\n", environment)
    assert taken == {"DATA": "/d", "MLFLOW_TRACKING_URI": "http://m", "RUNNER_ALLOW": "timm"}
