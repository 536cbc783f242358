"""A step that does not fit in memory: an error with the size that fits, or a step in parts with the same result."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner.device import backends
from runner.device.precision import make_precision
from runner.errors import RunnerError
from runner.tasks.classification import Classification
from runner.tracking.journal import read_points
from runner.training.carried_state import CarriedState
from runner.training.loop import Best, Progress
from runner.training.step.split_batch import SplitBatch, explain, in_parts
from runner.training.step.train_step import StepOptions, make_step
from runner.version import PACKAGES

CPU = torch.device("cpu")


def test_batch_is_split_only_by_rows():
    batch = {"x": torch.arange(10).view(5, 2), "y": torch.arange(5), "scale": torch.ones(3), "name": "a"}
    parts = list(in_parts(batch, 2))
    assert [part["y"].tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part["scale"] is batch["scale"] and part["name"] == "a" for part in parts)
    assert next(in_parts(batch, 1)) is batch
    assert len(list(in_parts(batch, 64))) == 5


class Small(nn.Module):
    """Refuses more rows than fit, after it has changed its buffers."""

    def __init__(self, most_rows, error=torch.OutOfMemoryError):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.most_rows, self.error = most_rows, error
        self.remembers, self.last = False, None

    def forward(self, inputs):
        self.calls += len(inputs)
        self.last = inputs.sum() if self.remembers else None
        if len(inputs) > self.most_rows:
            raise self.error("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return self.layers(inputs)


def trained(most_rows, *, group=1, error=torch.OutOfMemoryError, remembers=False):
    torch.manual_seed(0)
    model = Small(most_rows, error)
    model.remembers = remembers
    optimizer = torch.optim.Adam(model.parameters())
    said = []
    progress = Progress(Best("val/loss", "min"))
    task, precision = Classification(), make_precision("fp32", device=CPU)
    carried = CarriedState(model, task, device=CPU)
    parts = SimpleNamespace(device=CPU, model=model, optimizer=optimizer, carried=carried)
    pieces = SplitBatch(parts, progress, say=said.append)
    options = StepOptions(wrap_forward_backward=pieces.wrap)
    step = make_step(model, task, optimizer=optimizer, precision=precision, clip_grad_norm=1.0, options=options)
    batches = [(torch.randn(rows, 6), torch.randint(3, (rows,))) for rows in (13, 8, 13, 5)]
    values = [step(batches[at : at + group]) for at in range(0, 4, group)]
    return model, values, said, progress


def test_state_that_forward_replaces_refuses_parts():
    with pytest.raises(RunnerError, match=r"replaces `model\.last`"):
        trained(4, remembers=True)


@pytest.mark.parametrize("group", [1, 2])
def test_parts_give_the_same_step(group):
    whole, expected, silence, _ = trained(100, group=group)
    split, found, said, progress = trained(4, group=group)
    assert silence == [] and progress.num_pieces == 4 and len(said) == 2
    assert "4 parts of 4 rows" in said[-1]
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name])
    for one, other in zip(whole.state_dict().values(), split.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)  # also its buffer: the changes of a failed pass are undone


def test_other_errors_and_unsplittable_batches_raise():
    with pytest.raises(torch.OutOfMemoryError):
        trained(0)
    with pytest.raises(ValueError, match="out of memory"):
        trained(4, error=ValueError)
    words = "[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    assert backends.is_out_of_memory(RuntimeError(words))
    assert backends.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB, max allowed: 2 GB)"))
    assert not backends.is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.parametrize(
    ("on_oom", "cuda_graph", "num_processes", "split", "stream"),
    [
        ("fail", False, 1, True, True),
        ("split", False, 1, False, True),
        ("fail", False, 2, False, True),
        ("fail", True, 1, False, False),
    ],
)
def test_nothing_is_advised_that_the_check_refuses(on_oom, cuda_graph, num_processes, split, stream):
    model = nn.Linear(2, 2)
    parts = SimpleNamespace(
        model=model,
        average=None,
        optimizer=torch.optim.SGD(model.parameters()),
        train=SimpleNamespace(batch_size=8),
        loaders=[SimpleNamespace(device_bytes=2**20)],
        device=CPU,
        precision=SimpleNamespace(name="bf16"),
    )
    settings = SimpleNamespace(train=SimpleNamespace(on_oom=on_oom, cuda_graph=cuda_graph))
    words = explain(torch.OutOfMemoryError("no memory"), parts, settings, num_processes=num_processes)
    assert "Write train.batch_size=4" in words
    assert ("train.on_oom=split" in words, "data.residency=stream" in words) == (split, stream)
    parts.train, parts.loaders = SimpleNamespace(batch_size=1), []
    words = explain(torch.OutOfMemoryError("no memory"), parts, settings, num_processes=num_processes)
    assert words.endswith("Write train.on_oom=split (the same step, in parts)" if split else "Write a smaller model")


#: a network with large values between its layers; it lowers its process's memory limit when it runs, but not in a plan
WIDE = """
import resource
import psutil
import torch
from torch import nn

class Wide(nn.Module):
    most_bytes = 330_000_000  # a step takes 490 of them, in halves 250; a fork has some free memory beside it

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 40_000), nn.Linear(40_000, 10)

    def forward(self, inputs):
        if type(inputs) is torch.Tensor and self.most_bytes:
            torch.ones(1, requires_grad=True).backward()  # torch's CUDA build starts a thread with the first
            taken = psutil.Process().memory_info().vms
            resource.setrlimit(resource.RLIMIT_AS, (taken + self.most_bytes, resource.RLIM_INFINITY))
            Wide.most_bytes = 0
        return self.last(self.first(inputs.flatten(1)).relu())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's memory")
def test_out_of_memory_names_size_or_splits(own_folder, warm):
    (own_folder / "my_models.py").write_text(WIDE)
    (own_folder / "conf" / "model").mkdir(parents=True)
    (own_folder / "conf" / "model" / "wide.yaml").write_text("_target_: my_models.Wide\n")
    words = ["model=wide", "device=cpu", "tracking.enabled=false", "train.num_steps=2"]
    words += ["train.batch_size=1024", "train.eval_batch_size=16"]

    def fresh(folder, *words, **environment):
        environment = {**os.environ, "PYTHONPATH": str(PACKAGES), **environment}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            [sys.executable, "-m", "runner", *words], cwd=folder, env=environment, text=True, **streams
        )

    def run(folder, *more, start=warm.command):
        command = start(own_folder, *words, f"hydra.run.dir={folder}", *more, OMP_NUM_THREADS="1")
        said, _ = command.communicate()
        assert "Traceback" not in said, said
        return command.returncode, said, json.loads((Path(folder) / "summary.json").read_text())

    # a plan would be forked from this process, which torch's CUDA build refuses after a backward pass
    code, output, summary = run("short", start=fresh)
    assert (code, summary["status"], summary["ending"]) == (1, "failed", "out_of_memory"), output
    for text in (
        "on cpu: can't allocate",
        "weights 11 MiB, gradients 11 MiB;",
        "train.batch_size=512",
        "train.on_oom=split",
    ):
        assert text in summary["error"], summary["error"]
    assert "the largest that fits" in output and "activations" in output

    code, output, split = run("split", "train.on_oom=split")
    assert (code, split["status"]) == (0, "finished"), output
    assert "out of memory: each batch is split into" in output
    assert [step for step, _ in read_points(Path("split"))["train/loss"]] == [1, 2]
