"""A plan names what is in the wrong place, with its path and line, and says nothing of what is sound."""

import json
import sys
from pathlib import Path

import pytest
from once import once

sys.path.insert(0, str(Path(__file__).parents[1] / "watch"))

from judged import SOUND, WRONG, marked_line

pytestmark = pytest.mark.slow
FREE = ("item", "numpy")  # what is legal, but slow: the run goes on


@pytest.fixture(scope="module")
def judged(own_models, python):
    @once
    def outcome(device):
        answer = own_models / f"{device.partition(':')[0]}.json"
        done = python("judge.py", device, answer, timeout=300)
        return (json.loads(answer.read_text()), "") if done.returncode == 0 else (None, done.stderr)

    def answers(device):
        found, error = outcome(device)
        assert found is not None, error
        return found

    return answers


@pytest.mark.parametrize("case", WRONG, ids=[case.name for case in WRONG])
def test_each_mistake_is_named_with_its_path_and_line(case, judged):
    answer = judged(case.device)[case.name]
    named = [found for found in answer["findings"] if found["line"].endswith(marked_line(case.name))]
    assert named, answer["findings"]
    assert (named[0]["kind"], named[0]["path"]) == (case.kind, case.path)
    assert named[0]["write"]
    assert named[0]["grade"] == ("likely" if case.name in FREE else "certain")


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
@pytest.mark.parametrize("case", SOUND, ids=[case.name for case in SOUND])
def test_what_is_sound_is_left_in_peace(case, device, judged):
    answer = judged(device)[case.name]
    assert (answer["findings"], answer["unknown"]) == ([], "")
    assert answer["memory"]["peak_bytes"] > 0
