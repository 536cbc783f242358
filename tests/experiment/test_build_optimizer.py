"""Optimizers and schedules: refused settings are reported by their key before any work, and accepted ones are built."""

import copy
import functools
import sys

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from members import trained_alone
from omegaconf import OmegaConf, open_dict
from refused import problems_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from runner import cli
from runner.config.compose import composer
from runner.device import Hardware
from runner.errors import RunnerError
from runner.experiment.build_optimizer import optimizer_of, schedule_of
from runner.experiment.check import check
from runner.training.loop import Best

SMALL = ["data=synthetic", "data.num_rows=40", "data.num_features=3", "model=mlp", "device=cpu"]
LR = "optimizer.lr=0.001"
SCHEDULES = "+scheduler._target_=torch.optim.lr_scheduler"
ONE_CYCLE = f"{SCHEDULES}.OneCycleLR +scheduler.total_steps=${{facts.num_steps}} +scheduler.max_lr="
GROUP = "optimizer.groups=[{match:'output.*',lr:0.5}]"
TURNS = "optimizer.turns={a:{params:'hidden.*'},b:{params:'output.*',lr:0.5}}"


@functools.cache
def of_groups(*words):
    cfg = composer([])([*SMALL, *words])
    with open_dict(cfg):
        del cfg.hydra
    return cfg


def composed(*words):
    """Compose each choice of groups once and set the other keys, as a composition takes time."""
    if any(word.startswith("~") for word in words):
        return copy.deepcopy(of_groups(*words))
    keys = [word for word in words if "." in word.partition("=")[0]]
    cfg = copy.deepcopy(of_groups(*(word for word in words if word not in keys)))
    for override in OverridesParser.create().parse_overrides(keys):
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=False, force_add=True)
    return cfg


