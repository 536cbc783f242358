"""The table of rules: a conflict is an error with a fix, and `tune` and sweeps use the same table."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf, open_dict

from runner import cli
from runner.config.compose import composer
from runner.errors import for_a_shell
from runner.experiment import rules
from runner.experiment.rules import RULES, Situation

#: values for which a condition on the value is true
HOLDING = {
    "closure_optimizer": "LBFGS",
    "train.recompute": ["blocks.*"],
    "model.lora": {"match": "hidden"},
    "data.augment": {"flip": True},
    "optimizer.turns": {"a": {"params": "hidden"}, "b": {"params": "output"}},
    "optimizer.groups": [{"match": "bias", "lr": 1}],
    "train.hooks": ["builtins.print"],
    "train.on_nonfinite": "skip",
    "train.profile": 3,
    "train.max_seconds": 5,
    "train.num_processes": 2,
    "train.early_stopping.patience": 3,
    "train.evaluate_every_steps": 5,
    "data.num_workers": 2,
    "num_processes": 2,
    "device": "cpu",
    "rows": "loader",
    "slot": "cuda:0",
    "metric_schedule": "ReduceLROnPlateau",
}


def composed(*words):
    return composer([])(["model=mlp", "data=digits", *words])


def clashing(rule):
    """Return a configuration and a situation in which all conditions of a rule hold."""
    cfg, situation = composed(), Situation()
    for key, wanted in rule.conditions.items():
        value = wanted
        if callable(wanted):
            value = [] if wanted is rules.is_empty else HOLDING[key]
        if "." in key:
            with open_dict(cfg):
                OmegaConf.update(cfg, key, value, force_add=True)
        else:
            situation = replace(situation, **{key: value})
    return cfg, situation


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: " ".join(rule.conditions))
def test_rule_has_fixes_that_resolve_it(rule):
    cfg, situation = clashing(rule)
    reason = rule.reason.format_map(vars(situation))
    errors = {error.message: error for error in rules.clashes(cfg, situation)}
    assert errors[reason].suggestions == tuple(map(for_a_shell, rule.fixes.split()))
    for fix in rule.fixes.split():
        key, _, value = fix.partition("=")
        if "." in key and key in rule.conditions:
            fixed = cfg.copy()
            OmegaConf.update(fixed, key, OmegaConf.create(f"value: {value}").value)
            assert reason not in {error.message for error in rules.clashes(fixed, situation)}


def test_usual_configuration_has_no_clash():
    situation = Situation(device="cuda:0", num_processes=2, slot="cpu", rows="dataset", has_validation=False)
    assert rules.clashes(composed(), situation) == []


def test_every_clash_is_reported_at_once(capsys):
    words = ["device=cpu", "train.cuda_graph=true", "train.compile=true", "placement.guard=always"]
    assert cli.main([*words, "train.recompute=[hidden.*]", "train.on_oom=split", "train.num_processes=2"]) == 2
    said = capsys.readouterr().err
    reasons = ("NVIDIA GPU", "of one size", "can't watch a captured step", "single operations", "for other processes")
    assert all(reason in said for reason in (*reasons, "repeat a step in parts")), said
    assert said.count("second forward pass") == 2


@pytest.mark.parametrize(
    ("words", "changes", "situation", "reason"),
    [
        ([], {"train.compile": True}, Situation(), ""),
        (["placement.guard=always"], {"train.compile": True}, Situation(), "single operations"),
        (["train.recompute=[hidden.*]"], {"train.cuda_graph": True}, Situation("cuda"), "second forward pass"),
        ([], {"train.cuda_graph": True}, Situation("cpu"), "NVIDIA GPU, and this run is on cpu"),
        ([], {"train.cuda_graph": True}, Situation("cuda", num_processes=2), "other processes"),
        ([], {"train.cuda_graph": True}, Situation("cuda", is_on_device=False), "streamed"),
        # the conflict is not caused by the change
        (["train.cuda_graph=true"], {"train.compile": True}, Situation("cpu"), ""),
        (["train.profile=3"], {"is_member": True}, Situation(), "one run's steps"),
    ],
)
def test_change_is_judged_by_the_table(words, changes, situation, reason):
    said = rules.why_not(composed(*words), changes, situation)
    assert reason in said and bool(reason) == bool(said)
