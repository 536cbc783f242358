"""Plans of architectures that plan was not written for: verdicts, waits, control flow by values, and the CPU's operations."""

import functools
import shutil
from pathlib import Path

import judge
import pytest
from simulated import run_simulated
from zoo import BY_VALUES, SOUND, case_of, marked_line, write_conf

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[2] / "support"
BOTH = ["decoder"]  # also in bf16
MPS = [case_of("dropping")]
COMPARED = [("functional", "fp32"), ("decoder", "bf16")]


@pytest.fixture(scope="module")
def judged(own_models):
    shutil.copy(SUPPORT / "zoo.py", own_models)
    write_conf(own_models)

    @functools.cache
    def answers(device):
        if device == "cpu":
            return run_simulated("cpu", judge.compare_with_real_steps, COMPARED, cwd=own_models)
        cases, in_halves = (MPS, []) if device == "mps" else ([*SOUND, *BY_VALUES], BOTH)
        return run_simulated("cpu", judge.plan_zoo, device, [case.name for case in cases], in_halves, cwd=own_models)

    return answers


def lines_of(findings):
    """Return the lines of the findings in the zoo; findings in libraries or the runner count as one."""
    return {found["line"] if found["line"].startswith("zoo.py:") else "torch" for found in findings}


@pytest.mark.parametrize("case", SOUND, ids=lambda case: case.name)
def test_sound_models_have_only_sync_findings(case, judged):
    names = [case.name, f"{case.name}, bf16"] if case.name in BOTH else [case.name]
    for name in names:
        answer = judged("cuda:1")[name]
        assert answer["unknown"] == ""
        assert {found["grade"] for found in answer["findings"]} <= {"likely"}
        expected = {mark if mark == "torch" else marked_line(mark) for mark in case.waits}
        assert lines_of(answer["findings"]) == expected, answer["findings"]
        if case.name == "scaled":
            assert answer["unfollowed"] == [marked_line("scaled")]
        assert answer["memory"]["peak_bytes"] > answer["num_parameters"]
        assert answer["step"]["flops"] > 0


@pytest.mark.parametrize("case", MPS, ids=lambda case: case.name)
def test_missing_mps_kernels_are_reported(case, judged):
    answer = judged("mps")[case.name]
    assert answer["unknown"] == ""
    assert {found["grade"] for found in answer["findings"]} <= {"likely"}
    others = [found for found in answer["findings"] if found["kind"] != "no kernel"]
    assert lines_of(others) <= {"torch", *(marked_line(mark) for mark in case.waits if mark != "torch")}
    if case.name == "dropping":
        assert any(found["what"].startswith("rrelu_with_noise") for found in answer["findings"])


@pytest.mark.parametrize("case", BY_VALUES, ids=lambda case: case.name)
def test_value_dependent_operation_is_named_with_line(case, judged):
    answer = judged("cuda:1")[case.name]
    what, _, place = answer["unknown"].partition(" at ")
    assert what.startswith("it goes by values")
    assert what.rpartition(": ")[2].strip("_") == SAYS[case.name]
    assert place.split(" in ")[0] == marked_line(case.name)
    assert not any(found["grade"] == "certain" for found in answer["findings"])


SAYS = {
    "branch": "bool(tensor)",
    "mask": "tensor[mask]",
    "nonzero": "nonzero()",
    "unique": "unique()",
    "size": "int(tensor)",
    "while": "bool(tensor)",
    "range": "a tensor used as an index",
    "masked_select": "masked_select()",
    "repeat": "repeat_interleave()",
    "bincount": "bincount()",
    "where": "torch.where(mask)",
    "experts": "nonzero()",
    "lengths": "pack_padded_sequence()",
}


@pytest.mark.parametrize("name", [f"{name}, {precision}" for name, precision in COMPARED])
def test_simulated_cpu_step_equals_real_costs(name, judged):
    found = judged("cpu")[name]
    assert found["plan"] == found["real"]
    assert found["planned_bytes"] == pytest.approx(found["real_bytes"], rel=0.05)
