"""What is wrong in a file of conf/ is told with the file, the line and the nearest key."""

import pytest
from hydra.errors import HydraException

from runner.config import validate
from runner.config.compose import WrongFile, composer
from runner.config.conf_files import as_yaml, defaults_fault, file_problems, line_of
from runner.config.override_errors import explain

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
#: the words, and of each fault what must be told of it: asked, so, write
TOLD = {
    "experiment=typo": [
        ("train: {num_epoch: 5} in conf/experiment/typo.yaml, line 6", "no key train.num_epoch", "train: {num_epochs: 5}"),
        ("train: {batch_size: many} in conf/experiment/typo.yaml, line 7", "a whole number", "train: {batch_size: 10}"),
        ("tracking: {urii: x} in conf/experiment/typo.yaml, line 8", "no key tracking.urii", "tracking: {uri: x}"),
    ],
    "experiment=own_group": [
        ("mygroup@extras: fast in conf/experiment/own_group.yaml, line 3", "no key extras", "mygroup@model: fast")
    ],
    "experiment=own_keys": [
        ("extras: {...} in conf/experiment/own_keys.yaml, line 2", "no key extras", "are below data, model, task"),
        ("seeed: 3 in conf/experiment/own_keys.yaml, line 3", "no key seeed", "seed: 3"),
    ],
    "experiment=no_option": [("model: mlpp in the defaults of experiment/no_option", "model has no mlpp", "model: mlp")],
    "experiment=no_group": [("override modell in the defaults of experiment/no_group", "no modell", "--info defaults")],
    "experiment=no_file": [("nothing: mlp in the defaults", "conf/ has no nothing/", "conf/nothing/mlp.yaml")],
    "experiment=no_package": [("conf/experiment/no_package.yaml", "without a package line", "# @package _global_")],
    "experiment=no_package_either": [("no_package_either.yaml", "without a package line", "# @package _global_")],
    "experiment=hydras": [("hydras.yaml, line 3", "no setting hydra.jobb", "--cfg hydra")],
    "train=mine": [("clip_grad_nrm: 1 in conf/train/mine.yaml, line 3", "train.clip_grad_nrm", "clip_grad_norm: 1")],
}  # fmt: skip


@pytest.fixture
def conf(own_folder):
    for name, text in FILES.items():
        file = own_folder / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_every_problem_of_a_file_is_told_with_its_place(conf):
    compose = composer([])
    known = list(validate.all_keys(compose([])))
    for words, wanted in TOLD.items():
        with pytest.raises(HydraException) as raised:
            compose([words])
        is_file = isinstance(raised.value, WrongFile)
        found = file_problems(raised.value, known) if is_file else [defaults_fault(words, raised.value)]
        for problem, (asked, so, write) in zip(found, wanted, strict=True):
            assert (
                asked in problem.source
                and so in problem.message.replace("`", "")
                and write in problem.help.replace("`", "")
            ), f"{words}\n{problem}"


def test_it_is_told_with_all_else_that_is_wrong(conf):
    words, compose = ["experiment=typo", "model=mlpp"], composer([])
    error = explain(HydraException(), words, compose=compose, check=lambda cfg: None)
    assert [problem.source.split()[0] for problem in error.problems] == ["train:", "train:", "tracking:", "model=mlpp"]


def test_nothing_is_composed_twice_to_tell_a_mistake(conf):
    compose, composed = composer([]), []

    def counted(words):
        composed.append(tuple(words))
        return compose(words)

    explain(HydraException(), ["seed=1", "train.lrr=3", "+x=1"], compose=counted, check=lambda cfg: None)
    assert len(composed) == len(set(composed)) == 4


def test_a_file_of_the_persons_own_that_begins_it_all_is_told_likewise(own_folder):
    (own_folder / "mine.yaml").write_text("defaults: [config, _self_]\ntrain:\n  num_epoch: 5\n")
    compose = composer(["-cd", ".", "-cn", "mine"])
    with pytest.raises(WrongFile) as raised:
        compose([])
    (problem,) = explain(raised.value, [], compose=compose, check=lambda cfg: None).problems
    assert (problem.source, problem.help) == (
        "train: {num_epoch: 5} in mine.yaml, line 3",
        "write train: {num_epochs: 5} instead",
    )


def test_a_key_has_a_line_and_is_a_line():
    text = "a: 1\nb:\n  c: {d: 2}\n  e.f: 3\n"
    assert [line_of(text, key) for key in ("a", "b", "b.c.d", "b.e", "x")] == [1, 2, 3, None, None]
    assert as_yaml("b.c.d", None) == "b: {c: {d: null}}"


def test_where_nothing_is_near_nothing_is_offered():
    known = ["train.ema_decay", "train.num_epochs", "train.max_seconds", "backends.cuda.memory_fraction"]
    assert validate.suggest_keys("train.fast_dev_run", known) == []
    assert validate.suggest_keys("train.num_epoch", known) == ["train.num_epochs"]
    assert validate.suggest_keys("backends.cuda.memory", known) == ["backends.cuda.memory_fraction"]
    assert validate.suggest_keys("trian.max_second", known) == ["train.max_seconds"]
