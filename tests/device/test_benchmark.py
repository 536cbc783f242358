"""`devices --bench` with tiny sizes: on this CPU, simulated devices and a failing device; and the stored results."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from simulated import run_simulated

from runner import cli
from runner.cli.devices import figure, print_bench
from runner.device import Gpu, Hardware, benchmark, probe
from runner.device.backends import THREADS
from runner.device.benchmark import Bench, Sizes, bench
from runner.device.hardware import GIB

TINY = Sizes(first_large=8, most_large=32, product_seconds=1e-9, seconds=1e-4, copy_bytes=1024, memory_bytes=1024)
MACHINE = Hardware(
    cpu_name="Some CPU",
    num_cpus=8,
    memory_bytes=32 * GIB,
    torch_version="2.13.0",
    cuda_build="13.0",
    arch_list=("sm_90",),
    cuda=(Gpu("Some GPU", 80 * GIB, 79 * GIB, (9, 0), "a-b-c"),),
)
COPIES = ("copy_to_device_gb_per_s", "copy_from_device_gb_per_s")
OF_CPU = {"name": "Some CPU", "matmul_tflops": {"fp32": 0.1}, "memory_gb_per_s": 53.0, "launch_us": 4.0}
OF_GPU = {**OF_CPU, "name": "Some GPU", "matmul_tflops": {"fp32": 42.0, "bf16": 700.0}}
FACTS = {
    "measured_at": "2026-01-02T03:04:05+00:00",
    "num_threads": 7,
    "devices": {
        "cuda:0": OF_GPU | {COPIES[0]: {"pageable": 8.0, "pinned": 50.0}, COPIES[1]: {"pageable": 8.0}},
        "cpu": OF_CPU | {"memcpy_gb_per_s": 18.0},
    },
    "failed": {},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(benchmark, "Sizes", lambda: TINY)
    return tmp_path / "runner"


def test_cpu_is_measured_in_each_precision():
    torch.set_num_threads(THREADS + 1)
    torch.set_float32_matmul_precision("high")
    try:
        found = bench(replace(probe(), cuda=(), xpu=(), mps=None))
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (THREADS + 1, "high")
    finally:
        torch.set_num_threads(THREADS)
        torch.set_float32_matmul_precision("highest")
    assert (list(found["devices"]), found["failed"], found["num_threads"]) == (["cpu"], {}, THREADS)
    cpu = found["devices"]["cpu"]
    assert list(cpu["matmul_tflops"]) == ["fp32", "bf16", "fp16", "fp64"]
    assert not cpu.keys() & {*COPIES}
    values = [*cpu["matmul_tflops"].values(), cpu["memory_gb_per_s"], cpu["launch_us"], cpu["host_read_us"]]
    assert all(math.isfinite(value) and value > 0 for value in values)


def test_arrays_leave_room_on_full_device():
    free = (None, 16000, 800, 0)
    assert [Bench(torch.device("cpu"), Sizes(), each).at_most(1000) for each in free] == [1000, 1000, 100, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the first GPU here would be measured")
def test_failing_device_is_reported_and_others_measured(capsys):
    found = bench(MACHINE)
    assert list(found["devices"]) == ["cpu"]
    assert "CUDA" in found["failed"]["cuda:0"] or "NVIDIA driver" in found["failed"]["cuda:0"]
    print_bench(found)
    assert "cuda:0 was not measured: " in capsys.readouterr().out


def test_figures_of_busy_machine_are_discarded(monkeypatch):
    monkeypatch.setattr("runner.device.benchmark.MAX_SPREAD", 0.5)
    found = bench(replace(probe(), cuda=(), xpu=(), mps=None), sizes=TINY)
    assert found["kept"] is None and "close other programs and repeat" in found["not_kept"]


def measured(device, sizes):
    """Run the benchmark on a simulated device."""
    return bench(probe(), sizes=Sizes(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "names", "precisions", "kinds"),
    [
        ("cuda:1", ["cuda:0", "cuda:1", "cpu"], ["fp32", "tf32", "bf16", "fp16", "fp64"], ["pageable", "pinned"]),
        ("mps", ["mps", "cpu"], ["fp32", "bf16", "fp16"], ["pageable"]),
    ],
)
def test_simulated_gpu_is_measured(device, names, precisions, kinds):
    found = run_simulated(device, measured, asdict(TINY))
    assert (list(found["devices"]), found["failed"]) == (names, {})
    gpu = found["devices"][device]
    assert list(gpu["matmul_tflops"]) == precisions
    assert [list(gpu[copies]) for copies in COPIES] == [kinds] * 2
    assert "memcpy_gb_per_s" not in gpu


def test_table_has_row_per_figure(capsys):
    print_bench({**FACTS, "kept": "there.json", "not_kept": None})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"cuda:0 large product, bf16, TFLOP/s 700", "cpu memcpy, GB/s 18.0"} <= {*lines}
    assert lines[-2:] == ["the CPU with 7 threads, the maximum of a run", "kept there.json"]


def test_figure_has_three_significant_digits():
    assert [*map(figure, (0.00241, 0.026, 0.9996, 9.994, 99.94, 99.96, 4100.4))] == [
        *("0.00241", "0.0260", "1.00", "9.99", "99.9", "100", "4,100")
    ]


def test_json_has_devices_and_bench(capsys):
    assert cli.main(["devices", "--json", "--bench"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"devices", "missing", "auto", "torch", "platform"} < found.keys()
    assert found["devices"][-1]["device"] == "cpu"
    assert found["bench"]["devices"]["cpu"]["matmul_tflops"]["fp32"] > 0
    assert benchmark.read(probe()).keys() == found["bench"]["devices"].keys()
    assert cli.main(["devices", "--json"]) == 0
    assert "bench" not in json.loads(capsys.readouterr().out)


def test_bench_without_cache_directory_still_prints(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cli.main(["devices", "--bench"]) == 0
    out, err = capsys.readouterr()
    assert out.index("device=auto takes") < out.index("large product, fp32, TFLOP/s")
    assert out.splitlines()[-1].startswith("not kept: ")
    assert err == ""


def test_bench_without_any_figure_exits_1(own_cache, monkeypatch, capsys):
    def refuse(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(benchmark, "_figures", refuse)
    assert cli.main(["devices", "--bench"]) == 1
    assert "cpu was not measured: out of memory" in capsys.readouterr().out
    assert not own_cache.exists(), "earlier figures stay"


def test_read_after_keep_returns_the_figures(own_cache):
    assert benchmark.read(MACHINE) == {}
    assert [benchmark.keep(FACTS, MACHINE)] == list(own_cache.iterdir())
    gpu = benchmark.read(MACHINE)["cuda:0"]
    assert gpu.flops_per_second == {"fp32": 42e12, "bf16": 700e12}
    assert (gpu.memory_bytes_per_second, gpu.copy_bytes_per_second) == (53e9, 50e9)  # from pinned memory
    assert (gpu.launch_seconds, gpu.measured_at) == (pytest.approx(4e-6), "2026-01-02T03:04:05+00:00")
    assert benchmark.read(MACHINE)["cpu"].copy_bytes_per_second == 18e9


OTHERS = {
    "torch": replace(MACHINE, torch_version="2.14.0"),
    "no GPU": replace(MACHINE, cuda=()),
    "another GPU of the kind": replace(MACHINE, cuda=(replace(MACHINE.cuda[0], uuid="d-e-f"),)),
    "fewer cores": replace(MACHINE, num_cpus=4),
}
THE_SAME = {
    "less of it free": replace(MACHINE, free_memory_bytes=1, cuda=(replace(MACHINE.cuda[0], free_bytes=1),)),
    "a few pages less": replace(MACHINE, memory_bytes=MACHINE.memory_bytes - 4096 * 100),
}


@pytest.mark.parametrize("machine", [*OTHERS.values(), *THE_SAME.values()], ids=[*OTHERS, *THE_SAME])
def test_read_finds_only_this_machines_figures(machine, monkeypatch):
    benchmark.keep(FACTS, MACHINE)
    assert bool(benchmark.read(machine)) == (machine in THE_SAME.values())
    monkeypatch.setattr(benchmark, "THREADS", THREADS + 1)
    assert benchmark.read(machine) == {}


@pytest.mark.parametrize("content", ["", '{"measured_at": ', "[]", "[" * 100_000, '{"measured_at": 1, "devices": [1]}'])
def test_read_of_damaged_file_finds_nothing(content):
    benchmark.keep(FACTS, MACHINE).write_text(content)
    assert benchmark.read(MACHINE) == {}
