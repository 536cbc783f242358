"""A plan names every misplaced tensor, with its path and line, and reports nothing for sound models."""

import functools

import judge
import pytest
from judged import SOUND, WRONG, marked_line
from simulated import run_simulated

pytestmark = pytest.mark.slow
FREE = ("item", "numpy")  # legal, but slow: the run continues


@pytest.fixture(scope="module")
def judged(own_models):
    return functools.cache(lambda device: run_simulated("cpu", judge.plan_judged, device, cwd=own_models))


@pytest.mark.parametrize("case", WRONG, ids=[case.name for case in WRONG])
def test_findings_have_path_and_line(case, judged):
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
