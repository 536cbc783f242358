"""The device of each of several processes, on machines that need not be here."""

import pytest
from refused import problems_of

from runner.device import Gpu, Hardware, parse
from runner.device.choose import backend_of, device_of_process, devices_of_processes
from runner.errors import RunnerError

GIB = 2**30


def gpu(free=70):
    return Gpu("H100", 80 * GIB, free * GIB, (9, 0))


def machine(*free, **more):
    return Hardware(cuda_build="12.8", arch_list=("sm_90",), torch_version="2.13", cuda=tuple(map(gpu, free)), **more)


NONE, ONE, FOUR = machine(), machine(70), machine(10, 70, 30, 70)
MAC = Hardware(system="darwin", mps_built=True, mps=Gpu("M3 GPU", 16 * GIB, 10 * GIB))
INTEL = Hardware(xpu_built=True, xpu=(Gpu("Max 1100"), Gpu("Max 1100")))
#: an old GPU that this torch has no kernels for beside two that it has
MIXED = machine(70, 60)
MIXED = Hardware(**{**vars(MIXED), "cuda": (MIXED.cuda[0], Gpu("K80", 12 * GIB, 12 * GIB, (3, 7)), MIXED.cuda[1])})

CASES = [
    ("auto", "auto", NONE, ["cpu"]),
    ("auto", "auto", FOUR, ["cuda:1"]),
    ("cuda", "auto", FOUR, ["cuda:1"]),
    ("all", "auto", NONE, ["cpu"]),
    ("all", "auto", ONE, ["cuda:0"]),
    ("all", "auto", FOUR, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("all", "auto", MIXED, ["cuda:0", "cuda:2"]),
    ("all", "auto", MAC, ["mps"]),
    ("all", "auto", INTEL, ["xpu:0", "xpu:1"]),
    ("all", 2, FOUR, ["cuda:0", "cuda:1"]),
    ("all", 3, NONE, ["cpu", "cpu", "cpu"]),
    ("all", 1, FOUR, ["cuda:0"]),
    ("cpu", 4, FOUR, ["cpu"] * 4),
    ("auto", 2, NONE, ["cpu", "cpu"]),
    ("auto", 2, FOUR, ["cuda:1", "cuda:3"]),
    ("cuda", 3, FOUR, ["cuda:1", "cuda:3", "cuda:2"]),
    ("xpu", 2, INTEL, ["xpu:0", "xpu:1"]),
    (["cuda", "cpu"], 2, NONE, ["cpu", "cpu"]),
    (["cuda", "cpu"], 2, FOUR, ["cuda:1", "cuda:3"]),
    ("cuda:1", 1, FOUR, ["cuda:1"]),
    ("mps", 1, MAC, ["mps"]),
]


@pytest.mark.parametrize(("device", "count", "hardware", "expected"), CASES)
def test_each_process_gets_a_device(device, count, hardware, expected):
    found = devices_of_processes(parse(device), count, hardware)
    assert [choice.device for choice in found] == expected
    if len(set(expected)) > 1:
        assert all(name in found[0].reason for name in expected)


REFUSED = [
    ("cuda", 2, ONE, "cuda:0", "train.num_processes=1"),
    ("auto", 5, FOUR, "cuda:0, cuda:1, cuda:2, cuda:3", "train.num_processes=4"),
    ("all", 3, MIXED, "cuda:0, cuda:2", "train.num_processes=2"),
    ("cuda:1", 2, FOUR, "cuda:1 is one device", "device=all"),
    ("mps", 2, MAC, "a Mac has one GPU", "device=cpu"),
    ("auto", 2, MAC, "a Mac has one GPU", "train.num_processes=1"),
    ("xpu:0", 2, INTEL, "xpu:0 is one device", "device=xpu"),
    ("cuda", 2, NONE, "the driver finds no GPU", "device=cpu"),
]


@pytest.mark.parametrize(("device", "count", "hardware", "so", "write"), REFUSED)
def test_what_is_not_there_is_refused_with_what_is(device, count, hardware, so, write):
    (problem,) = problems_of(devices_of_processes, parse(device), count, hardware)
    assert so in problem.message and write in problem.help
    assert str(device) in problem.source


def test_a_process_that_is_started_by_others_takes_the_device_of_its_place():
    assert [device_of_process(("all",), rank, 4, FOUR).device for rank in range(4)] == [f"cuda:{at}" for at in range(4)]
    assert device_of_process(("cpu",), 3, 4, FOUR).device == "cpu"
    with pytest.raises(RunnerError, match="each process needs its own device"):
        device_of_process(("cuda",), 1, 2, ONE)


def test_processes_that_choose_for_themselves_take_one_each_though_others_have_begun():
    """Each sees the memory that those before it have taken."""
    free, taken = [79, 79, 79, 79], []
    for rank in (2, 0, 3, 1):
        taken.append(device_of_process(("auto",), rank, 4, machine(*free)).device)
        free[int(taken[-1].removeprefix("cuda:"))] -= 1
    assert taken == ["cuda:2", "cuda:0", "cuda:3", "cuda:1"]
    assert [device_of_process(("cuda",), rank, 2, FOUR).device for rank in range(2)] == ["cuda:0", "cuda:1"]


def test_a_process_that_may_see_one_gpu_takes_that():
    assert device_of_process(("cuda",), 3, 4, machine(70, visible="3")).device == "cuda:0"


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:3", "nccl"), ("xpu:0", "xccl")])
def test_what_joins_them(device, backend):
    assert backend_of(device) == backend
