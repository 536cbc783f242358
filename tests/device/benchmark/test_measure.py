"""The real thing with tiny sizes: on this CPU, on pretended devices, and where a device fails."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from machine_figures import MACHINE, TINY
from simulated import run_simulated

from runner.device import probe
from runner.device.backends import THREADS
from runner.device.benchmark.measure import cause, measure
from runner.device.benchmark.sizes import Bench, Sizes

COPIES = ("copy_to_device_gb_per_s", "copy_from_device_gb_per_s")


def numbers(values):
    """Every figure of a device, by dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in numbers(value))
        elif not isinstance(value, str):
            yield name, value


@pytest.fixture(scope="module")
def here():
    said = []
    return measure(replace(probe(), cuda=(), xpu=(), mps=None), sizes=TINY, say=said.append), said


def test_the_cpu_is_measured(here):
    facts, said = here
    assert (list(facts["devices"]), facts["failed"], facts["at_once"]) == (["cpu"], {}, None)
    cpu = facts["devices"]["cpu"]
    assert list(cpu["matmul_tflops"]) == list(cpu["small_matmul_us"]) == ["fp32", "bf16", "fp16", "fp64"]
    assert not cpu.keys() & {*COPIES}
    assert all(math.isfinite(value) and value > 0 for _, value in numbers(cpu))
    assert said == [f"cpu: products in {name}" for name in cpu["matmul_tflops"]] + [
        *("cpu: copies", "cpu: memory", "cpu: launches and reads")
    ]


def test_each_figure_lies_within_its_spread(here):
    cpu = here[0]["devices"]["cpu"]
    lowest, highest = dict(numbers(cpu["lowest"])), dict(numbers(cpu["highest"]))
    medians = {name: value for name, value in numbers(cpu) if not name.startswith(("lowest", "highest", "matmul_size"))}
    assert medians.keys() == lowest.keys() == highest.keys()
    assert all(lowest[name] <= value <= highest[name] for name, value in medians.items())


@pytest.fixture
def other_settings():
    """Settings of torch that measuring changes on its way."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(THREADS + 1)
    torch.set_float32_matmul_precision("high")
    yield THREADS + 1, "high"
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def test_torch_is_left_as_it_was(other_settings):
    seen = []
    machine = replace(probe(), cuda=(), xpu=(), mps=None)
    facts = measure(machine, sizes=TINY, say=lambda work: seen.append(torch.get_num_threads()))
    assert set(seen) == {facts["num_threads"]} == {THREADS}
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == other_settings


@pytest.mark.parametrize(("free", "at_most"), [(None, 1000), (16000, 1000), (800, 100), (0, 4)])
def test_arrays_leave_room_on_a_full_device(free, at_most):
    assert Bench(torch.device("cpu"), Sizes(), free).at_most(1000) == at_most


@pytest.mark.skipif(torch.cuda.is_available(), reason="the first GPU here would be measured")
def test_a_device_that_fails_is_told_and_the_others_are_measured():
    facts = measure(MACHINE, sizes=TINY, say=lambda work: None)
    assert list(facts["devices"]) == ["cpu"]
    assert list(facts["failed"]) == ["cuda:0"]
    assert "CUDA" in facts["failed"]["cuda:0"] or "NVIDIA driver" in facts["failed"]["cuda:0"]


def test_ctrl_c_is_no_failure_of_a_device():
    def interrupt(work):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(probe(), sizes=TINY, say=interrupt)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("CUDA out of memory.\nTried"), "CUDA out of memory."),
        (MemoryError(), "MemoryError"),
        (RuntimeError("x" * 1000), "x" * 160 + "..."),
    ],
)
def test_a_cause_is_one_short_line(error, text):
    assert cause(error) == text


def measured(device, sizes):
    """Runs where the device is pretended."""
    said = []
    return measure(probe(), sizes=Sizes(**sizes), say=said.append) | {"said": said}


@pytest.mark.slow
def test_two_gpus_are_measured_and_then_both_at_once():
    facts = run_simulated("cuda:1", measured, asdict(TINY))
    assert (list(facts["devices"]), facts["failed"]) == (["cuda:0", "cuda:1", "cpu"], {})
    for name in ("cuda:0", "cuda:1"):
        found = facts["devices"][name]
        assert found["name"] == "Simulated GPU"
        assert list(found["matmul_tflops"]) == ["fp32", "tf32", "bf16", "fp16", "fp64"]
        assert [list(found[copies]) for copies in COPIES] == [["pageable", "pinned"]] * 2
        assert "memcpy_gb_per_s" not in found
    assert facts["at_once"]["devices"] == ["cuda:0", "cuda:1"]
    assert 0 < facts["at_once"]["lowest"] <= facts["at_once"]["ratio"] <= facts["at_once"]["highest"]
    assert facts["said"][-1] == "cuda:0 and cuda:1"


@pytest.mark.slow
def test_a_macs_gpu_is_not_asked_for_what_it_lacks():
    facts = run_simulated("mps", measured, asdict(TINY))
    assert (list(facts["devices"]), facts["failed"], facts["at_once"]) == (["mps", "cpu"], {}, None)
    found = facts["devices"]["mps"]
    assert list(found["matmul_tflops"]) == ["fp32", "bf16", "fp16"]
    assert [list(found[copies]) for copies in COPIES] == [["pageable"]] * 2
    assert "fp64" in facts["devices"]["cpu"]["matmul_tflops"]