def problems(*words):
    cfg = composed(*words)
    try:
        check(cfg, Hardware())
    except RunnerError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("words", "asked", "so", "write"),
    [
        ("optimizer.lr=x", "optimizer.lr=x", "a number", LR),
        ("optimizer.lr=1e-3x", "optimizer.lr=1e-3x", "a number", LR),
        ("optimizer.lr=nan", "optimizer.lr=nan", "a number", LR),
        ("optimizer.lr=inf", "optimizer.lr=inf", "a number", LR),
        ("optimizer.lr=-1", "optimizer.lr=-1", "Adam does not take it: ValueError: Invalid learning rate: -1", LR),
        ("optimizer.lr=null", "optimizer.lr=null", "a number", LR),
        ("optimizer.lr=true", "optimizer.lr=true", "a number", LR),
        ("optimizer.lr=[0.1,0.2]", "optimizer.lr=[0.1,0.2]", "a number", LR),
        ("optimizer.lr=${oc.env:LR}", "optimizer.lr=fast", "a number", LR),
        ("+optimizer.weight_decay=nan", "optimizer.weight_decay=nan", "a number", "optimizer.weight_decay=0"),
        ("+optimizer.betas=[0.9]", "optimizer.betas=[0.9]", "IndexError", "optimizer.betas=[0.9,0.999]"),
        ("+optimizer.betas=[2,3]", "optimizer.betas=[2,3]", "Invalid beta", "optimizer.betas=[0.9,0.999]"),
        ("optimizer=sgd optimizer.momentum=abc", "optimizer.momentum=abc", "a number", "optimizer.momentum=0.9"),
        ("optimizer=sgd optimizer.momentum=nan", "optimizer.momentum=nan", "a number", "optimizer.momentum=0.9"),
        ("optimizer=sgd optimizer.momentum=0", "optimizer.momentum=0", "Nesterov", "optimizer.momentum=0.9"),
        ("optimizer.groups=[{match:'*',lr:x}]", "optimizer.groups[0].lr=x", "a number", "optimizer.groups[0].lr=0.001"),
        ("optimizer.groups=[{match:'*',lr:-1}]", "optimizer.groups[0].lr=-1", "Invalid", "optimizer.groups[0].lr=0.001"),
        ("optimizer.groups=[{match:'*',lrr:1}]", "optimizer.groups[0].lrr=1", "no setting", "`lr` instead of `lrr`"),
        ("optimizer._partial_=3", "optimizer._partial_=3", "true or false", "optimizer._partial_=true"),
        ("scheduler=cosine scheduler.warmup_fraction=a", "fraction=a", "a number", "scheduler.warmup_fraction=0.1"),
        ("scheduler=cosine scheduler.warmup_fraction=2", "fraction=2", "from 0 to 1", "scheduler.warmup_fraction=0.1"),
        ("scheduler=cosine scheduler.num_steps=''", "scheduler.num_steps=", "a whole number", "another value"),
        ("scheduler=plateau scheduler.factor=2", "scheduler.factor=2", "Factor", "scheduler.factor=0.1"),
        ("scheduler=plateau scheduler.mode=max", "scheduler.mode=max", "is less", "scheduler.mode=min"),
        (f"{SCHEDULES}.StepLR +scheduler.step_size=a", "scheduler.step_size=a", "TypeError", "another value"),
        (f"{SCHEDULES}.CosineAnnealingLR +scheduler.T_max=0", "scheduler.T_max=0", "ZeroDivision", "another value"),
        (f"{ONE_CYCLE}0.1 {GROUP}", "OneCycleLR", "own rates are [0.001,0.5]", "scheduler.max_lr=[0.001,0.5]"),
        (f"{SCHEDULES}.CyclicLR +scheduler.base_lr=0.0 +scheduler.max_lr=0.1 {GROUP}", "CyclicLR", "own rates are [0.001,0.5]", "max_lr=[0.001,0.5]"),
        (f"{ONE_CYCLE}0.1 {TURNS}", "OneCycleLR", "own rates are [0.001,0.5]", "scheduler.max_lr=[0.001,0.5]"),
    ],
)  # fmt: skip
def test_unknown_argument_is_named_by_key(words, asked, so, write, monkeypatch):
    monkeypatch.setenv("LR", "fast")
    (problem,) = problems(*words.split())
    assert asked in problem.source
    assert so in problem.message
    assert write in problem.help


def test_optimizer_errors_are_reported_together():
    words = ["device=cuda", "optimizer.lr=x", "+optimizer.betas=[0.9]", "scheduler=cosine"]
    words += ["scheduler.warmup_fraction=2"]
    asked = [problem.source for problem in problems(*words)]
    assert asked == ["device=cuda", "optimizer.lr=x", "optimizer.betas=[0.9]", "scheduler.warmup_fraction=2"]


@pytest.mark.parametrize(
    "words",
    [
        "optimizer=sgd scheduler=cosine",
        "optimizer=adamw scheduler=plateau optimizer.no_decay=norms_and_biases optimizer.groups=[{match:'*',lr:0}]",
        "scheduler=plateau train.early_stopping.metric=val/accuracy",
        "optimizer._target_=torch.optim.Muon",
        "~optimizer +optimizer._target_=torch.optim.RMSprop",
        "+optimizer.fused=true +optimizer.capturable=true",
        "optimizer=adamw +optimizer.capturable=true scheduler=cosine",
        "optimizer=adamw optimizer.groups=[{match:'*',capturable:true}] scheduler=cosine",
        f"{ONE_CYCLE}0.1 train.num_steps=1",
        f"{ONE_CYCLE}[0.1,0.2] {GROUP}",
        f"{ONE_CYCLE}[0.1,0.2] {TURNS}",
        f"{ONE_CYCLE}[0.1,0.2,0.3,0.4] {GROUP} optimizer=adamw optimizer.no_decay=norms_and_biases",
        f"{SCHEDULES}.StepLR +scheduler.step_size=1 {GROUP}",
        f"scheduler=cosine {TURNS}",
        f"{SCHEDULES}.PolynomialLR +scheduler.total_iters=1",  # ends at 0
        f"{SCHEDULES}.LinearLR +scheduler.total_iters=5 +scheduler._partial_=true",
    ],
)
def test_valid_settings_pass_without_facts(words):
    cfg = composed(*words.split())
    before = str(cfg)
    check(cfg, Hardware())
    assert str(cfg) == before


