"""The compiled step: the same training up to rounding, compiled once per batch size, and never silently uncompiled."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from optimizers import ADAM as FUSED_ADAM
from optimizers import DIRECT
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

from runner import cli, run
from runner.device.precision import make_precision
from runner.errors import RunnerError
from runner.models.cnn import CNN
from runner.models.gpt import GPT
from runner.tasks.classification import Classification
from runner.tracking.journal_reader import read_series
from runner.training.optimizer import AveragedWeights
from runner.training.step.compiled import make_compiled
from runner.training.step.on_device import Compiling, OnDevice
from runner.training.step.train_step import StepOptions, make_step

CPU = torch.device("cpu")
ADAM = partial(FUSED_ADAM, lr=0.01)


@pytest.fixture
def traced(monkeypatch):
    """Trace and differentiate as usual, but run torch's kernels, as compiling C++ takes seconds."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


class Deciding(Mlp):
    """Reads the device in its forward pass, so it can't become one function."""

    def forward(self, inputs):
        return super().forward(inputs if inputs.sum() > 1e9 else inputs * 1.0)


def batches(num=5, rows=16, last=6, shape=(8,), classes=3):
    draw = torch.Generator().manual_seed(0)
    sizes = [rows] * (num - 1) + [last]
    return [
        ((torch.randn(size, *shape, generator=draw), torch.randint(0, classes, (size,), generator=draw)),)
        for size in sizes
    ]


def compiled_step(net, optimizer, task, *, say=lambda text: None, **kind):
    def make(**options):
        chosen = {"optimizer": optimizer, "precision": make_precision("fp32", device=CPU)}
        return make_step(net, task, **chosen, options=StepOptions(**options))

    return make_compiled(make, optimizer=optimizer, is_first=True, kind=Compiling(**kind), say=say)


def train(groups, *, compiled, model=Mlp, optimizer=ADAM, said=None, clip=None, ema=None, name="fp32", schedule=None):
    torch.manual_seed(0)
    net = model()
    average = AveragedWeights(net, decay=ema) if ema else None
    opt = optimizer(net.parameters())
    plan = schedule(opt) if schedule else None
    chosen = {
        "optimizer": opt,
        "precision": make_precision(name, device=CPU),
        "clip_grad_norm": clip,
        "average": average,
    }

    def make(**more):
        return make_step(net, Classification(), **chosen, options=StepOptions(**more))

    said = [] if said is None else said
    step = make()
    if compiled:
        step = make_compiled(make, optimizer=opt, is_first=True, kind=Compiling(), say=said.append)
    rows = []
    for _ in range(2):
        for group in groups:
            rows.append(torch.stack(list(step(group).values())))
            if plan:
                plan.step()
    weights = (average.model if average else net).state_dict()
    return torch.stack(rows), weights, opt


SETTINGS = {
    "muon": {"optimizer": DIRECT["muon"]},  # test_fused_update tests the other formulas
    "adamw, groups, a schedule, clipped and averaged": {
        "clip": 0.5,
        "ema": 0.9,
        "optimizer": lambda parameters: torch.optim.AdamW(
            [{"params": (listed := list(parameters))[:2]}, {"params": listed[2:], "lr": 0.1, "weight_decay": 0.1}],
            lr=0.1,
            fused=True,
        ),
        "schedule": lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.7),
    },
    "bf16": {"name": "bf16"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_same_but_for_rounding(traced, settings):
    said: list[str] = []
    groups = batches(3, last=16)
    rows, weights, opt = train(groups, compiled=True, said=said, **settings)
    expected, expected_weights, other = train(groups, compiled=False, **settings)
    assert said[0].startswith("compile: the whole step is one function")
    # the result is rounded to bfloat16
    rounds = settings.get("name") == "bf16" or settings.get("optimizer") is DIRECT["muon"]
    close = {"rtol": 3e-2, "atol": 3e-2} if rounds else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(rows, expected, **close)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, **close)
    mine, its = opt.state_dict(), other.state_dict()
    assert mine["param_groups"] == its["param_groups"]  # rates are numbers there, also in a checkpoint
    assert mine["state"].keys() == its["state"].keys()


def test_groups_of_batches(traced):
    groups = [tuple(one[0] for one in pair) for pair in (batches(2, last=16), batches(2, last=16), batches(2))]
    torch.testing.assert_close(train(groups, compiled=True)[0], train(groups, compiled=False)[0], rtol=1e-4, atol=1e-5)


