import subprocess
import sys

import pytest

from runner.device.host_memory import FILES, left_in_groups

STEPS = """
import resource
import torch
from runner.device.host_memory import keep_what_is_freed

NUMBERS = 10 * 2**20  # 40 MiB: above 32 MiB glibc asks the system for each piece, wherever its own memory ends

def step():  # as a model's: all that a forward pass makes is free at the end of the backward pass
    kept = [torch.ones(NUMBERS) for _ in range(2)]
    del kept

def faults_of_a_step():
    for _ in range(5):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3

print(faults_of_a_step())
keep_what_is_freed()
print(faults_of_a_step())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what is asked of glibc, and counted by Linux")
def test_freed_memory_is_reused_by_next_step():
    asked = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, asked.stdout.split())
    pages = 2 * 40 * 2**20 // 4096
    assert given_back > pages / 2
    assert kept < pages / 100


def group(folder, most, now, *, version=2, **stat):
    folder.mkdir(parents=True, exist_ok=True)
    limit, taken, _ = FILES[2 - version]
    (folder / limit).write_text(f"{most}\n")
    (folder / taken).write_text(f"{now}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.mark.parametrize(
    ("version", "cached"), [(2, {"inactive_file": 600}), (1, {"inactive_file": 5, "total_inactive_file": 600})]
)
def test_cached_files_count_as_free_memory(tmp_path, version, cached):
    group(tmp_path / ("memory" if version == 1 else ""), 1000, 900, version=version, **cached)
    assert left_in_groups(tmp_path, tmp_path / "none") == [(700, "left to this container")]


@pytest.mark.parametrize(("version", "line"), [(2, "0::"), (1, "0::/\n5:cpu:/\n4:hugetlb,memory:")])
def test_slurm_job_has_limits_of_its_groups(tmp_path, version, line):
    top = tmp_path / ("memory" if version == 1 else "")
    group(top, "max", 5000, version=version)
    group(top / "slurm" / "job_7", 2000, 500, version=version)
    group(top / "slurm" / "job_7" / "step_0", 3000, 100, version=version)
    group(top / "slurm" / "job_8", 10, 0, version=version)
    own = tmp_path / "own"
    own.write_text(f"{line}/slurm/job_7/step_0\n")
    found = left_in_groups(tmp_path, own)
    assert found == [(1500, "left by control group job_7"), (2900, "left by control group step_0")]


@pytest.mark.parametrize("path", ["/docker/of-the-host", "/../outside"])
def test_container_uses_limit_of_top_group(tmp_path, path):
    (tmp_path / "own").write_text(f"0::{path}\n")
    group(tmp_path, 1000, 1200)
    assert left_in_groups(tmp_path, tmp_path / "own") == [(0, "left to this container")]
