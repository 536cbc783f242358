"""Plans of models with and without errors, by path and line, compared with the CPU's operations."""

import functools
import shutil
import warnings
from dataclasses import asdict

import judged
import pytest
from judged import BY_VALUES, OPTIMIZERS, SOUND, UNUSUAL, WRONG, marked_line
from real_step import Third, measure
from simulated import run_simulated
from torch.utils._python_dispatch import TorchDispatchMode

from runner.config.compose import composed_with, composer
from runner.device.hardware import Speeds
from runner.inspection.operations import OperationObserver, observe
from runner.tools.plan.dry_run import SimulatedRun
from runner.tools.plan.simulator import simulated_device
from runner.tools.plan.worker import look

pytestmark = pytest.mark.slow
FREE = ("item", "numpy")  # legal, but slow: the run continues
COMPARED = ["functional", "decoder, bf16"]
REQUEST = {"speeds": asdict(Speeds()), "usable_bytes": None, "precisions": [], "seconds": 0, "processes": {}}
NOT_COUNTED = ("aten.detach.default", "prim.device.default")
IMAGES = ["data=synthetic", "data.num_rows=64", "data.shape=[3,16,16]", "train.batch_size=16"]
SIGNALS = ["data=synthetic", "data.num_rows=64", "data.shape=[2,20]", "train.batch_size=16"]
#: reproduces one number: no task for autoencoders is needed
SAME = ["data=synthetic", "data.num_rows=64", "data.num_features=1", "data.num_classes=null", "task=regression"]
MODELS = {
    "cnn on signals": ["model=cnn", "model.kernel_size=5", *SIGNALS],
    "resnet18": ["model=resnet", "model.width=8", *IMAGES],
    "vit": ["model=vit", "model.width=24", "model.depth=2", *IMAGES],
    "gru": ["model=gru", "model.hidden_size=8", "model.bidirectional=true", *SIGNALS],
    "lstm": ["model=lstm", "model.hidden_size=8", "model.num_layers=2", "model.pooling=mean", *SIGNALS],
    "frozen": ["model=resnet", "model.width=8", "model.freeze=stem", "optimizer.no_decay=norms_and_biases", *IMAGES],
    "autoencoder": ["model=autoencoder", *SAME],
    "mnist1d": ["model=mlp", "data=mnist1d", "data.num_rows=100", "data.num_test_rows=20"],
}
NAMES = {
    "cuda:1": [*(case.name for case in (*WRONG, *SOUND, *UNUSUAL)), "decoder, bf16", *BY_VALUES, *MODELS],
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


def cfg_of(name):
    """Return the configuration of a model of the runner, or of a case with a precision: "decoder, bf16"."""
    if name in MODELS:
        return composed_with(composer([]), MODELS[name])
    case, _, precision = name.partition(", ")
    cfg = _composed(OPTIMIZERS.get(case), precision or "fp32").copy()
    cfg.model.name = cfg.task.name = cfg.data.case = case
    return cfg


@functools.cache
def _composed(optimizer, precision):
    words = [f"{group}=judged" for group in ("model", "task", "data")]
    words += [f"train.precision={precision}", "data.num_workers=0"]
    return composed_with(composer([]), words + ([f"optimizer._target_={optimizer}"] if optimizer else []))


def planned(_, device_name, names):
    warnings.simplefilter("ignore")
    with simulated_device(device_name, has_numbers=False) as device:
        return {name: look(cfg_of(name), device, REQUEST) for name in names}


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Seen(OperationObserver):
    def __init__(self):
        self.names = []

    def after(self, done):
        self.names.append(str(done.op))


def real_steps(cfg):
    third = Third(cfg)
    with Operations() as operations:
        third.take()
    return operations.names


def simulated_steps(cfg, device):
    run = SimulatedRun(cfg, device)
    run.take_steps()
    seen, step = Seen(), run.step()
    with observe(seen):
        run.buffer.write(step(run.group))
    return seen.names, run.costs.peak.num_bytes


def compare_with_real_steps(_, names):
    """Return the operations and the peak memory of a real and a simulated third step."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        cfg = cfg_of(name)
        cfg.backends.cpu.onednn = False  # as on a simulated device
        found[name] = {"real": real_steps(cfg.copy()), "real_bytes": measure(cfg.copy())}
    with simulated_device("cpu", has_numbers=False) as device:
        for name, each in found.items():
            each["plan"], each["planned_bytes"] = simulated_steps(cfg_of(name), device)
    for each in found.values():
        for key in ("real", "plan"):
            each[key] = [name for name in each[key] if name not in NOT_COUNTED and "profiler" not in name]
    return found


@pytest.fixture(scope="module")
def plans(own_models):
    return functools.cache(lambda device: run_simulated("cpu", planned, device, NAMES[device], cwd=own_models))


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
    [(device, name) for device in NAMES for name in NAMES[device] if name in {*MODELS, *(c.name for c in SOUND)}],
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
    return run_simulated("cpu", compare_with_real_steps, COMPARED, cwd=own_models)


@pytest.mark.parametrize("name", COMPARED)
def test_simulated_cpu_step_equals_real_costs(name, compared):
    found = compared[name]
    assert found["plan"] == found["real"]
    assert found["planned_bytes"] == pytest.approx(found["real_bytes"], rel=0.05)
