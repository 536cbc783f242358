import pytest
from refused import problems_of

from runner.device import Gpu, Hardware, diagnose, parse
from runner.device.unavailable import why_not
from runner.sweep.launchers import local
from runner.sweep.launchers.local import Slot, choice_at, cpu_groups, devices_for, pick, slots_of

GIB = 2**30
ONE_EACH = {"cpu": 1, "cuda": 1, "mps": 1, "xpu": 1}


def gpu(free):
    return Gpu("H", 80 * GIB, free * GIB, (9, 0))


CUDA = dict(torch_version="2.13.0", cuda_build="13.0", arch_list=("sm_90",))
BARE = Hardware()
BOX = Hardware(cuda=(gpu(10), gpu(70), gpu(40)), **CUDA)
MAC = Hardware(system="darwin", machine="arm64", mps_built=True, mps=Gpu("M3", 16 * GIB, 12 * GIB))


def names(found):
    return [str(slot) for slot in found]


@pytest.mark.parametrize(
    ("hardware", "changes", "expected"),
    [
        (BARE, {}, ["cpu"]),
        (BARE, {"cpu": 3}, ["cpu", "cpu (2)", "cpu (3)"]),
        (BOX, {}, ["cuda:1", "cuda:2", "cuda:0", "cpu"]),
        (BOX, {"cuda": 2}, ["cuda:1", "cuda:2", "cuda:0", "cpu", "cuda:1 (2)", "cuda:2 (2)", "cuda:0 (2)"]),
        (MAC, {"cpu": 2}, ["mps", "cpu", "cpu (2)"]),
    ],
)
def test_slots_of_puts_most_memory_first(hardware, changes, expected):
    assert names(slots_of(hardware, ONE_EACH | changes)) == expected


@pytest.mark.parametrize(
    ("device", "hardware", "expected"),
    [
        ("cpu", BOX, ["cpu"]),
        ("cuda:2", BOX, ["cuda:2"]),
        ("cuda", BOX, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", BOX, ["cuda:0", "cuda:1", "cuda:2"]),
        ("auto", MAC, ["mps"]),
        ("auto", BARE, ["cpu"]),
        (["cuda:7", "mps", "cpu"], BARE, ["cpu"]),
        (["cuda:7", "auto"], MAC, ["mps"]),
        (["cuda:7", "cuda:1", "cpu"], BOX, ["cuda:1"]),
        (["mps", "cuda"], BOX, ["cuda:0", "cuda:1", "cuda:2"]),
        ("all", MAC, ["mps"]),
    ],
)
def test_devices_for_allows_devices_of_kind(device, hardware, expected):
    assert list(devices_for(parse(device), hardware)) == expected


@pytest.mark.parametrize(("device", "hardware"), [("cuda:7", BOX), ("mps", BARE), (["mps", "cuda:0"], BARE)])
def test_devices_for_missing_device_raises(device, hardware):
    assert problems_of(devices_for, parse(device), hardware)


def test_devices_for_missing_device_explains_driver():
    machine = Hardware(**CUDA)
    (problem,) = problems_of(devices_for, ("cuda",), machine)
    assert problem.message == why_not("cuda", diagnose(machine)).cause


def test_pick_spreads_over_devices():
    free = slots_of(BOX, ONE_EACH | {"cuda": 2})
    taken = []
    for _ in range(6):
        slot = pick(["cuda:0", "cuda:1", "cuda:2"], free, taken)
        free.remove(slot)
        taken.append(slot)
    assert [slot.device for slot in taken] == ["cuda:1", "cuda:2", "cuda:0"] * 2
    assert pick(["cuda:0", "cuda:1", "cuda:2"], free, taken) is None
    assert pick(["cpu"], free, taken) == Slot("cpu")

    free = [Slot("cuda:1", 1), Slot("cuda:0")]
    assert pick(["cuda:0", "cuda:1"], free, [Slot("cuda:1")]) == Slot("cuda:0")


@pytest.mark.parametrize(
    ("cpu", "num_threads", "gib", "expected"),
    [
        (1, None, 64, 8),
        (1, 1, 64, 8),
        (1, 3, 64, 2),
        (1, 16, 64, 1),
        (1, None, 3, 3),
        (1, None, 0, 1),
        (2, None, 64, 2),
    ],
)
def test_groups_of_cpu_counts_cores(cpu, num_threads, gib, expected):
    found = cpu_groups(ONE_EACH | {"cpu": cpu}, num_cpus=8, num_threads=num_threads, free_bytes=gib * 2**30)
    assert found == expected


def test_slots_of_groups_come_last():
    free = slots_of(BARE, ONE_EACH, groups=3)
    assert [slot.for_groups for slot in free] == [False, True, True]
    assert pick(["cpu"], free[1:], free[:1]) is None
    assert pick(["cpu"], free[1:], free[:1], is_group=True) == free[1]
    assert slots_of(BARE, ONE_EACH | {"cpu": 3}, groups=3) == slots_of(BARE, ONE_EACH | {"cpu": 3})
    assert names(slot for slot in slots_of(BOX, ONE_EACH, groups=2) if slot.for_groups) == ["cpu (2)"]


@pytest.mark.parametrize(
    ("slot", "visible", "expected"),
    [
        (Slot("cuda:1"), None, {"CUDA_VISIBLE_DEVICES": "1"}),
        (Slot("cuda:1"), "4,6", {"CUDA_VISIBLE_DEVICES": "6"}),
        (Slot("cuda:0", 1), "GPU-ab, GPU-cd", {"CUDA_VISIBLE_DEVICES": "GPU-ab"}),
        (Slot("cpu"), "0,1", {"CUDA_VISIBLE_DEVICES": ""}),
        (Slot("mps"), None, {}),
    ],
)
def test_a_job_sees_only_its_gpu(slot, visible, expected):
    assert local.environment_of(slot, visible=visible) == expected


def test_choice_at_gpu_slot_is_cuda_0():
    choice = choice_at(Slot("cuda:2"), parse("cuda:2"))
    assert (choice.device, choice.here, choice.reason) == ("cuda:2", "cuda:0", "as asked")
    assert choice_at(Slot("cuda:2"), parse("auto")).reason.startswith("auto: ")
    assert choice_at(Slot("cpu"), parse("cpu")).here == "cpu"


@pytest.mark.parametrize(("cpu", "num_cpus", "expected"), [(1, 8, None), (2, 8, 4), (3, 8, 2), (8, 4, 1)])
def test_slots_of_the_cpu_share_its_cores(cpu, num_cpus, expected):
    assert local.threads_of(ONE_EACH | {"cpu": cpu}, num_cpus=num_cpus) == expected
