"""The device of a plan, and the assumptions about it."""

import pytest
from omegaconf import OmegaConf
from refused import problems_of

from runner.device import Gpu, Hardware
from runner.device.hardware import Speeds
from runner.tools.plan import device_catalogue, planned_device

GIB = 2**30
NONE = Hardware(memory_bytes=16 * GIB, free_memory_bytes=8 * GIB)
BOX = Hardware(
    memory_bytes=64 * GIB,
    cuda=(Gpu("NVIDIA L4", 22 * GIB, 20 * GIB, (8, 9)),),
    cuda_build="13.0",
    arch_list=("sm_90", "sm_80"),
)


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch):
    monkeypatch.setattr(planned_device.benchmark, "read", lambda hardware: {})


def cfg(device, **plan):
    return OmegaConf.create({"device": device, "plan": {"device_memory": None, "device_name": None, **plan}})


@pytest.mark.parametrize(
    ("device", "hardware", "name", "memory"),
    [
        ("cpu", NONE, "cpu", 16 * GIB),
        ("auto", NONE, "cpu", 16 * GIB),
        ("cuda", NONE, "cuda:0", None),
        ("cuda:3", NONE, "cuda:3", None),
        ("mps", NONE, "mps", None),
        (["cuda:1", "cpu"], NONE, "cuda:1", None),
        ("cuda:0", BOX, "cuda:0", 22 * GIB),
        ("auto", BOX, "cuda:0", 22 * GIB),
        ("cuda:1", BOX, "cuda:1", None),
    ],
)
def test_first_named_device_is_planned(device, hardware, name, memory):
    found = planned_device.find(cfg(device), hardware)
    assert (found.device, found.memory_bytes) == (name, memory)
    assert found.hardware.devices()[name]
    assert "not on this machine" in found.choice.reason or name in hardware.devices()


def test_set_memory_wins_over_data_sheet():
    named = planned_device.find(cfg("cuda:0", device_name="A100-80GB"), BOX)
    assert named.memory_bytes == device_catalogue.MODELS["A100-80GB"].memory_bytes
    assert named.capability == (8, 0)
    assert named.speeds.flops_per_second["bf16"] == 312e12
    assert named.hardware.cuda[0].name == "A100-80GB"
    both = planned_device.find(cfg("cuda:0", device_name="A100-80GB", device_memory="10GiB"), BOX)
    assert (both.memory_bytes, both.memory_from) == (10 * GIB, "plan.device_memory=10GiB")


def test_what_was_measured_here_is_used(monkeypatch):
    done = Speeds({"fp32": 1e12}, 1e11, 1e10, 5e-6, "2026-11-21T10:00:00+00:00")
    monkeypatch.setattr(planned_device.benchmark, "read", lambda hardware: {"cuda:0": done})
    found = planned_device.find(cfg("cuda:0"), BOX)
    assert (found.speeds.flops_per_second, found.speeds.launch_seconds) == ({"fp32": 1e12}, 5e-6)
    assert found.speeds_from == "measured here by devices --bench, 2026-11-21"
    assert planned_device.find(cfg("cuda:1"), BOX).speeds_from == "not known"


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * GIB), ("1.5 GB", 3 * GIB // 2), ("512m", 2**29), (1024, 1024), ("2T", 2**41)]
)
def test_sizes_as_people_write_them(text, count):
    assert planned_device.num_bytes(text) == count


@pytest.mark.parametrize("text", ["lots", "-1GiB", "0", "80 apples", ""])
def test_invalid_size_is_refused(text, messages):
    messages(problems_of(planned_device.num_bytes, text))


def test_fitting_devices_are_listed_smallest_first():
    found = device_catalogue.fits(30 * GIB, kind="cuda", share=0.9)
    assert found[0] == "A100-40GB"
    assert "H100" in found
    assert "T4" not in found


def test_device_name_implies_kind_for_auto():
    assert planned_device.find(cfg("auto", device_name="T4"), NONE).device == "cuda:0"
    (problem,) = problems_of(planned_device.find, cfg("cpu", device_name="T4"), NONE)
    assert problem.suggestions == ("device=cuda plan.device_name=T4",)
