"""Runs that are trained together have the results of runs trained separately: weights, every point, checkpoints, ends."""

import math
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from members import built, largest_difference, members_of, trained_alone, trained_together
from torch import nn

from runner.device.placement import tensors
from runner.models import MLP as MLP_MODEL
from runner.tasks.classification import Classification
from runner.training import fit as one_fit
from runner.training import metric_buffer
from runner.training.evaluate import Evaluation
from runner.training.metric_buffer import MetricBuffer
from runner.training.signals import Stop
from runner.training.stacked import fit
from runner.training.stacked.fit import fit_together
from runner.training.stacked.stack import ModelStack
from runner.training.stacked.step import StackedGradients
from runner.training.stopping import Limits, OwnStopCondition

SEEDS = [["seed=3"], ["seed=0"]]
RATES = [[f"seed={seed}", f"optimizer.lr={lr}"] for lr in (1e-3, 3e-3) for seed in (0, 1)]
MLP = ["model=mlp", "model.hidden_sizes=[16]"]
EVERYTHING = ["model.dropout=0.3", "scheduler=cosine", "train.clip_grad_norm=0.5", "train.ema_decay=0.9"]
#: few epochs improve by an eighth, so the learning rate falls at different epochs for each seed
PLATEAU = [
    "scheduler=plateau",
    "scheduler.patience=0",
    "+scheduler.threshold=0.12",
    "scheduler.factor=0.5",
    "train.num_epochs=7",
]