def test_number_as_text_is_read(monkeypatch):
    monkeypatch.setenv("LR", "0.01")
    cfg = composed("optimizer.lr=${oc.env:LR}", "optimizer.groups=[{match:'1',lr:'0.5'}]")
    check(cfg, Hardware())
    optimizer = optimizer_of(cfg, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), device=torch.device("cpu"))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]


def test_errors_known_from_model_are_reported_later():
    cfg = composed("optimizer._target_=torch.optim.Muon")
    (problem,) = problems_of(optimizer_of, cfg, nn.Linear(2, 2), device=torch.device("cpu"))
    assert problem.source == "optimizer._target_=torch.optim.Muon"
    assert "2D parameters" in problem.message and "optimizer=adam" in problem.help


def test_number_from_data_is_checked_later():
    cfg = composed(f"{SCHEDULES}.CosineAnnealingLR", "+scheduler.T_max=${facts.in_features}")
    check(cfg, Hardware())
    cfg.facts.in_features = 0
    with pytest.raises(RunnerError, match=r"scheduler\.T_max=0"):
        check(cfg, Hardware())
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    cfg = composed(f"{SCHEDULES}.OneCycleLR", "+scheduler.max_lr=0.1", "+scheduler.total_steps=${facts.num_steps}")
    check(cfg, Hardware())
    cfg.facts.num_steps = -5
    with pytest.raises(RunnerError, match=r"scheduler\.total_steps=-5"):
        schedule_of(cfg, optimizer, best=Best("val/loss", "min"), steps_per_epoch=3)


def test_schedule_separating_groups_later_is_accepted(own_folder):
    lines = "from torch.optim.lr_scheduler import LambdaLR\n\ndef from_zero(optimizer):\n"
    (own_folder / "my_warmup.py").write_text(f"{lines}    return LambdaLR(optimizer, lambda step: step)\n")
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.1, 0.2)]
    optimizer = torch.optim.Adam(groups)
    cfg = composed("+scheduler._target_=my_warmup.from_zero", GROUP)
    check(cfg, Hardware())
    schedule = schedule_of(cfg, optimizer, best=Best("val/loss", "min"), steps_per_epoch=3)
    assert [group["lr"] for group in optimizer.param_groups] == [0, 0]
    optimizer.step()
    schedule.after_step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]


OWN = """
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ReduceLROnPlateau, SequentialLR
def chained(optimizer):
    return ChainedScheduler([ConstantLR(optimizer), ReduceLROnPlateau(optimizer)])
def wrong(optimizer):
    return 3
"""


def test_nested_plateau_or_other_object_is_refused(own_folder):
    (own_folder / "my_schedules.py").write_text(OWN)
    (fault,) = problems("+scheduler._target_=my_schedules.chained")
    assert "does not support `ReduceLROnPlateau`" in fault.message and "scheduler=cosine" in fault.help
    (fault,) = problems("+scheduler._target_=my_schedules.wrong")
    assert "not a schedule" in fault.message


