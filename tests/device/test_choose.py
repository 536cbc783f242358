"""The choice of a device as tables over described machines: without a GPU, and without mocks."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from refused import problems_of

from runner.device import Driver, Gpu, Hardware, check_precision, choose, diagnose, parse, precisions, probe, resolve
from runner.device import hardware as looking
from runner.device.choose import backend_of, device_of_process, devices_of_processes
from runner.device.hardware import GIB
from runner.errors import RunnerError


def gpu(free, total=80, capability=(9, 0), name="H100"):
    return Gpu(name, total * GIB, round(free * GIB), capability)


KERNELS = ("sm_75", "sm_80", "sm_90", "compute_120")
LAPTOP = Hardware(torch_version="2.13.0+cpu", driver=Driver(library_error="not found"))
CUDA = dict(torch_version="2.13.0+cu130", cuda_build="13.0", arch_list=KERNELS, driver=Driver(cuda=13000, init_code=0))
ONE = Hardware(**CUDA, cuda=(gpu(70),))
EIGHT = Hardware(**CUDA, cuda=tuple(gpu(free) for free in (10, 70, 70, 5, 79.5, 0.5, 40, 60)))
FULL = Hardware(**CUDA, cuda=(gpu(0.5), gpu(0.2)))
MIXED = Hardware(**CUDA, cuda=(gpu(8, 8, (6, 1), "GTX 1080"), gpu(3, 80)))
OLD = Hardware(**CUDA, cuda=(gpu(8, 8, (6, 1), "GTX 1080"),))
MAC = Hardware(
    system="darwin",
    machine="arm64",
    macos="15.5",
    torch_version="2.13.0",
    mps_built=True,
    mps=Gpu("M2 GPU", 12 * GIB, 9 * GIB),
)
INTEL = Hardware(torch_version="2.13.0+xpu", xpu_built=True, xpu=(Gpu("Arc"), Gpu("Arc")))


@pytest.mark.parametrize(
    ("value", "machine", "device", "reason"),
    [
        ("auto", LAPTOP, "cpu", "no GPU found; no cuda: torch 2.13.0+cpu is a CPU-only build"),
        ("auto", ONE, "cuda:0", "the only GPU, 70.0 of 80.0 GiB free"),
        ("auto", EIGHT, "cuda:4", "the most free memory, 79.5 of 80.0 GiB"),
        ("auto", FULL, "cuda:0", "nearly full"),
        ("auto", MIXED, "cuda:1", "not cuda:0: GTX 1080 has compute capability 6.1"),
        ("auto", OLD, "cpu", "compute capability 6.1"),
        ("auto", MAC, "mps", "the Mac's GPU"),
        ("auto", INTEL, "xpu:0", "Intel"),
        ("cpu", EIGHT, "cpu", "as asked"),
        ("cuda", EIGHT, "cuda:4", "the most free memory"),
        ("cuda:3", EIGHT, "cuda:3", "as asked"),
        ("mps", MAC, "mps", "as asked"),
        ("mps:0", MAC, "mps", "as asked"),
        ("xpu", INTEL, "xpu:0", "as asked"),
        ("xpu:1", INTEL, "xpu:1", "as asked"),
        ("all", LAPTOP, "cpu", "no GPU found"),
        ("all", ONE, "cuda:0", "the only accelerator"),
        ("all", MAC, "mps", "the only accelerator"),
        ("all", FULL, "cuda:0", "the first of cuda:0, cuda:1"),
        (["cuda:1", "cpu"], EIGHT, "cuda:1", "as asked"),
        (["cuda:1", "cpu"], ONE, "cpu", "not cuda:1: this machine has 1 CUDA device: cuda:0"),
        (["mps", "cuda", "cpu"], EIGHT, "cuda:4", "not mps: mps is Apple's GPU"),
        (["cuda:9", "auto"], MAC, "mps", "not cuda:9"),
    ],
)
def test_resolve_chooses_a_device_with_a_reason(value, machine, device, reason):
    choice = resolve(parse(value), machine)
    assert choice.device == device
    assert reason in choice.reason


SUGGESTED = {
    "device=cuda": ("cud", "gpu", ["cpu", "cud"]),
    "device=cuda:0": ("NVIDIA:0", "CUDA:0", "cuda:-1", "cuda0", -1),
    "device=cuda:1": ("gpu:1",),
    "device=cuda:3": (3,),
    "device=[cuda:0,cuda:1]": ("cuda:0,1",),
    "device=xpu:2": ("intel:2",),
    "device=mps": ("mps:1", "metal"),
    "device=cpu": ("cpu:0",),
    "device=all": (["all", "cpu"],),
    "device=auto": ("", None, True, 1.5, {}, [], [["cpu"]], "tpu"),
}


@pytest.mark.parametrize(("fix", "value"), [(fix, value) for fix, values in SUGGESTED.items() for value in values])
def test_invalid_device_suggests_the_nearest_form(fix, value):
    with pytest.raises(RunnerError) as caught:
        parse(value)
    assert fix in str(caught.value)


def linux(driver=None, **facts):
    return Hardware(torch_version="2.13.0+cu130", cuda_build="13.0", arch_list=KERNELS, driver=driver, **facts)


def mac(**facts):
    return replace(MAC, mps=None, **facts)


@pytest.mark.parametrize(
    ("device", "machine", "cause", "fix"),
    [
        ("cuda", LAPTOP, "CPU-only build", "CUDA build"),
        ("cuda", replace(LAPTOP, driver=Driver(gpu_on_bus=True)), "there is an NVIDIA GPU", "CUDA build"),
        ("cuda", MAC, "a Mac has no CUDA", "device=mps"),
        ("cuda", linux(Driver(library_error="x")), "no NVIDIA driver is installed", "its driver"),
        ("cuda", linux(Driver(library_error="x", gpu_on_bus=True)), "no driver for it", "install NVIDIA's driver"),
        ("cuda", linux(Driver(library_error="x", kernel_module="580")), "does not load", "libcuda.so.1"),
        ("cuda", linux(Driver(library_error="x", in_container=True)), "not in this container", "--gpus all"),
        ("cuda", linux(Driver(library_error="x", in_wsl=True)), "WSL", "in Windows"),
        (
            "cuda",
            linux(Driver(in_container=True), container_visible="void"),
            "NVIDIA_VISIBLE_DEVICES=void",
            "--gpus all",
        ),
        ("cuda", linux(Driver(cuda=12040, init_code=0)), "too old: it serves CUDA up to 12.4", "update the driver"),
        ("cuda", linux(Driver(cuda=13000), visible=""), "CUDA_VISIBLE_DEVICES='' hides", "unset CUDA_VISIBLE_DEVICES"),
        ("cuda", linux(Driver(cuda=13000), visible="-1"), "hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        ("cuda", linux(Driver(cuda=13000, init_code=100), visible="7"), "names no GPU", "nvidia-smi -L"),
        ("cuda", linux(Driver(cuda=13000, init_code=803)), "different versions (cuInit gave 803)", "reboot"),
        ("cuda", linux(Driver(cuda=13000, init_code=802)), "switch is not ready", "fabricmanager"),
        ("cuda", linux(Driver(cuda=13000, init_code=0, mig=True)), "MIG mode", "MIG-..."),
        ("cuda:1", linux(Driver(mig=True), cuda=(gpu(8, name="H100 MIG 1g.10gb"),)), "one slice", "device=cuda:0"),
        ("cuda:1", ONE, "1 CUDA device: cuda:0", "device=cuda:0"),
        ("cuda:9", EIGHT, "8 CUDA devices: cuda:0 to cuda:7", "device=cuda:7"),
        ("cuda:1", linux(Driver(), visible="3", cuda=(gpu(8),)), "numbers them from 0", "add the GPU"),
        ("cuda:0", OLD, "compute capability 6.1", "install a torch build"),
        ("mps", LAPTOP, "this machine runs linux", "Apple silicon"),
        ("mps", mac(machine="x86_64", rosetta=True), "Rosetta", "arm64 Python"),
        ("mps", mac(machine="x86_64"), "Intel processor", "Apple silicon"),
        ("mps", mac(mps_built=False), "built without MPS", "pip install torch"),
        ("mps", mac(macos="13.6"), "macOS 13.6 is too old", "macOS 14 or newer"),
        ("mps", mac(macos="14.0"), "Metal offers no GPU here", "outside of the virtual machine"),
        ("mps", mac(), "Metal offers no GPU", "virtual machine"),
        ("xpu", LAPTOP, "built without Intel GPUs", "XPU build"),
        ("xpu", Hardware(xpu_built=True), "no Intel GPU", "sycl-ls"),
        ("xpu:2", INTEL, "2 Intel GPU", "device=xpu:1"),
        ("cuda", Hardware(hip_build="6.4", torch_version="2.13.0+rocm"), "no AMD GPU", "rocminfo"),
    ],
)
def test_missing_device_has_cause_and_fix(device, machine, cause, fix):
    with pytest.raises(RunnerError) as caught:
        resolve(parse(device), machine)
    text = str(caught.value)
    assert all(part in text for part in (cause, fix, "here: ", "cpu"))


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        (("sm_90",), (12, 0), False),  # a new GPU with an old torch
        (("sm_80", "sm_86"), (8, 9), True),
        (("sm_86",), (8, 0), False),
        (("sm_80",), (7, 5), False),
        (("sm_100a", "sm_120"), (12, 0), True),
        (("compute_90",), (12, 0), True),
        (KERNELS, (12, 1), True),
        (("compute_120",), (9, 0), False),
    ],
)
def test_kernels_run_on_their_own_major_version(kernels, capability, runs):
    machine = Hardware(**{**CUDA, "arch_list": kernels}, cuda=(gpu(8, capability=capability),))
    choice = resolve(parse("auto"), machine)
    assert choice.device == ("cuda:0" if runs else "cpu")
    assert runs or "compute capability {}.{}".format(*capability) in choice.reason


def test_device_list_without_match_gives_causes():
    assert len(problems_of(resolve, parse(["cuda:1", "mps"]), LAPTOP)) == 2


@pytest.mark.parametrize(
    ("precision", "device", "machine", "fix"),
    [
        ("tf32", "cpu", LAPTOP, "train.precision=fp32"),
        ("tf32", "mps", MAC, "train.precision=fp32"),
        ("bf16", "cuda:0", OLD, "train.precision=fp16"),
        ("tf32", "cuda:0", OLD, "train.precision=fp32"),
        ("bf16", "mps", replace(MAC, macos="13.6"), "train.precision=fp16"),  # torch would compute in float32 and warn
    ],
)
def test_precision_that_the_device_lacks_suggests_another(precision, device, machine, fix):
    (problem,) = problems_of(check_precision, precision, device, machine)
    assert problem.suggestions == (fix,)


def test_precisions_of_each_kind():
    assert not any(precisions("cuda:0", ONE).values())
    check_precision("fp16", "cpu", LAPTOP)
    for kind, macos in (("mps", "14.0"), ("mps", "26.1"), ("mps", ""), ("cpu", "13.6")):
        assert precisions(kind, replace(MAC, macos=macos))["bf16"] == ""


@pytest.mark.parametrize(
    ("device", "machine", "expected"),
    [("cuda:0", ONE, "tf32"), ("cuda:0", OLD, "fp32"), ("cpu", ONE, "fp32"), ("mps", MAC, "fp32")],
)
def test_automatic_precision_uses_tensor_cores(device, machine, expected):
    assert check_precision("auto", device, machine) == expected


def test_this_machine_is_described_with_cpu():
    hardware = diagnose(probe())
    driver = hardware.driver
    assert driver.library_error or driver.cuda, "the process that asks the driver has told neither"
    assert hardware.devices()["cpu"].total_bytes > 0
    assert choose("cpu", hardware).device == "cpu"
    assert choose("auto", hardware).device in hardware.devices()


@pytest.mark.parametrize("build", [CUDA, dict(torch_version="2.13.0+cpu")])
def test_auto_takes_cpu_with_drivers_reason(build):
    machine = Hardware(**{**build, "driver": None})
    choice = choose("auto", machine)
    assert choice.device == "cpu"
    assert choice.reason == resolve(("auto",), diagnose(machine)).reason


@pytest.fixture
def two_gpus(monkeypatch):
    """torch's facts and the driver's, in another order; torch's query for free memory creates a context."""
    contexts = []
    about = [types.SimpleNamespace(name="G", total_memory=8 * GIB, major=9, minor=0, uuid=uuid) for uuid in ("a", "b")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(about))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about[index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: contexts.append(index) or (index * GIB + 1, 8 * GIB))
    rows = [["GPU-b", "5120", "Exclusive_Process"], ["GPU-a", "[N/A]", "Default"]]
    monkeypatch.setattr(looking, "_nvidia_smi", lambda query: rows)
    return about, contexts


