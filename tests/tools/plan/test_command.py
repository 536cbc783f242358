"""`python -m runner plan` as a user runs it: devices that this machine lacks, verdicts, exit codes, files."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import LONGEST, wait_for

from runner import cli
from runner.tools.plan import command
from runner.version import PACKAGES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]
LARGE = (
    "data=synthetic",
    "data.num_rows=20000",
    "data.num_features=1024",
    "model=mlp",
    "model.hidden_sizes=[2048,2048]",
)


def plan(capsys, *words):
    code = cli.main(["plan", "--json", *words])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_plan_of_missing_device(own_folder, capsys):
    assert cli.main(["plan", "device=cuda:1", "plan.device_name=A100-80GB", "backends.cuda.cudnn_tf32=false"]) == 0
    said = capsys.readouterr().out
    for line in ("device    cuda:1 (as asked; it is not on this machine", "verdict   would run", "limited by arithmetic",
                 "on cuda:1: 14 parameters, 12 buffers, 2 batch fields", "the step reads nothing of the device"):  # fmt: skip
        assert line in said
    assert {path.name for path in own_folder.iterdir()} == {"plan.json"}, "no run's folder, no MLflow"
    found = json.loads(Path("plan.json").read_text())
    assert (found["device"], found["would_run"], found["fits"]) == ("cuda:1", True, True)
    assert {item["device"] for item in found["placement"]} == {"cuda:1"}
    assert found["step"]["flops"] > 1e9
    assert list(found["largest_batch_size"]) == ["fp32", "bf16", "fp16", "tf32"]
    assert found["largest_batch_size"]["bf16"] > found["largest_batch_size"]["fp32"] > 128


def test_plan_out_of_memory_names_what_fits(own_folder, capsys):
    words = (*LARGE, "device=cuda:0", "plan.device_memory=320MiB")
    code, found, _ = plan(capsys, *words, "train.batch_size=8192")
    assert (code, found["verdict"], found["fits"]) == (1, "would not run", False)
    (finding,) = [finding for finding in found["findings"] if finding["kind"] == "memory"]
    largest = found["largest_batch_size"]["fp32"]
    assert f"train.batch_size={largest}" in finding["write"]
    at_it = plan(capsys, *words, f"train.batch_size={largest}")[1]
    above = plan(capsys, *words, f"train.batch_size={int(largest * 1.05)}")[1]
    assert (at_it["fits"], above["fits"]) == (True, False)
    assert at_it["memory"]["peak_bytes"] > 0.95 * at_it["memory"]["usable_bytes"]


def test_one_of_several_processes(own_folder, capsys):
    """Each process has its rows of a batch; with fsdp, a part of everything except activations, and whole blocks while they are used."""
    words = (*LARGE, "device=cuda:0", "plan.device_name=A100-80GB", "train.batch_size=8192")
    alone = plan(capsys, *words, "train.num_processes=1")[1]
    whole = plan(capsys, *words, "train.num_processes=4")[1]
    parted = plan(capsys, *words, "train.num_processes=4", "placement.strategy=fsdp")[1]
    assert [found["num_processes"] for found in (alone, whole, parted)] == [1, 4, 4]
    taken = [found["memory"]["parts"] for found in (alone, whole, parted)]
    assert 0 < taken[1]["activations"] <= 1.01 * taken[0]["activations"] / 4
    assert taken[1]["exchange"] == pytest.approx(taken[1]["weights"], rel=0.01)
    for part in ("weights", "optimizer"):
        assert taken[1][part] == taken[0][part]
        assert taken[2][part] == pytest.approx(taken[0][part] / 4, rel=0.01)
    assert taken[2]["weights"] < taken[2]["gathered"] <= 2 * taken[0]["weights"]
    for found in (alone, whole, parted):
        assert sum(found["memory"]["parts"].values()) == found["memory"]["peak_bytes"]
    sizes = [found["largest_batch_size"]["fp32"] for found in (alone, whole, parted)]
    assert 3.9 * sizes[0] < sizes[1] < sizes[2]


def test_several_devices_side_by_side(own_folder, capsys):
    code, found, _ = plan(capsys, "-m", "device=cpu,mps", "model=linear")
    assert (code, found["would_run"]) == (0, True)
    assert [(job["name"], job["device"]) for job in found["jobs"]] == [("device=cpu", "cpu"), ("device=mps", "mps")]


def test_error_is_reported_before_planning(own_folder, capsys):
    for words, said in {
        ("device=cuda:1", "modle=mlp"): "model=mlp",
        ("device=cuda:x",): "use `device=cuda`",
        ("device=cuda:0", "plan.device_memory=lots"): "plan.device_memory=80GiB",
        ("device=cuda:0", "plan.device_name=A101-80GB"): "plan.device_name=A100-80GB",
        ("device=mps", "plan.device_name=T4"): "M2-16GB",
        ("device=xpu:0",): "device=cuda:0",
        ("device=cuda:0", "plan.device_name=T4", "train.precision=bf16"): "train.precision=fp16",
        ("device=cuda:0,cpu",): "-m device=cuda:0,cpu",
        ("-m", "device=cpu,cuda:x", "model=linear"): "use `device=cuda`",
    }.items():
        code, _, err = plan(capsys, *words)
        assert (code, "Traceback" in err) == (2, False), words
        assert said in err, words
        assert "CPU-only build" not in err, words  # a plan allows a device that this machine lacks
    assert list(own_folder.iterdir()) == []


def test_streamed_plan_includes_next_batch(own_folder, capsys):
    words = ("device=cuda:0", "data=synthetic", "data.num_rows=4000", "model=linear", "train.batch_size=512")
    streamed, captured = (plan(capsys, *words, more)[1] for more in ("data.residency=stream", "train.cuda_graph=true"))
    batch = 512 * 64 * 4 + 512 * 8
    block = 3200 * 64 * 4 + 3200 * 8  # the number of batches in one copy: here, the whole training split
    assert streamed["memory"]["parts"]["batch"] == 2 * block
    assert [each["memory"]["parts"]["libraries"] / 2**20 for each in (streamed, captured)] == [64, 128]  # cuBLAS
    assert streamed["step"]["bytes_moved_to_device"] == batch


STEERED = """
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.flatten, self.linear = nn.Flatten(), nn.Linear(inputs, outputs)

    def forward(self, x):
        x = self.flatten(x)
        if x.mean() > 0:
            x = x * 2
        return self.linear(x)
