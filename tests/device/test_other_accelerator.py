"""An accelerator that no line of the runner names: a package's own kind of device, with allocator, streams and pinned memory.

tests/support/acme is that package: a real out-of-tree device on the host's memory, built here and imported by torch itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from waiting import LONGEST

from runner.device import Hardware, check_precision, resolve
from runner.device.hardware import Gpu
from runner.errors import RunnerError
from runner.sweep.jobs.slots import devices_for, places

pytestmark = pytest.mark.slow
ACME = Path(__file__).parents[1] / "support" / "acme"
ENTRY = "[torch.backends]\nacme = acme:register\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages that has acme."""
    site = tmp_path_factory.mktemp("site")
    (site / "acme").mkdir()
    shutil.copy(ACME / "__init__.py", site / "acme")
    told = site / "acme-0.1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 0.1\n")
    (told / "entry_points.txt").write_text(ENTRY)
    home = Path(torch.__file__).parent
    command = ["g++", "-O0", "-std=c++20", "-shared", "-fPIC", "-w", str(ACME / "acme.cpp")]
    command += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-L{home}/lib"]
    command += ["-ltorch", "-ltorch_cpu", "-lc10", "-o", str(site / "acme" / "libacme.so")]
    subprocess.run(command, check=True)
    return site


def environment(site):
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(Path(__file__).parents[2])])}


@pytest.fixture(scope="module")
def found(site, tmp_path_factory):
    """What tests/support/acme/program.py did there."""
    command, folder = [sys.executable, str(ACME / "program.py")], tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        command, cwd=folder, env=environment(site), capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("where", ["acme", "second"])
def test_a_run_on_it_is_the_cpus_to_the_bit(found, where):
    """On the second one the batches are streamed."""
    assert found[where]["device"] == {"acme": "acme:0", "second": "acme:1"}[where]
    assert found[where]["status"] == "finished"
    assert len(found[where]["losses"]) == 16
    assert found[where]["losses"] == found["cpu"]["losses"]


def test_metrics_and_batches_come_over_on_streams_of_their_own(found):
    assert found["cpu"]["streams"] == []
    for where, index, least in (("acme", 0, 1), ("second", 1, 2)):
        streams = found[where]["streams"]
        assert len(streams) >= least
        assert all(f"device_type=acme, device_index={index}" in stream for stream in streams)
        assert not any("stream_id=0" in stream for stream in streams)  # the one that the steps are on


def test_check_works_on_an_accelerator(found):
    assert found["check"] == 0


def test_backward_runs_in_the_main_thread(found):
    assert found["threads"] == {"acme": True}


def test_the_peak_is_the_allocators(found):
    weights = 19_210 * 4
    assert 4 * weights < found["acme"]["peak_memory_bytes"] < 20 * weights < found["cpu"]["peak_memory_bytes"]


def test_what_was_stopped_goes_on_to_the_bit_and_is_evaluated(found):
    assert found["resumed"]["codes"] == [0, 0]
    assert found["resumed"]["losses"] == found["acme"]["losses"]
    assert "device   acme:0" in found["resumed"]["said"]


def test_auto_takes_it_and_devices_lists_it(found):
    assert found["auto"]["device"] == "acme:0"
    listed = {item["device"]: item for item in found["devices"]["devices"]}
    assert list(listed) == ["acme:0", "acme:1", "cpu"]
    assert listed["acme:1"]["name"] == "ACME 9000 (1)"
    assert listed["acme:0"]["total_bytes"] == 2**30
    assert listed["acme:0"]["precisions"] == ["fp32"]
    assert found["devices"]["auto"]["device"] == "acme:0"


def test_a_tensor_in_the_wrong_place_is_named(found):
    assert "own.py:28" in found["lost"]
    assert "cpu" in found["lost"] and "acme:0" in found["lost"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("typo", ["--> device=acmee", "help: use `device=acme`"]),
        ("number", ["--> device=acme:7", "this machine has acme:0 to acme:1", "device=acme:1"]),
        ("half", ["train.precision=bf16 on acme:0", "it does fp32", "help: use `train.precision=fp32`"]),
    ],
)
def test_a_mistake_is_answered_with_what_is_there(found, name, words):
    assert all(word in found[name] for word in words), found[name]


def test_a_sweep_over_it_and_the_cpu_is_one_report(site, tmp_path):
    words = ["device=cpu,acme", "data=digits", "data.limit=300", "model=mlp", "train.num_epochs=1"]
    words += ["tracking.enabled=false", "hydra.sweep.dir=sweep"]
    done = subprocess.run(
        [sys.executable, "-m", "runner", "-m", *words],
        cwd=tmp_path,
        env=environment(site),
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "sweep" / "report.json").read_text())
    assert sorted(job["device"] for job in report["jobs"]) == ["acme:0", "cpu"]
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "acme:0" in page and "cpu" in page


def machine(**facts):
    return Hardware(other_kind="npu", others=(Gpu("N 1", 2**33, 2**32), Gpu("N 2")), **facts)


def test_of_a_described_machine():
    here = machine(cuda_build=None)
    assert resolve(("auto",), here).device == "npu:0"
    assert resolve(("npu:1",), here).device == "npu:1"
    assert resolve(("npu",), here).device == "npu:0"
    assert devices_for(("npu",), here) == ("npu:0", "npu:1")
    assert devices_for(("npu:1",), here) == ("npu:1",)
    assert [str(place) for place in places(here, {"cpu": 1})] == ["npu:0", "npu:1", "cpu"]
    check_precision("bf16", "npu:0", machine(other_halves=("bf16",)))
    with pytest.raises(RunnerError, match="torch finds no device of the kind npu"):
        resolve(("npu",), Hardware(other_kind="npu"))
    with pytest.raises(RunnerError, match="help: use `device=cpu`"):
        resolve(("npu",), Hardware())
