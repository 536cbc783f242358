"""Errors in the files of conf/: reported with the file, the line and the nearest key."""

import pytest
from hydra.errors import HydraException

from runner.config.compose import MisfitError, composer
from runner.config.other_names import suggest_keys
from runner.config.override_errors import explain, line_of

FILES = {
    "experiment/typo.yaml": "# @package _global_\ndefaults:\n  - override /model: linear\n\ntrain:\n  num_epoch: 5\n  batch_size: many\n"
    "tracking: {urii: x}\n",
    "experiment/own_group.yaml": "# @package _global_\ndefaults:\n  - /mygroup@extras: fast\ntrain: {num_epochs: 1}\n",
    "experiment/own_keys.yaml": "# @package _global_\nextras: {a: 1, b: 2}\nseeed: 3\n",
    "experiment/no_option.yaml": "# @package _global_\ndefaults:\n  - override /model: mlpp\n",
    "experiment/no_group.yaml": "# @package _global_\ndefaults:\n  - override /modell: mlp\n",
    "experiment/no_file.yaml": "# @package _global_\ndefaults:\n  - /nothing: mlp\n",
    "experiment/no_package.yaml": "train: {num_epochs: 1}\n",
    "experiment/no_package_either.yaml": "defaults:\n  - override /model: mlp\n",
    "experiment/hydras.yaml": "# @package _global_\nhydra:\n  jobb: {name: x}\n",
    "mygroup/fast.yaml": "a: 1\n",
    "train/mine.yaml": "defaults: [default]\nnum_epochs: 3\nclip_grad_nrm: 1\n",
}
WORDS = ["train=mine"]
WORDS += [f"experiment={name.partition('/')[2].removesuffix('.yaml')}" for name in FILES if "experiment" in name]


@pytest.fixture
def conf(own_folder):
    for name, text in FILES.items():
        file = own_folder / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_file_errors_are_reported_with_their_lines(conf, messages):
    compose = composer([])
    for words in WORDS:
        with pytest.raises(HydraException) as raised:
            compose([words])
        messages(explain(raised.value, [words], compose=compose, check=lambda cfg: None))


def test_file_errors_are_reported_with_all_others(conf):
    words, compose = ["experiment=typo", "model=mlpp"], composer([])
    error = explain(HydraException(), words, compose=compose, check=lambda cfg: None)
    assert [problem.source.split()[0] for problem in error.problems] == [
        *("train.batch_size", "train.num_epoch", "tracking.urii", "model=mlpp")
    ]


def test_main_file_is_checked_too(own_folder, messages):
    (own_folder / "mine.yaml").write_text("defaults: [config, _self_]\ntrain:\n  num_epoch: 5\n")
    compose = composer(["-cd", ".", "-cn", "mine"])
    with pytest.raises(MisfitError) as raised:
        compose([])
    messages(explain(raised.value, [], compose=compose, check=lambda cfg: None))


def test_line_of_nested_key_is_found():
    text = "a: 1\nb:\n  c: {d: 2}\n  e.f: 3\n"
    assert [line_of(text, key) for key in ("a", "b", "b.c.d", "b.e", "x")] == [1, 2, 3, None, None]


def test_only_near_keys_are_suggested():
    known = ["train.ema_decay", "train.num_epochs", "train.max_seconds", "backends.cuda.memory_fraction"]
    assert suggest_keys("train.fast_dev_run", known) == []
    assert suggest_keys("train.num_epoch", known) == ["train.num_epochs"]
    assert suggest_keys("backends.cuda.memory", known) == ["backends.cuda.memory_fraction"]
    assert suggest_keys("trian.max_second", known) == ["train.max_seconds"]
