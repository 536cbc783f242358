"""`devices --bench` with tiny sizes: on this CPU, on simulated devices, and where a device fails."""

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from machine_figures import MACHINE, TINY, facts
from rich.console import Console
from simulated import run_simulated

from runner import cli
from runner.device import probe
from runner.device.backends import THREADS
from runner.device.benchmark import cache
from runner.device.benchmark import measure as module
from runner.device.benchmark.measure import Bench, Sizes, Spread, measure, print_bench

COPIES = ("copy_to_device_gb_per_s", "copy_from_device_gb_per_s")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "runner"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(module, "Sizes", lambda: TINY)


def numbers(values):
    """Every figure of a device, by dotted name."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in numbers(value))
        elif not isinstance(value, str):
            yield name, value


def test_cpu_is_measured_in_each_precision():
    machine = replace(probe(), cuda=(), xpu=(), mps=None)
    torch.set_num_threads(THREADS + 1)
    torch.set_float32_matmul_precision("high")
    try:
        found = measure(machine, sizes=TINY)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (THREADS + 1, "high")
    finally:
        torch.set_num_threads(THREADS)
        torch.set_float32_matmul_precision("highest")
    assert (list(found["devices"]), found["failed"], found["num_threads"]) == (["cpu"], {}, THREADS)
    cpu = found["devices"]["cpu"]
    assert list(cpu["matmul_tflops"]) == list(cpu["small_matmul_us"]) == ["fp32", "bf16", "fp16", "fp64"]
    assert not cpu.keys() & {*COPIES}
    assert all(math.isfinite(value) and value > 0 for _, value in numbers(cpu))
    lowest, highest = dict(numbers(cpu["lowest"])), dict(numbers(cpu["highest"]))
    medians = {name: value for name, value in numbers(cpu) if not name.startswith(("lowest", "highest", "matmul_size"))}
    assert medians.keys() == lowest.keys() == highest.keys()
    assert all(lowest[name] <= value <= highest[name] for name, value in medians.items())


class Machine:
    """A device on an invented clock, whose calls take these seconds, but only once they are waited for."""

    def __init__(self, monkeypatch, *seconds, default=1.0):
        self.now, self.waiting, self.seconds, self.default = 0.0, 0.0, list(seconds), default
        self.num_calls = 0
        monkeypatch.setattr(module, "wait_for", self.wait)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def call(self):
        self.num_calls += 1
        self.waiting += self.seconds.pop(0) if self.seconds else self.default

    def wait(self, device):
        self.now, self.waiting = self.now + self.waiting, 0.0


def bench_of(batch_seconds):
    return Bench(torch.device("cpu"), replace(TINY, batch_seconds=batch_seconds, repeats=3))


def test_warm_up_is_not_timed(monkeypatch):
    # the first call loads kernels, the second one finds the number of calls in a batch
    machine = Machine(monkeypatch, 1000.0, 100.0, 1.0, 5.0, 1.0, 2.0)
    machine.call()  # earlier work of the device
    assert bench_of(0.5).microseconds(machine.call) == Spread(2e6, 1e6, 5e6)
    machine = Machine(monkeypatch, 100.0, 1.0, 5.0, 1.0, 2.0)
    assert bench_of(0.5).rate(machine.call, 10.0) == Spread(5.0, 2.0, 10.0)


def test_short_calls_are_timed_in_batches(monkeypatch):
    machine = Machine(monkeypatch, default=0.25)
    assert bench_of(1.5).microseconds(machine.call) == Spread(25e4, 25e4, 25e4)
    assert machine.num_calls == 1 + (1 + 2 + 4 + 8) + 3 * 8


@pytest.mark.parametrize(("least_seconds", "most", "size"), [(0.0, 32, 8), (1e9, 32, 32), (1e9, 31, 16), (1e9, 4, 8)])
def test_large_product_is_doubled_until_long(least_seconds, most, size):
    sizes = replace(TINY, product_seconds=least_seconds, most_large=most)
    found = module.products(Bench(torch.device("cpu"), sizes), "fp32")
    assert found["matmul_size.fp32"].median == size


@pytest.mark.parametrize(("free", "at_most"), [(None, 1000), (16000, 1000), (800, 100), (0, 4)])
def test_arrays_leave_room_on_full_device(free, at_most):
    assert Bench(torch.device("cpu"), Sizes(), free).at_most(1000) == at_most


@pytest.mark.skipif(torch.cuda.is_available(), reason="the first GPU here would be measured")
def test_failing_device_is_reported_and_others_measured():
    found = measure(MACHINE, sizes=TINY)
    assert list(found["devices"]) == ["cpu"]
    assert list(found["failed"]) == ["cuda:0"]
    assert "CUDA" in found["failed"]["cuda:0"] or "NVIDIA driver" in found["failed"]["cuda:0"]


def measured(device, sizes):
    """Runs on a simulated device."""
    return measure(probe(), sizes=Sizes(**sizes))


@pytest.mark.slow
def test_two_simulated_gpus_are_measured():
    found = run_simulated("cuda:1", measured, asdict(TINY))
    assert (list(found["devices"]), found["failed"]) == (["cuda:0", "cuda:1", "cpu"], {})
    for name in ("cuda:0", "cuda:1"):
        gpu = found["devices"][name]
        assert gpu["name"] == "Simulated GPU"
        assert list(gpu["matmul_tflops"]) == ["fp32", "tf32", "bf16", "fp16", "fp64"]
        assert [list(gpu[copies]) for copies in COPIES] == [["pageable", "pinned"]] * 2
        assert "memcpy_gb_per_s" not in gpu


@pytest.mark.slow
def test_mps_is_measured_without_fp64_and_pinning():
    found = run_simulated("mps", measured, asdict(TINY))
    assert (list(found["devices"]), found["failed"]) == (["mps", "cpu"], {})
    gpu = found["devices"]["mps"]
    assert list(gpu["matmul_tflops"]) == ["fp32", "bf16", "fp16"]
    assert [list(gpu[copies]) for copies in COPIES] == [["pageable"]] * 2
    assert "fp64" in found["devices"]["cpu"]["matmul_tflops"]


def test_table_has_row_per_figure_of_each_device():
    found = {**facts(), "failed": {"mps": "out of memory"}, "kept": "there.json", "not_kept": None}
    console = Console(width=100, highlight=False, file=io.StringIO())
    print_bench(found, console)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert {
        "cuda:0 large product, bf16, TFLOP/s 700 630-840",
        "cuda:0 64x64 product, fp32, us 7.00 6.30-8.40",
        "cuda:0 copy from the device, pinned, GB/s 51.0 45.9-61.2",
        "cpu large product, fp32, TFLOP/s 0.100 0.0900-0.120",
        "cpu memcpy, GB/s 18.0 16.2-21.6",
    } <= {*lines}
    assert lines[-3:] == [
        "mps was not measured: out of memory",
        "the CPU with 7 threads, the maximum of a run",
        "kept there.json",
    ]


def test_second_measurement_replaces_the_first(own_cache):
    first = module.bench(probe(), sizes=TINY)
    assert sorted(own_cache.iterdir()) == [Path(first["kept"])]
    before = cache.read(probe())
    assert before.keys() == first["devices"].keys()
    second = module.bench(probe(), sizes=TINY)
    assert second["kept"] == first["kept"]
    assert cache.read(probe()) != before


def test_bench_on_busy_machine_is_not_kept(own_cache, monkeypatch):
    found = facts()
    found["devices"]["cpu"]["highest"]["launch_us"] = 51 * found["devices"]["cpu"]["lowest"]["launch_us"]
    monkeypatch.setattr(module, "measure", lambda hardware, **settings: found)
    assert module.bench(probe())["not_kept"].startswith(
        "launch_us of cpu varies from 3.60 to 184, so the machine is busy"
    )
    assert not own_cache.exists()


def test_bench_without_cache_directory_still_prints(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "file"))
    assert cli.main(["devices", "--bench"]) == 0
    out, err = capsys.readouterr()
    assert out.index("device=auto takes") < out.index("large product, fp32, TFLOP/s")
    assert out.splitlines()[-1].startswith("not kept: ")
    assert str(tmp_path / "file") in out.splitlines()[-1]
    assert err == ""


def test_json_has_devices_and_bench(tiny, own_cache, capsys):
    assert cli.main(["devices", "--json", "--bench"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"devices", "missing", "auto", "torch", "platform"} < found.keys()
    assert found["bench"]["devices"]["cpu"]["matmul_tflops"]["fp32"] > 0
    assert cache.read(probe()).keys() == found["bench"]["devices"].keys()
    assert cli.main(["devices", "--json"]) == 0
    assert "bench" not in json.loads(capsys.readouterr().out)


def test_bench_without_any_figure_exits_1(own_cache, monkeypatch, capsys):
    nothing = {**facts(), "devices": {}, "failed": {"cpu": "out of memory"}}
    monkeypatch.setattr(module, "measure", lambda hardware, **settings: nothing)
    assert cli.main(["devices", "--bench"]) == 1
    assert "cpu was not measured: out of memory" in capsys.readouterr().out
    assert not own_cache.exists(), "earlier figures stay"


def test_bench_after_ctrl_c_exits_130(own_cache, monkeypatch, tiny):
    def interrupt(call, count=1):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "seconds", interrupt)
    assert cli.main(["devices", "--bench"]) == 130
    assert not own_cache.exists()


def test_unknown_flag_of_devices_is_refused(capsys):
    assert cli.main(["devices", "--bench", "--fast"]) == 2
    text = capsys.readouterr().err
    assert "`devices` does not take `--fast`" in text
    assert "`python -m runner devices --help`" in text
