"""What is kept comes back; what is damaged, foreign or not there is None."""

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from machine_figures import MACHINE, facts

from runner.device import Gpu
from runner.device.benchmark import cache
from runner.version import PACKAGES


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "runner"


def test_what_is_kept_comes_back(own_cache):
    assert cache.read(MACHINE) is None
    file = cache.keep(facts(), MACHINE)
    assert [file] == list(own_cache.iterdir())
    assert file.name.startswith("bench-")
    measured = cache.read(MACHINE)
    assert list(measured.devices) == ["cuda:0", "cpu"]
    gpu = measured.devices["cuda:0"]
    assert gpu.flops_per_second == {"fp32": 42e12, "bf16": 700e12}
    assert gpu.memory_bytes_per_second == 4000e9
    assert gpu.copy_bytes_per_second == 50e9  # to the device, from pinned memory
    assert gpu.launch_seconds == pytest.approx(4e-6)
    assert gpu.host_read_seconds == pytest.approx(12e-6)
    assert gpu.measured_at == "2026-01-02T03:04:05+00:00"
    assert measured.devices["cpu"].copy_bytes_per_second == 18e9
    with pytest.raises(FrozenInstanceError):
        gpu.launch_seconds = 1.0


def test_without_pinned_memory_the_pageable_one_counts():
    found = facts()
    del found["devices"]["cuda:0"]["copy_to_device_gb_per_s"]["pinned"]
    cache.keep(found, MACHINE)
    assert cache.read(MACHINE).devices["cuda:0"].copy_bytes_per_second == 8e9


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
def test_another_machine_has_figures_of_its_own(other):
    kept = cache.keep(facts(), MACHINE)
    assert cache.read(other) is None
    kept.rename(cache.path(other))  # a file of this name with another machine in it
    assert cache.read(other) is None


@pytest.mark.parametrize("same", THE_SAME.values(), ids=THE_SAME)
def test_what_changes_by_itself_makes_no_other_machine(same):
    cache.keep(facts(), MACHINE)
    assert cache.read(same) is not None


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_another_number_of_threads_has_figures_of_its_own(variable, monkeypatch):
    cache.keep(facts(), MACHINE)
    monkeypatch.setenv(variable, "3")
    assert cache.read(MACHINE) is None


def damage(file, *keys, value):
    """Puts a value where the keys lead to."""
    kept = json.loads(file.read_text())
    inner = kept
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    file.write_text(json.dumps(kept))


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
    "beyond a float": lambda file: damage(file, "devices", "cpu", "host_read_us", value=10**400),
    "no copies": lambda file: damage(file, "devices", "cpu", "memcpy_gb_per_s", value=None),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_none(harm):
    file = cache.keep(facts(), MACHINE)
    harm(file)
    assert cache.read(MACHINE) is None
    cache.keep(facts(), MACHINE)
    assert cache.read(MACHINE) is not None


def test_a_write_that_is_interrupted_leaves_the_file_before(own_cache, monkeypatch):
    cache.keep(facts(), MACHINE)

    def interrupt(self, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", interrupt)
        cache.keep(facts() | {"devices": {}}, MACHINE)
    assert list(own_cache.iterdir()) == [cache.path(MACHINE)]
    assert list(cache.read(MACHINE).devices) == ["cuda:0", "cpu"]


@pytest.mark.skipif(sys.platform == "win32", reason="XDG's custom")
@pytest.mark.parametrize("given", ["", "relative/cache", None])
def test_without_a_cache_folder_of_ones_own_it_is_the_homes(given, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if given is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache.folder() == tmp_path / "home/.cache/runner"


def test_reading_loads_neither_torch_nor_matplotlib(own_cache):
    cache.keep(facts(), MACHINE)
    code = (
        "import sys; from runner.device.benchmark import cache; from runner.device.benchmark.text import comparison\n"
        "from runner.device import Hardware; cache.read(Hardware()); comparison(None, ())\n"
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    path = str(PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout == "[]\n", done.stderr
