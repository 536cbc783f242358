import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from runner.device.host_memory import keep_what_is_freed

NUMBERS = 10 * 2**20  # 40 MiB: above 32 MiB glibc asks the system for each piece, wherever its own memory ends

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():  # as a model's: all that a forward pass makes is free at the end of the backward pass
    kept = [torch.ones(NUMBERS) for _ in range(2)]
    del kept

if sys.argv[1:] == ["kept"]:
    keep_what_is_freed()
for _ in range(5):
    step()
before = faults()
for _ in range(10):
    step()
print((faults() - before) // 10)
"""


def faults_of_a_step(*words):
    asked = subprocess.run([sys.executable, "-c", STEPS, *words], capture_output=True, text=True, check=True)
    return int(asked.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="what is asked of glibc, and counted by Linux")
def test_what_a_step_frees_is_there_for_the_next_one():
    pages = 2 * 40 * 2**20 // 4096
    assert faults_of_a_step() > pages / 2
    assert faults_of_a_step("kept") < pages / 100
