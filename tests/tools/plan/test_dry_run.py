"""Plans of models with and without errors, by path and line, compared with the CPU's operations."""

import functools
import shutil

import judge
import judged
import pytest
from judged import BY_VALUES, SOUND, UNUSUAL, WRONG, marked_line
from simulated import run_simulated

pytestmark = pytest.mark.slow
FREE = ("item", "numpy")  # legal, but slow: the run continues
COMPARED = ["functional", "decoder, bf16"]
NAMES = {
    "cuda:1": [*(case.name for case in (*WRONG, *SOUND, *UNUSUAL)), "decoder, bf16", *BY_VALUES, *judge.MODELS],
    "mps": ["float64", *(case.name for case in SOUND), "dropping", "cnn on signals"],
}


@pytest.fixture(scope="module")
def own_models(tmp_path_factory):
    """A directory with conf/ and a module, like a user's."""
    folder = tmp_path_factory.mktemp("own")
    for group, key in {"model": "name", "task": "name", "data": "case"}.items():
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "judged.yaml").write_text(f"_target_: judged.{group}\n{key}: ???\n")
    shutil.copy(judged.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def plans(own_models):
    return functools.cache(lambda device: run_simulated("cpu", judge.plans, device, NAMES[device], cwd=own_models))


def lines_of(findings):
    """Return the lines of the findings in the cases; findings in libraries or the runner count as one."""
    return {found["line"] if found["line"].startswith("judged.py:") else "torch" for found in findings}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_findings_have_path_and_line(case, plans):
    answer = plans(case.device)[case.name]
    named = [found for found in answer["findings"] if found["line"].endswith(marked_line(case.name))]
    assert named, answer["findings"]
    assert (named[0]["kind"], named[0]["path"]) == (case.kind, case.path)
    assert named[0]["write"]
    assert named[0]["grade"] == ("likely" if case.name in FREE else "certain")


@pytest.mark.parametrize(
    ("device", "name"),
    [(device, name) for device in NAMES for name in NAMES[device] if name in {*judge.MODELS, *(c.name for c in SOUND)}],
)
def test_sound_model_has_no_findings(name, device, plans):
    answer = plans(device)[name]
    assert "problems" not in answer, answer
    assert (answer["findings"], answer["unknown"], answer["host_reads"]) == ([], "", [])
    assert answer["memory"]["peak_bytes"] > answer["num_parameters"]
    assert answer["step"]["flops"] > 0


@pytest.mark.parametrize("name", [*(case.name for case in UNUSUAL), "decoder, bf16"])
def test_unusual_models_have_only_sync_findings(name, plans):
    answer = plans("cuda:1")[name]
    assert answer["unknown"] == ""
    assert {found["grade"] for found in answer["findings"]} <= {"likely"}
    waits = judged.case_of(name.partition(",")[0]).waits
    expected = {mark if mark == "torch" else marked_line(mark) for mark in waits}
    assert lines_of(answer["findings"]) == expected, answer["findings"]
    if name == "scaled":
        assert answer["unfollowed"] == [marked_line("scaled")]
    assert answer["memory"]["peak_bytes"] > answer["num_parameters"]
    assert answer["step"]["flops"] > 0


def test_missing_mps_kernels_are_reported(plans):
    answer = plans("mps")["dropping"]
    assert answer["unknown"] == ""
    assert {found["grade"] for found in answer["findings"]} == {"likely"}
    assert lines_of(found for found in answer["findings"] if found["kind"] != "no kernel") <= {"torch"}
    assert any(found["what"].startswith("rrelu_with_noise") for found in answer["findings"])


@pytest.mark.parametrize("name", BY_VALUES)
def test_value_dependent_operation_is_named_with_line(name, plans):
    answer = plans("cuda:1")[name]
    what, _, place = answer["unknown"].partition(" at ")
    assert what.startswith("it goes by values")
    assert what.rpartition(": ")[2].strip("_") == BY_VALUES[name][1]
    assert place.split(" in ")[0] == marked_line(name)
    assert not any(found["grade"] == "certain" for found in answer["findings"])


@pytest.fixture(scope="module")
def compared(own_models):
    return run_simulated("cpu", judge.compare_with_real_steps, COMPARED, cwd=own_models)


@pytest.mark.parametrize("name", COMPARED)
def test_simulated_cpu_step_equals_real_costs(name, compared):
    found = compared[name]
    assert found["plan"] == found["real"]
    assert found["planned_bytes"] == pytest.approx(found["real_bytes"], rel=0.05)