def test_trial_imports_nothing_that_takes_seconds(monkeypatch):
    """A run does this while MLflow starts."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # importing it fails
    assert not problems("optimizer.lr=0.01", "scheduler=cosine")


BY_HAND = {  # as torch's documentation calls them: after each epoch, each batch, or with a loss
    "StepLR": ("epoch", {"step_size": 1, "gamma": 0.7}),
    "MultiStepLR": ("epoch", {"milestones": [1, 3], "gamma": 0.1}),
    "ExponentialLR": ("epoch", {"gamma": 0.5}),
    "CosineAnnealingLR": ("epoch", {"T_max": 4}),
    "CosineAnnealingWarmRestarts": ("epoch", {"T_0": 2}),
    "OneCycleLR": ("step", {"max_lr": [0.2, 0.6], "total_steps": 12}),
    "CyclicLR": ("step", {"base_lr": [0.1, 0.2], "max_lr": [0.2, 0.6], "step_size_up": 2}),
    "ReduceLROnPlateau": ("metric", {"patience": 0, "threshold": 0.5, "factor": 0.5}),
}


def rates_by_hand(name, num_steps, losses):
    called, settings = BY_HAND[name]
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.001, 0.5)]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **settings)
    rates = []
    for loss in losses:
        for _ in range(num_steps):
            rates += [group["lr"] for group in optimizer.param_groups]
            optimizer.step()
            if called == "step":
                scheduler.step()
        if called != "step":
            scheduler.step(*[loss] * (called == "metric"))
    return rates


@pytest.mark.parametrize(("name", "accumulate_steps"), list(zip(BY_HAND, [1, 2] * 4, strict=True)))
def test_schedule_rates_equal_a_torch_loop(tmp_path, name, accumulate_steps):
    settings = [f"+scheduler.{key}={value}".replace(" ", "") for key, value in BY_HAND[name][1].items()]
    words = [f"{SCHEDULES}.{name}", *settings, LR, GROUP, "optimizer=sgd", "train.num_epochs=4", "task.plots=false"]
    words += ["model=mlp", "model.hidden_sizes=[4]", "data.limit=60", "train.batch_size=16"]
    rates = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.extend(group["lr"] for group in optimizer.param_groups)
    )
    try:
        (run,) = trained_alone(tmp_path, [*words, f"train.accumulate_steps={accumulate_steps}"], [[]])
    finally:
        hook.remove()
    losses = [value for (metric, _), value in sorted(run.listener.points.items()) if metric == "val/loss"]
    expected = rates_by_hand(name, 3 // accumulate_steps + 3 % accumulate_steps, losses)
    assert len(set(expected)) > 2
    assert rates[-len(expected) :] == expected  # trial steps come first


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{SCHEDULES}.StepLR +scheduler.step_size=1", "StepLR advances after each epoch"),
        (
            f"{SCHEDULES}.StepLR +scheduler.step_size=1 scheduler.interval=step",
            "StepLR advances after each optimizer step",
        ),
        ("scheduler=cosine", "warmup_cosine advances after each optimizer step"),
        ("scheduler=cosine scheduler.interval=epoch scheduler.num_steps=2", "after each epoch"),
        (f"{SCHEDULES}.CosineAnnealingLR +scheduler.T_max=${{facts.num_steps}}", "after each optimizer step"),
        ("scheduler=plateau", "ReduceLROnPlateau advances after each evaluation, by val/loss"),
    ],
)
def test_interval_replaces_the_usual_one(words, expected):
    cfg = composed(*words.split())
    cfg.facts.num_steps = 6
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    schedule = schedule_of(cfg, optimizer, best=Best("val/loss", "min"), steps_per_epoch=3)
    assert expected in schedule.words


def test_interval_without_effect_is_refused():
    (fault,) = problems("scheduler=plateau", "scheduler.interval=step")
    assert fault.suggestions == ("scheduler.interval=null",)
    (fault,) = problems("scheduler.interval=epoch")
    assert fault.suggestions == () and "constant learning rate" in fault.message
    (fault,) = problems("scheduler=cosine", "scheduler.interval=day")
    assert "step" in fault.help


def test_plateau_without_validation_is_refused(own_folder, capsys):
    words = ["data.val_fraction=0", "scheduler=plateau", "train.early_stopping.patience=2"]
    assert cli.main([*SMALL, "tracking.enabled=false", *words]) == 2
    said = capsys.readouterr().err
    assert "scheduler=ReduceLROnPlateau" in said and "train.early_stopping.patience=2" in said
    assert said.count("validation split") == 2