"""
BRANCH = "if x.mean() > 0:\n            x = x * 2\n        return self.linear(x)"
MISSHAPEN = STEERED.replace(BRANCH, "\n        return self.linear(x[:, 1:])")
DOUBLE = STEERED.replace(BRANCH, "\n        return self.linear(x.double())")
SPARSE = STEERED.replace(BRANCH, "\n        return self.linear(x.mul(x.new_ones(1).cpu().to_sparse()))")


@pytest.mark.parametrize(
    ("source", "verdict", "line"),
    [
        (STEERED, "can't be told", 11),
        (MISSHAPEN, "would not run", 12),
        (DOUBLE, "would not run", 12),
        (SPARSE, "can't be told", 12),
    ],
)
def test_value_dependent_and_wrong_code_named(own_folder, capsys, source, verdict, line):
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/net.yaml").write_text(
        "_target_: nets.Net\ninputs: ${facts.in_features}\noutputs: ${facts.out_features}\n"
    )
    Path("nets.py").write_text(source)
    assert cli.main(["plan", "device=cuda:0", "model=net"]) == 1
    assert f"nets.py:{line}" in capsys.readouterr().out
    found = json.loads(Path("plan.json").read_text())
    assert found["verdict"] == verdict
    assert f"nets.py:{line}" in json.dumps([found["unknown"], found["findings"]])


ENDS_ABRUPTLY = """
import os
from runner.tools.plan import worker
from runner.tools.plan.simulator import device
device._put_guards = lambda kind: os.abort()
worker.main()
"""


def test_unsimulatable_device_is_reported(own_folder, capsys, monkeypatch, warm_programs):
    """As on a system whose torch has another layout: the child process ends abruptly."""

    def start(words, **more):
        assert words[-3:-1] == ["-m", "runner.tools.plan.worker"]
        return warm_programs([*words[:-3], "-c", ENDS_ABRUPTLY, words[-1]], **more)

    monkeypatch.setattr(command.subprocess, "Popen", start)
    code, found, _ = plan(capsys, "device=cuda:0", "model=linear")
    assert (code, found["verdict"], found["memory"]) == (1, "can't be told", None)
    assert found["unknown"].startswith("the simulation ended: ")


def test_runner_folder_in_current_folder_is_ignored(own_folder, monkeypatch):
    (own_folder / "runner").mkdir()
    (own_folder / "runner" / "__init__.py").write_text("raise SystemExit('the user's')")
    (own_folder / "my_models.py").touch()
    started = []
    popen = subprocess.Popen

    def start(words, **more):
        started.append((words, more["env"]))
        return popen([sys.executable, "-c", ""], **more)

    monkeypatch.setattr(command.subprocess, "Popen", start)
    with command.Child():
        pass
    ((words, environment),) = started
    asked = [*words[:-3], "-c", "import runner.version, my_models; print(runner.version.HERE, my_models.__file__)"]
    monkeypatch.undo()
    said = subprocess.run(asked, cwd=own_folder, env=environment, capture_output=True, text=True).stdout
    assert said.split() == [str(PACKAGES / "runner"), str(own_folder / "my_models.py")]


def test_ctrl_c_ends_it_and_its_process(own_folder, warm):
    with warm.command(own_folder, "plan", "device=cuda:0") as process:
        children = wait_for(psutil.Process(process.pid).children, "the process of the plan")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=LONGEST) == 130
    _, left = psutil.wait_procs(children, timeout=LONGEST)
    assert not left
