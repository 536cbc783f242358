"""A plan's memory compared with a real step on this CPU, by the count of torch's allocator."""

from dataclasses import asdict

import pytest
from real_step import measure
from simulated import run_simulated

from runner.config.compose import composed_with, composer
from runner.device.hardware import Speeds
from runner.tools.plan.simulator import simulated_device
from runner.tools.plan.worker import look

pytestmark = pytest.mark.slow
REQUEST = {"speeds": asdict(Speeds()), "usable_bytes": None, "precisions": [], "seconds": 0, "processes": {}}
MADE_UP = ("data=synthetic", "data.num_rows=2000")
RUNS = {
    "cnn, accumulated": ("model=cnn", "train.batch_size=64", "train.accumulate_steps=2", "train.clip_grad_norm=1"),
    "transformer": (*MADE_UP, "model=transformer", "data.shape=[32,16]", "train.batch_size=64", "train.precision=bf16"),
    "lstm": (*MADE_UP, "model=lstm", "model.hidden_size=64", "model.num_layers=2", "data.shape=[64,16]", "train.batch_size=64", "optimizer=sgd"),
    "recomputed": (*MADE_UP, "model=vit", "data.shape=[3,16,16]", "model.depth=4", "model.dropout=0.1", "train.recompute=[layers.*]"),
}  # fmt: skip


def cfg_of(words):
    return composed_with(composer([]), ["device=cpu", *words])


def planned(_, *words):
    with simulated_device("cpu", has_numbers=False) as device:
        return look(cfg_of(words), device, REQUEST)


def taken(_, *words):
    return measure(cfg_of(words))


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_peak_is_within_15_percent(words, tmp_path):
    plan, real = (run_simulated("cpu", each, *words, cwd=tmp_path) for each in (planned, taken))
    assert 0.85 <= plan["memory"]["peak_bytes"] / real <= 1.15
    assert sum(plan["memory"]["parts"].values()) == plan["memory"]["peak_bytes"]
    assert plan["findings"] == []


def proposed(_, usable_bytes, *words):
    with simulated_device("cpu", has_numbers=False) as device:
        return look(cfg_of(words), device, {**REQUEST, "usable_bytes": usable_bytes}).get("recompute")


@pytest.mark.parametrize(("usable_mib", "pattern"), [(100, "stack.blocks.*"), (200, None)])
def test_recompute_is_proposed_only_if_sufficient(usable_mib, pattern, tmp_path):
    words = (*MADE_UP, "model=transformer", "model.depth=6", "data.shape=[64,32]", "train.batch_size=64")
    assert run_simulated("cpu", proposed, usable_mib * 2**20, *words, cwd=tmp_path) == pattern


def evaluated(_, *words):
    """Return the worker's answer with 20 MiB of usable memory."""
    request = {**REQUEST, "usable_bytes": 20 * 2**20, "seconds": 20}
    with simulated_device("cpu", has_numbers=False) as device:
        return look(cfg_of(words), device, request)


def test_larger_evaluation_batch_is_peak(tmp_path):
    words = (*MADE_UP, "data.val_fraction=0.5", "data.test_fraction=0", "model=mlp", "model.hidden_sizes=[4096]")
    words = (*words, "train.batch_size=16", "train.eval_batch_size=20000")
    plan = run_simulated("cpu", evaluated, *words, cwd=tmp_path)
    memory = plan["memory"]
    assert memory["peak_phase"] == "evaluation" and memory["peak_bytes"] == memory["evaluation_bytes"]
    assert 2 * 1000 * 4096 * 4 < memory["evaluation_bytes"] < 3 * 1000 * 4096 * 4, "the split has 1,000 rows"
    assert sum(memory["parts"].values()) == memory["peak_bytes"]
    assert memory["step_bytes"] < 20 * 2**20 and "recompute" not in plan and plan["largest_batch_size"]


def with_a_schedule(_, *words):
    with simulated_device("cpu", has_numbers=False) as device:
        return look(cfg_of(words), device, REQUEST)


def test_planned_schedule_has_runs_steps(tmp_path):
    """torch's OneCycleLR refuses another step."""
    (tmp_path / "conf/scheduler").mkdir(parents=True)
    text = "_target_: torch.optim.lr_scheduler.OneCycleLR\n_partial_: true\nmax_lr: 0.01\ntotal_steps: 1\n"
    (tmp_path / "conf/scheduler/one.yaml").write_text(text)
    words = (*MADE_UP, "model=linear", "scheduler=one", "train.num_steps=1")
    assert run_simulated("cpu", with_a_schedule, *words, cwd=tmp_path)["findings"] == []