def test_driver_reports_free_memory_without_a_context(two_gpus):
    about, contexts = two_gpus
    assert [(gpu.free_bytes, gpu.is_exclusive) for gpu in looking._cuda_gpus()] == [(1, False), (5 * GIB, True)]
    assert contexts == [0]  # the driver does not report its memory
    about[1].total_memory = 2 * GIB  # a slice, for which the driver reports the whole GPU's memory
    assert looking._cuda_gpus()[1].free_bytes == 2 * GIB


def test_mac_without_tools_is_recognized(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    asked = []

    def run(command, **more):
        asked.append(command[0])
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(looking.subprocess, "run", run)
    assert looking._cpu_name() == looking.platform.machine()
    assert asked == ["/usr/sbin/sysctl"]


def test_what_to_write_is_said_once():
    with pytest.raises(RunnerError) as caught:
        choose("cuda:3", ONE)
    assert str(caught.value).endswith("help: use `device=cuda:0` (here: cuda:0, cpu)")


def machine(*free, **more):
    return Hardware(**CUDA, cuda=tuple(map(gpu, free)), **more)


NO_GPU, FOUR = machine(), machine(10, 70, 30, 70)
#: an old GPU that this torch has no kernels for, between two supported ones
WITH_OLD = Hardware(**CUDA, cuda=(gpu(70), gpu(12, 12, (3, 7), "K80"), gpu(60)))

CASES = [
    ("auto", "auto", NO_GPU, ["cpu"]),
    ("auto", "auto", FOUR, ["cuda:1"]),
    ("cuda", "auto", FOUR, ["cuda:1"]),
    ("all", "auto", NO_GPU, ["cpu"]),
    ("all", "auto", ONE, ["cuda:0"]),
    ("all", "auto", FOUR, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
    ("all", "auto", WITH_OLD, ["cuda:0", "cuda:2"]),
    ("all", "auto", MAC, ["mps"]),
    ("all", "auto", INTEL, ["xpu:0", "xpu:1"]),
    ("all", 2, FOUR, ["cuda:0", "cuda:1"]),
    ("all", 3, NO_GPU, ["cpu", "cpu", "cpu"]),
    ("all", 1, FOUR, ["cuda:0"]),
    ("cpu", 4, FOUR, ["cpu"] * 4),
    ("auto", 2, NO_GPU, ["cpu", "cpu"]),
    ("auto", 2, FOUR, ["cuda:1", "cuda:3"]),
    ("cuda", 3, FOUR, ["cuda:1", "cuda:3", "cuda:2"]),
    ("xpu", 2, INTEL, ["xpu:0", "xpu:1"]),
    (["cuda", "cpu"], 2, NO_GPU, ["cpu", "cpu"]),
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
    ("all", 3, WITH_OLD, "cuda:0, cuda:2", "train.num_processes=2"),
    ("cuda:1", 2, FOUR, "cuda:1 is one device", "device=all"),
    ("mps", 2, MAC, "a Mac has one GPU", "device=cpu"),
    ("auto", 2, MAC, "a Mac has one GPU", "train.num_processes=1"),
    ("xpu:0", 2, INTEL, "xpu:0 is one device", "device=xpu"),
    ("cuda", 2, NO_GPU, "the driver finds no GPU", "device=cpu"),
]


@pytest.mark.parametrize(("device", "count", "hardware", "so", "write"), REFUSED)
def test_missing_device_is_refused_listing_others(device, count, hardware, so, write):
    (problem,) = problems_of(devices_of_processes, parse(device), count, hardware)
    assert so in problem.message and write in problem.help
    assert str(device) in problem.source


def test_launched_process_takes_its_ranks_device():
    assert [device_of_process(("all",), rank, 4, FOUR).device for rank in range(4)] == [f"cuda:{at}" for at in range(4)]
    assert device_of_process(("cpu",), 3, 4, FOUR).device == "cpu"
    assert device_of_process(("cuda",), 3, 4, machine(70, visible="3")).device == "cuda:0"
    with pytest.raises(RunnerError, match="each process needs its own device"):
        device_of_process(("cuda",), 1, 2, ONE)


def test_independent_processes_take_one_gpu_each():
    """Each sees the memory that the previous ones have taken."""
    free, taken = [79, 79, 79, 79], []
    for rank in (2, 0, 3, 1):
        taken.append(device_of_process(("auto",), rank, 4, machine(*free)).device)
        free[int(taken[-1].removeprefix("cuda:"))] -= 1
    assert taken == ["cuda:2", "cuda:0", "cuda:3", "cuda:1"]
    assert [device_of_process(("cuda",), rank, 2, FOUR).device for rank in range(2)] == ["cuda:0", "cuda:1"]


def test_backend_of_each_kind():
    assert [backend_of(device) for device in ("cpu", "cuda:3", "xpu:0")] == ["gloo", "nccl", "xccl"]
