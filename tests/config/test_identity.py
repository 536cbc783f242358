"""The identity of an experiment: the keys that a user chose, and those that may change in the middle of a run."""

import pytest
from omegaconf import OmegaConf

from runner.config.identity import changes, chosen, chosen_of, may_change


@pytest.mark.parametrize(
    ("key", "may"),
    [
        *(("train.num_epochs", True), ("data.num_workers", True), ("data.residency", True), ("tracking.uri", True)),
        *(("seed", False), ("data.limit", False), ("train.batch_size", False), ("optimizer.lr", False)),
        *(("train.early_stopping.metric", False), ("train.early_stopping.patience", True), ("model.width", False)),
        # only for NVIDIA's GPUs: other devices do not support it
        *(("train.compile", True), ("train.cuda_graph", True)),
    ],
)
def test_what_a_resumed_run_may_change(key, may):
    assert may_change(key) is may


def test_identity_ignores_facts_and_run_settings():
    cfg = OmegaConf.create(
        {"seed": 1, "facts": {"num_classes": 3}, "plan": {"only": "x"}, "model": {"width": "${seed}"}}
    )
    assert chosen(cfg) == {"seed": 1, "model.width": "${seed}"}


def test_identity_missing_key_is_a_change():
    assert changes({"a": 1, "c": 3, "b": 2}, {"a": 1, "c": 4, "d": 5}) == ["b", "c", "d"]


def test_new_keys_at_neutral_values_change_no_experiment():
    old, now = {"seed": 1}, {"seed": 1, "model.lora": None, "model.head_only": False}
    assert changes(chosen_of(old), chosen_of(now)) == []
    assert changes(chosen_of(old), chosen_of(now | {"model.head_only": True})) == ["model.head_only"]
