"""Figures that were stored can be read again; a damaged file or one of another machine gives none."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from machine_figures import MACHINE, facts

from runner.device import Gpu
from runner.device.benchmark import cache
from runner.device.benchmark.cache import figure
from runner.version import PACKAGES


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runner"


def test_read_after_keep_returns_the_figures(own_cache):
    assert cache.read(MACHINE) == {}
    file = cache.keep(facts(), MACHINE)
    assert [file] == list(own_cache.iterdir())
    assert file.name.startswith("bench-")
    measured = cache.read(MACHINE)
    assert list(measured) == ["cuda:0", "cpu"]
    gpu = measured["cuda:0"]
    assert gpu.flops_per_second == {"fp32": 42e12, "bf16": 700e12}
    assert gpu.memory_bytes_per_second == 4000e9
    assert gpu.copy_bytes_per_second == 50e9  # to the device, from pinned memory
    assert gpu.launch_seconds == pytest.approx(4e-6)
    assert gpu.measured_at == "2026-01-02T03:04:05+00:00"
    assert measured["cpu"].copy_bytes_per_second == 18e9


def test_read_without_pinned_memory_takes_pageable():
    pageable = facts()
    del pageable["devices"]["cuda:0"]["copy_to_device_gb_per_s"]["pinned"]
    cache.keep(pageable, MACHINE)
    assert cache.read(MACHINE)["cuda:0"].copy_bytes_per_second == 8e9


OTHERS = {
    "torch": replace(MACHINE, torch_version="2.14.0"),
    "no GPU": replace(MACHINE, cuda=()),
    "another GPU of the kind": replace(MACHINE, cuda=(replace(MACHINE.cuda[0], uuid="d-e-f"),)),
    "another processor": replace(MACHINE, cpu_name="Another CPU"),
    "more memory": replace(MACHINE, memory_bytes=64 * 2**30),
}
THE_SAME = {
    "less of it free": replace(MACHINE, free_memory_bytes=1, cuda=(Gpu("Some GPU", 80 * 2**30, 1, (9, 0), "a-b-c"),)),
    "a few pages less": replace(MACHINE, memory_bytes=MACHINE.memory_bytes - 4096 * 100),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_read_on_another_machine_finds_nothing(other):
    kept = cache.keep(facts(), MACHINE)
    assert cache.read(other) == {}
    kept.rename(cache.path(other))  # a file of this name with another machine in it
    assert cache.read(other) == {}


@pytest.mark.parametrize("same", THE_SAME.values(), ids=THE_SAME)
def test_read_after_free_memory_changed_finds_figures(same):
    cache.keep(facts(), MACHINE)
    assert cache.read(same)


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_read_with_other_threads_finds_nothing(variable, monkeypatch):
    cache.keep(facts(), MACHINE)
    monkeypatch.setenv(variable, "3")
    assert cache.read(MACHINE) == {}


def damage(file, *keys, value):
    stored = inner = json.loads(file.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    file.write_text(json.dumps(stored))


DAMAGE = {
    "empty": lambda file: file.write_bytes(b""),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:100]),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda file: file.write_text("[]"),
    "nested without end": lambda file: file.write_text("[" * 100_000),
    "no devices": lambda file: damage(file, "devices", value=None),
    "a list of devices": lambda file: damage(file, "devices", value=[1]),
    "a device that is none": lambda file: damage(file, "devices", "cpu", value=3),
    "a speed that is none": lambda file: damage(file, "devices", "cpu", "matmul_tflops", value={"fp32": "fast"}),
    "no number": lambda file: damage(file, "devices", "cpu", "launch_us", value=float("nan")),
    "below nothing": lambda file: damage(file, "devices", "cpu", "memory_gb_per_s", value=-1),
    "beyond a float": lambda file: damage(file, "devices", "cpu", "launch_us", value=10**400),
    "no copies": lambda file: damage(file, "devices", "cpu", "memcpy_gb_per_s", value=None),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_read_of_damaged_file_finds_nothing(harm):
    file = cache.keep(facts(), MACHINE)
    harm(file)
    assert cache.read(MACHINE) == {}
    cache.keep(facts(), MACHINE)
    assert cache.read(MACHINE)


def test_interrupted_write_leaves_the_earlier_file(own_cache, monkeypatch):
    cache.keep(facts(), MACHINE)

    def interrupt(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupt)
        cache.keep(facts() | {"devices": {}}, MACHINE)
    assert list(own_cache.iterdir()) == [cache.path(MACHINE)]
    assert list(cache.read(MACHINE)) == ["cuda:0", "cpu"]


@pytest.mark.skipif(sys.platform == "win32", reason="XDG's custom")
@pytest.mark.parametrize("value", ["", "relative/cache", None])
def test_folder_without_xdg_variable_is_in_home(value, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache.folder() == tmp_path / "home/.cache/runner"


def test_reading_loads_neither_torch_nor_matplotlib(own_cache):
    code = (
        "import sys; from runner.device.benchmark import cache\n"
        "from runner.device import Hardware; cache.read(Hardware())\n"
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.00241, "0.00241"), (0.026, "0.0260"), (0.9996, "1.00"), (1.0, "1.00"), (9.994, "9.99"), (9.996, "10.0")),
        *((99.94, "99.9"), (99.96, "100"), (4100.4, "4,100"), (1e6, "1,000,000")),
    ],
)
def test_figure_has_three_significant_digits(value, text):
    assert figure(value) == text