CASES = {
    "everything, measured within epochs": ([*MLP, *EVERYTHING, "train.evaluate_every_steps=5"], SEEDS),
    "other rates, weight decay, betas, clipping and averages": (
        [*MLP, "optimizer=adamw", "scheduler=cosine"],
        [
            ["seed=0", "optimizer.lr=0.01", "optimizer.weight_decay=0.1", f"+optimizer.betas=[{beta},0.99]", *more]
            for beta, more in (
                (0.9, ["train.clip_grad_norm=0.1", "train.ema_decay=0.5"]),
                (0.5, ["train.clip_grad_norm=9", "train.ema_decay=0.99"]),
            )
        ],
    ),
    "sgd, in lanes of two, several batches a step, the mean of two steps a point": (
        [*MLP, "optimizer=sgd", "train.accumulate_steps=2", "metrics.every=2", "train.num_steps=5"],
        RATES,
    ),
    "folds of equal size": (
        [*MLP, "data.test_fraction=0", "model.dropout=0.2"],
        [[f"data.fold={k}", f"seed={k}"] for k in range(2)],
    ),
    "other milestones, rates of a group, weights of classes, smoothed": (
        [
            *MLP,
            "task.label_smoothing=0.1",
            "optimizer=sgd",
            "+scheduler._target_=torch.optim.lr_scheduler.MultiStepLR",
            "+scheduler._partial_=true",
        ],
        [
            [
                f"+scheduler.milestones={milestones}",
                f"optimizer.groups=[{{match:output,lr:{rate}}}]",
                f"task.class_weights=[{1 + rate},1,1,1,1,1,1,1,1,2]",
            ]
            for milestones, rate in (([2], 0.1), ([3, 5], 0.1), ([3, 5], 0.01))
        ],
    ),
    "other strengths of augmentation, a sampler": (
        [*MLP, "data.sampler=balanced"],
        [[f"seed={seed}", f"data.augment={{crop:{seed + 1},mixup:0.{seed + 2}}}"] for seed in range(2)],
    ),
    "attention with dropout": (
        ["model=vit", "model.width=16", "model.depth=1", "model.num_heads=2", "model.dropout=0.3", "optimizer=sgd"],
        SEEDS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_members_equal_single_runs(tmp_path, name):
    words, each = CASES[name]
    alone = trained_alone(tmp_path / "alone", words, each)
    together = trained_together(tmp_path / "together", words, each)
    weights, points = largest_difference(alone, together)
    assert weights <= 1e-5 and points <= 1e-5
    for one, other in zip(alone, together, strict=True):  # the copy of the last steps is not counted
        assert 0 <= one.result.pulls - other.result.pulls <= 1
    has_every_step = not any(word.startswith("metrics.every=") for word in words)
    for run in (*alone, *together) if has_every_step else ():
        assert [at for at, is_known in run.listener.epochs if is_known] == [
            run.result.num_steps // 2,
            run.result.num_steps,
        ]


@pytest.mark.parametrize("num_together", [1, 2])
def test_accumulated_batches_weigh_by_their_counts(tmp_path, monkeypatch, num_together):
    """Rows of the last class are padding."""

    def judge(self, outputs, batch):
        losses = nn.functional.cross_entropy(outputs, batch[1], ignore_index=9, reduction="sum")
        return {"loss": losses / self.num_counted(batch).clamp(min=1)}

    monkeypatch.setattr(Classification, "judge", judge)
    monkeypatch.setattr(Classification, "num_counted", lambda self, batch: (batch[1] != 9).sum(), raising=False)
    words = [*MLP, "train.accumulate_steps=2", "train.num_steps=4", "train.batch_size=7"]
    alone = trained_alone(tmp_path / "alone", words, SEEDS)
    together = trained_together(tmp_path / "together", words, SEEDS, num_together)
    weights, points = largest_difference(alone, together)
    assert weights <= 1e-5 and points <= 1e-5


def test_plateau_rates_follow_members_own_metrics(tmp_path):
    """Also with equal settings: sharing the first member's rate would give equal results only by chance."""
    words, seeds = [*MLP, *PLATEAU, "optimizer.lr=0.01"], [*SEEDS, ["seed=7"]]
    runs = trained_together(tmp_path / "together", words, seeds)
    alone = trained_alone(tmp_path / "alone", words, seeds)
    rates, own = (
        [[(step, rate) for (name, step), rate in run.listener.points.items() if name == "train/lr"] for run in some]
        for some in (runs, alone)
    )
    assert rates == own and any(each != rates[0] for each in rates)
    kept, expected = ([run.parts.schedule.state_dict()["_last_lr"] for run in some] for some in (runs, alone))
    assert kept == expected and any(each != kept[0] for each in kept)


def test_cnn_in_float64_equals_single_runs(tmp_path):
    """In float32, rounding sometimes changes the sign of a ReLU's input of 1e-8, which changes a layer's gradients by 1e-2."""
    words = ["model=cnn", "model.channels=[4,8]", "model.dropout=0.2", "scheduler=cosine", "train.clip_grad_norm=0.5"]
    words += ["train.ema_decay=0.9", "data.augment={crop:1,rotate:10}"]
    alone = trained_alone(tmp_path / "alone", words, SEEDS, in_float64=True)
    together = trained_together(tmp_path / "together", words, SEEDS, in_float64=True)
    weights, points = largest_difference(alone, together)
    assert weights <= 1e-9 and points <= 1e-6


def test_one_by_one_equals_single_runs_bitwise(tmp_path, monkeypatch):
    """Also of a model that draws from the process's generator."""
    forward = MLP_MODEL.forward
    monkeypatch.setattr(MLP_MODEL, "forward", lambda self, rows: forward(self, rows + 0.1 * torch.randn_like(rows)))
    words = [*MLP, *EVERYTHING, "optimizer=muon"]
    alone = trained_alone(tmp_path / "alone", words, SEEDS)
    together = trained_together(tmp_path / "together", words, SEEDS, 1)
    assert largest_difference(alone, together) == (0.0, 0.0)
    for one, other in zip(alone, together, strict=True):
        for kept in ("average", "optimizer"):
            mine, theirs = (tensors(run.state()[kept]) for run in (one, other))
            assert mine and all(map(torch.equal, mine, theirs))


def test_group_in_parts_stops_with_checkpoints(tmp_path):
    """A signal during the first part also ends the second, with a checkpoint."""
    words, stop, windows = [*MLP, "train.num_epochs=4"], Stop(), []
    each = [[f"seed={seed}"] for seed in range(4)]
    runs, generators = built(tmp_path, words, each)
    for run in runs:
        run.listener.window = lambda window, folder=run.folder: windows.append(folder.name)
    runs[0].listener.epoch = lambda end: setattr(stop, "signal", signal.SIGTERM) if end.step == 10 else None
    results = fit_together(members_of(runs, generators), 2, stop=stop, say=print)
    assert {result.status for result in results} == {"killed"}
    assert results[0].num_steps >= 10 and results[2].num_steps == results[3].num_steps >= 1
    is_of_first = [name in ("0", "1") for name in windows]
    assert is_of_first[0] and not is_of_first[-1] and is_of_first == sorted(is_of_first, reverse=True)
    assert all((run.folder / "checkpoints/last.pt").exists() for run in runs)


def test_group_in_pieces_equals_whole_group(tmp_path):
    words = ["model=cnn", "model.channels=[4,4]", "train.num_steps=3", "model.dropout=0.2"]
    each = [[f"seed={seed}"] for seed in range(3)]
    whole = trained_together(tmp_path / "whole", words, each, in_float64=True)
    pieces = trained_together(tmp_path / "pieces", words, each, 2, in_float64=True)
    assert largest_difference(whole, pieces)[0] <= 1e-9


def test_member_with_early_stopping_leaves_group(tmp_path):
    words = [*MLP, "train.early_stopping.patience=1", "optimizer=sgd", "optimizer.lr=2.5", "train.num_epochs=6"]
    each = [[f"seed={seed}"] for seed in range(4)]
    alone = trained_alone(tmp_path / "alone", words, each)
    together = trained_together(tmp_path / "together", words, each)
    ends = [run.result.num_epochs for run in alone]
    assert len(set(ends)) > 1 and [run.result.num_epochs for run in together] == ends
    for one, other in zip(alone, together, strict=True):
        assert other.result.ending == one.result.ending and other.result.best.step == one.result.best.step
        assert other.listener.points.keys() == one.listener.points.keys()


@pytest.mark.parametrize("pull_every", [1, 100])
def test_nan_loss_ends_only_its_member(tmp_path, monkeypatch, pull_every):
    """No checkpoint follows: the loss is in the previous window, which is delivered late, or in the current one."""
    words, each = [*MLP, "train.checkpoint_every_steps=1"], [["seed=0"], ["seed=1"], ["seed=2"]]
    words += [f"metrics.pull_every={pull_every}", "train.num_steps=4"]
    deliver = MetricBuffer._deliver
    monkeypatch.setattr(MetricBuffer, "_deliver", lambda self, pull: (time.sleep(0.05), deliver(self, pull)))

    def spoil(member):
        if member.settings.seed == 1:
            with torch.no_grad():
                next(member.parts.model.parameters()).fill_(math.nan)

    alone = trained_alone(tmp_path / "alone", words, each)
    runs = trained_together(tmp_path / "together", words, each, change=spoil)
    assert [run.result.status for run in runs] == ["finished", "failed", "finished"]
    assert "train/loss is nan at step 1" in runs[1].result.error
    assert not (runs[1].folder / "checkpoints").exists()
    assert largest_difference([alone[0], alone[2]], [runs[0], runs[2]])[0] <= 1e-5


def test_resumed_group_is_bitwise_identical(tmp_path, monkeypatch):
    """Stops in the middle of a point: the value of its first step is kept for the second, and not reported."""
    words = [*MLP, *EVERYTHING, "scheduler.num_steps=12", "metrics.every=2"]
    whole = trained_together(tmp_path / "whole", words, SEEDS)
    with monkeypatch.context() as stops:
        stops.setattr(fit.OwnStopCondition, "__call__", lambda _, step, at_once=False: "stopped" if step >= 7 else None)
        short = trained_together(tmp_path / "parts", [*words, "train.checkpoint_every_steps=7"], SEEDS)
    assert {(run.result.num_steps, run.result.status) for run in short} == {(7, "killed")}
    assert {key[1] for run in short for key in run.listener.points if key[0] == "train/loss"} == {2, 4, 6}
    rest = trained_together(tmp_path / "parts", words, SEEDS)
    for one, other in zip(whole, rest, strict=True):
        mine, theirs = one.state(), other.state()
        assert all(torch.equal(value, theirs["model"][name]) for name, value in mine["model"].items())
        assert all(torch.equal(value, theirs["average"][name]) for name, value in mine["average"].items())
        later = {key: value for key, value in one.listener.points.items() if key[1] > 7}
        assert later and all(other.listener.points[key] == value for key, value in later.items())


def test_points_at_end_of_training_arrive_once(tmp_path):
    for epochs in (2, 6):
        words = [*MLP, "metrics.every=7", f"train.num_epochs={epochs}"]
        alone = trained_alone(tmp_path / "alone", words, SEEDS)
        together = trained_together(tmp_path / "together", words, SEEDS)
        for one, other in zip(alone, together, strict=True):
            assert other.listener.point_steps == one.listener.point_steps == ([7, 10] if epochs == 2 else [17, 24, 30])
            rows, kept = one.state()["rows"], other.state()["rows"]
            assert rows["names"] == kept["names"] and rows["notes"] == kept["notes"] == {}
            assert rows["rows"].shape == kept["rows"].shape and not len(rows["rows"])
            assert max(other.listener.speeds) < 1e5
        assert largest_difference(alone, together) <= (1e-5, 1e-5)


def test_member_resumes_as_a_single_run(tmp_path):
    """A member's checkpoint is like that of any run."""
    words = [*MLP, "scheduler=cosine", "scheduler.num_steps=12"]
    whole = trained_alone(tmp_path / "whole", words, SEEDS)
    trained_together(tmp_path / "parts", [*words, "train.num_steps=7"], SEEDS)
    rest = trained_alone(tmp_path / "parts", words, SEEDS)
    for one, other in zip(whole, rest, strict=True):
        for name, value in one.state()["model"].items():
            assert torch.allclose(value, other.state()["model"][name], rtol=1e-5, atol=1e-6)


def test_members_at_other_steps_train_separately(tmp_path):
    """Like after a kill between the checkpoints of a step: one member has written its checkpoint, another has not."""
    trained_together(tmp_path / "parts", [*MLP, "train.num_steps=7"], SEEDS[:1])
    whole = trained_together(tmp_path / "whole", MLP, SEEDS)
    rest = trained_together(tmp_path / "parts", MLP, SEEDS)  # the second starts from the beginning
    assert largest_difference([whole[1]], [rest[1]])[0] <= 1e-6
    assert rest[0].result.status == "finished" and rest[0].result.num_steps == whole[0].result.num_steps
    for name, value in whole[0].state()["model"].items():
        assert torch.allclose(value, rest[0].state()["model"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_stacking", [False, True])
def test_group_out_of_memory_is_halved(tmp_path, monkeypatch, capsys, is_stacking):
    each = [[f"seed={seed}"] for seed in range(4)]
    words = [*MLP, "model.dropout=0.2"]
    whole = trained_together(tmp_path / "whole", words, each)
    make, forward, sizes = ModelStack.__init__, ModelStack.forward, []

    def limited_stack(self, parts, **more):
        if len(parts) > 2:
            raise torch.OutOfMemoryError("out of memory")
        make(self, parts, **more)

    def limited(*inputs):
        values = forward(*inputs)  # the masks have been drawn
        sizes.append(len(values["loss"]))
        if sizes[-1] > 2 and len(sizes) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return values

    if is_stacking:
        monkeypatch.setattr(ModelStack, "__init__", limited_stack)
    else:
        monkeypatch.setattr(ModelStack, "forward", limited)
    halves = trained_together(tmp_path / "halves", words, each)
    assert "out of memory: 2 of 4 members at a time now" in capsys.readouterr().out
    assert largest_difference(whole, halves)[0] <= 1e-6


def test_group_that_fails_keeps_its_points(tmp_path, monkeypatch):
    compute, calls = StackedGradients.compute, []

    def fails_at_step_5(gradients, batches):
        calls.append(batches)
        if len(calls) == 5:
            raise ValueError("unexpected pos")
        return compute(gradients, batches)

    monkeypatch.setattr(StackedGradients, "compute", fails_at_step_5)
    for run in trained_together(tmp_path, MLP, SEEDS):
        assert run.result.status == "failed" and "unexpected pos" in run.result.error
        assert [step for name, step in run.listener.points if name == "train/loss"] == [1, 2, 3, 4]


def test_members_get_same_answer_at_a_step():
    stop = Stop()
    condition = OwnStopCondition(stop, Limits(1, 9, save_every_seconds=3600))
    condition._saved -= 3600  # one checkpoint is due
    shared = fit.same_answer_for_all(condition)
    answers = [(shared(5), shared(5, at_once=True)) for _ in range(2)]
    stop.signal = signal.SIGTERM
    assert [*answers, (shared(5), shared(5, at_once=True))] == [("save", None)] * 3
    assert shared(6) == shared(6, at_once=True) == "stopped"


@pytest.mark.parametrize("trained", [trained_alone, trained_together])
def test_window_seconds_exclude_evaluations(trained, tmp_path, monkeypatch):
    now, measure = [0.0], Evaluation.measure

    def slow(self, split):
        now[0] += 100
        return measure(self, split)

    clock = SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr(metric_buffer, "time", clock)
    for module in (one_fit, fit):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Evaluation, "measure", slow)
    runs = trained(tmp_path, [*MLP, "metrics.pull_every=4"], SEEDS)
    assert all(speed > 1000 for run in runs for speed in run.listener.speeds) and now[0] >= 600
