import subprocess

import pytest
from once import once


def test_it_runs_once_whether_it_answers_or_fails():
    asked = []

    @once
    def slow(name):
        asked.append(name)
        if name == "late":
            raise subprocess.TimeoutExpired(name, 120)
        return name

    for _ in range(2):
        assert slow("here") == "here"
        with pytest.raises(subprocess.TimeoutExpired):
            slow("late")
    assert asked == ["here", "late"]
