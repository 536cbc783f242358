"""Defaults of a run that conf/ does not contain."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runner.config import compose, defaults
from runner.config.identity import chosen


@pytest.fixture(scope="module")
def composed():
    """Return a function from overrides to the chosen defaults."""

    def of(*words):
        return chosen(compose.composed_with(compose.composer([]), words))

    return of


@pytest.mark.parametrize(
    "words",
    [
        "",
        "optimizer.lr=0.003",
        "model=mlp model.hidden_sizes=[64,32] train.clip_grad_norm=1.0",
        "data=wine model=linear device=cpu seed=3",
        "data=iris scheduler=plateau scheduler.patience=5",
        "task=regression optimizer=adamw scheduler=cosine",
        "data.limit=100 train.num_steps=7 placement.guard=off",
        "data=synthetic",
    ],
)
def test_changes_are_overrides_that_can_be_typed(words, composed):
    values = composed(*words.split(), "name=mine", "tracking.points=all")
    assert sorted(defaults.in_words(defaults.changed(values)).split()) == sorted(words.split())


def test_experiment_file_is_described_by_its_changes(composed):
    found = defaults.changed(composed("experiment=digits_mlp"))
    expected = OmegaConf.load(compose.CONF / "experiment" / "digits_mlp.yaml")
    assert found["model"] == "mlp" and found["train.num_epochs"] == expected.train.num_epochs


def test_changed_model_is_named_by_its_file(composed, own_folder):
    of_every_model = ("model.weights", "model.strict", "model.freeze")
    values = {key: value for key, value in composed().items() if not key.startswith("model.") or key in of_every_model}
    values |= {"model._target_": "mine.Net", "model.width": 3, "model.inputs": "${facts.in_features}"}
    found = defaults.changed(values)
    assert found == {"model": "mine.Net", "model.width": 3, "model.inputs": "${facts.in_features}"}
    assert "model.inputs" not in defaults.main(values) and defaults.main(values)["model.width"] == 3
    Path("conf/model").mkdir(parents=True)
    Path("conf/model/net.yaml").write_text("_target_: mine.Net\nwidth: 2\ninputs: ${facts.in_features}\n")
    Path("conf/model/torn.yaml").write_text("[")
    assert defaults.changed(values) == {"model": "net", "model.width": 3}


def test_model_description_includes_default_rate_and_length(composed):
    usual = {"optimizer.lr": 0.001, "train.batch_size": 128, "train.num_epochs": 10, "seed": 0}
    groups = {"model": "cnn", "data": "digits", "optimizer": "adam"}
    assert defaults.main(composed()) == groups | usual
    assert defaults.main(composed("train.precision=bf16")) == {"train.precision": "bf16"} | groups | usual
    assert next(iter(defaults.main(composed("train.precision=bf16")))) == "train.precision"


def test_conf_values_are_read_as_by_hydra(composed):
    for file in sorted(compose.CONF.glob("*/*.yaml")):
        group = file.parent.name
        if group not in ("hydra", "experiment"):
            cfg = compose.composer([])([f"{group}={file.stem}"])
            expected = {} if file.stem == defaults._choices()[group] else {group: file.stem}
            assert defaults.changed(chosen(cfg)) == expected, file