def test_one_graph_per_size_in_first_epoch(traced):
    groups, seen = batches(), []
    torch.manual_seed(0)
    net = Mlp()
    opt = ADAM(net.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    step = compiled_step(net, opt, Classification())
    for _ in range(4):
        for group in groups:
            step(group)
            schedule.step()
        with torch.no_grad():  # an evaluation between two steps
            net.eval()(groups[0][0][0])
            net.train()
        seen.append(counters["stats"]["unique_graphs"])
    assert seen == [2, 2, 2, 2]


def test_a_rare_smaller_batch_is_not_compiled(traced):
    torch.manual_seed(0)
    net = Mlp()
    opt = ADAM(net.parameters())
    step = compiled_step(net, opt, Classification(), usual_rows=16)
    rows = [torch.stack(list(step(group).values())) for _ in range(2) for group in batches()]
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(torch.stack(rows), train(batches(), compiled=False)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from dynamo
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": Deciding}, "as the step can't be one function: Data-dependent branching"),
        (
            {"schedule": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=20)},
            "the schedule moves betas",
        ),
        ({"optimizer": partial(torch.optim.RMSprop, lr=0.01)}, "RMSprop with these settings takes its steps itself"),
    ],
)
def test_uncompilable_step_compiles_only_forward(traced, settings, reason):
    said: list[str] = []
    rows, _, _ = train(batches(), compiled=True, said=said, **settings)
    torch.testing.assert_close(rows, train(batches(), compiled=False, **settings)[0], rtol=1e-4, atol=1e-5)
    assert said[-1].startswith("compile: only the forward pass") and reason in said[-1]
    assert counters["stats"]["unique_graphs"] >= 1


def test_a_cnn_is_one_function(traced):
    said: list[str] = []
    train(batches(3, last=16, shape=(1, 8, 8)), compiled=True, model=partial(CNN, [1, 8, 8], 3, [8]), said=said)
    assert "one function" in said[0] and "alone" not in said[0]


def test_without_a_compiler(monkeypatch, tmp_path):
    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    lacking = torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)})
    with lacking, pytest.raises(RunnerError) as caught:
        train(batches(1), compiled=True, model=partial(nn.Linear, 8, 3))
    assert "no C++ compiler" in str(caught.value) and "train.compile=false" in str(caught.value)
    torch._dynamo.reset()


WORDS = [
    "data=digits",
    "data.limit=320",  # two whole batches per epoch: one size to compile
    "model=mlp",
    "model.hidden_sizes=[8]",
    "device=cpu",
    "train.compile=true",
    "tracking.enabled=false",
    "scheduler=cosine",
]


DECIDING = """
from runner.tasks.classification import Classification

class Deciding(Classification):
    def __call__(self, model, batch):
        values = super().__call__(model, batch)
        return values if values["loss"] > -1 else {}
"""


@pytest.fixture
def compilers():
    """End the threads that torch keeps for later compilations."""
    yield
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    shutdown_compile_workers()
    AsyncCompile.pool().shutdown()
    AsyncCompile.pool.cache_clear()


@pytest.mark.slow
def test_compiled_run_resumes_bitwise_identical(own_folder, compilers, monkeypatch):
    monkeypatch.setattr("runner.experiment.session.illustrate", lambda *args, **more: [])
    words = [*WORDS, "train.precision=fp64", "train.num_steps=5"]
    run(words, folder=own_folder / "whole")
    run([*words, "train.max_seconds=0.000001"], folder=own_folder / "parts")  # ends after one step
    assert cli.main(["resume", "parts", "train.max_seconds=null"]) == 0
    run([*words, "train.compile=false"], folder=own_folder / "eager")
    whole, parts, eager = (read_series(own_folder / name) for name in ("whole", "parts", "eager"))
    for name in ("train/loss", "train/accuracy", "train/lr", "val/loss", "val/accuracy"):
        assert whole[name][2].tolist() == parts[name][2].tolist(), name
        torch.testing.assert_close(whole[name][2], eager[name][2], rtol=1e-12, atol=0)
    assert "the whole step is one function" in (own_folder / "whole" / "runner.log").read_text()
    assert json.loads(Path("parts/summary.json").read_text())["num_steps"] == 5
    assert not _debug_get_cache_entry_list(OnDevice.take_one.__code__), "torch refuses the ninth run of a process"


def test_partly_compiled_run_resumes_bitwise_identical(traced, own_folder, monkeypatch):
    """Only the first step of the uninterrupted run is uncompiled."""
    firsts = []

    def noted(make, *, is_first, **more):
        firsts.append(is_first)
        return make_compiled(make, is_first=is_first, **more)

    monkeypatch.setattr("runner.training.step.choose.make_compiled", noted)
    (own_folder / "deciding.py").write_text(DECIDING)
    words = [*WORDS, "task._target_=deciding.Deciding", "task.plots=false", "train.num_steps=5"]
    run(words, folder=own_folder / "whole")
    run([*words, "train.max_seconds=0.000001"], folder=own_folder / "parts")  # ends after one step
    assert cli.main(["resume", "parts", "train.max_seconds=null"]) == 0
    curves = [read_series(own_folder / name)["train/loss"][2].tolist() for name in ("whole", "parts")]
    assert len(curves[0]) == 5 and curves[0] == curves[1]
    assert firsts == [False] * 3  # the first step was taken before
    assert "compile: only the forward pass" in (own_folder / "whole" / "runner.log").read_text()


@pytest.mark.slow
def test_gpt_is_one_function(traced):
    from runner.tasks.language import Language

    torch.manual_seed(0)
    net = GPT(vocab_size=11, context_length=8, depth=1, width=32, num_heads=2)
    opt = ADAM(net.parameters())
    said: list[str] = []
    step = compiled_step(net, opt, Language(), say=said.append)
    tokens = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        step(((tokens, tokens),))
    assert "one function" in said[0] and "alone" not in said[0]
