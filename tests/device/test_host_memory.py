import subprocess
import sys

import pytest

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
def test_what_a_step_frees_is_there_for_the_next_one():
    asked = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, asked.stdout.split())
    pages = 2 * 40 * 2**20 // 4096
    assert given_back > pages / 2
    assert kept < pages / 100
