"""A configuration from a store: the runner's passes, and one with changes by others does not."""

from pathlib import Path

import pytest
from refused import problems_of

from runner.config.trust import check_folder, is_untrusted, rerun_problems, trusting

SOUND = """defaults: [schema, base, _self_]
seed: 0
data: {_target_: runner.data.digits, name: digits}
model: {_target_: runner.models.MLP, in_features: '${facts.in_features}', hidden_sizes: [8]}
optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.001}
tracking: {uri: '${oc.env:MLFLOW_TRACKING_URI,sqlite:///mlflow.db}', experiment: '${oc.env:MLFLOW_EXPERIMENT_NAME,null}'}
"""

#: the replacement, and the key that the message names
HOSTILE = {
    "code of the folder": (("runner.models.MLP", "hostile.Net"), "model._target_=hostile.Net"),
    "the system": (("torch.optim.Adam", "os.system"), "optimizer._target_=os.system"),
    "through torch": (("torch.optim.Adam", "torch.nn.modules.linear.torch.os.system"), "optimizer._target_=torch.nn"),
    "in a list": (("[8]", "[{_target_: hostile.Net}]"), "model.hidden_sizes[0]._target_"),
    "behind a reference": (("seed: 0", "facts: {in_features: {_target_: '${seed}'}}"), "facts.in_features._target_"),
    "the environment": (("seed: 0", "name: '${oc.env:SECRET}'"), "name=${oc.env:SECRET}"),
    "in a text": (("seed: 0", "name: 'a ${oc.env:SECRET} b'"), "name=a ${oc.env:SECRET} b"),
    "made from text": (("[8]", "'${oc.decode:\"{_target_: os.system}\"}'"), "model.hidden_sizes=${oc.decode"),
    "a hook": (("seed: 0", "train: {hooks: [hostile.f]}"), "train.hooks[0]._target_=hostile.f"),
    "hooks by reference": (
        ("seed: 0", "train: {hooks: '${sweep.zip.a}'}\nsweep: {zip: {a: [hostile.f]}}"),
        "train.hooks=${sweep.zip.a}",
    ),
    "a hook by reference": (
        ("seed: 0", "train: {hooks: ['${name}']}\nname: hostile.f"),
        "train.hooks[0]._target_=${name}",
    ),
    "all of train by reference": (("seed: 0", "train: '${name}'\nname: {hooks: [hostile.f]}"), "train=${name}"),
    "a resolver by reference": (("[8]", "'${oc.${seed}:SECRET}'"), "model.hidden_sizes=${oc."),
}
#: refused whether it is trusted or not
BROKEN = [
    ("[schema, base, _self_]", "[schema, base, experiment: mine, _self_]"),
    ("defaults: [schema, base, _self_]", ""),
    ("seed: 0", "hydra: {run: {dir: /tmp}}"),
]


@pytest.fixture
def hostile(own_folder):
    (own_folder / "hostile.py").write_text("open('was_here', 'w').close()\nclass Net: pass\n")
    return own_folder


def problems(text, *, trusted=False):
    file = Path("rerun.yaml")
    file.write_text(text)
    with trusting(trusted):
        return rerun_problems(file, look="mlflow artifacts download")


def test_what_the_runner_writes_passes(hostile):
    assert problems(SOUND) == []


@pytest.mark.parametrize("case", HOSTILE)
def test_foreign_value_is_refused_and_not_imported(case, hostile):
    (old, new), named = HOSTILE[case]
    assert old in SOUND
    refused = problems(SOUND.replace(old, new))
    assert any(problem.source.startswith(named) for problem in refused)
    assert {problem.code for problem in refused} == {"untrusted"}
    assert not (hostile / "was_here").exists()
    assert problems(SOUND.replace(old, new), trusted=True) == []  # the user has looked at it


def test_each_kind_of_foreign_value_gets_help(hostile, messages):
    text = SOUND
    for case in ("code of the folder", "the environment", "hooks by reference"):
        (old, new), _ = HOSTILE[case]
        text = text.replace(old, f"{new}\n{old}" if old == "seed: 0" else new)
    messages(problems(text))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(("old", "new"), BROKEN)
def test_file_of_no_run_is_refused(old, new, trusted, hostile):
    assert old in SOUND
    (problem,) = problems(SOUND.replace(old, new), trusted=trusted)
    assert problem.code == "untrusted" and "conf/mine.yaml" in problem.help


def test_allow_does_not_count(hostile, monkeypatch):
    monkeypatch.setenv("RUNNER_ALLOW", "hostile")
    (problem,) = problems(SOUND.replace("runner.models.MLP", "hostile.Net"))
    assert problem.code == "untrusted"


def test_trusted_folder_needs_no_check(own_folder):
    assert is_untrusted(own_folder)
    with trusting():
        assert not is_untrusted(own_folder)
        with trusting(False):  # a command within a command
            assert not is_untrusted(own_folder)
    assert is_untrusted(own_folder)


@pytest.mark.parametrize("file", ["notes.txt", "rerun.yaml"])
def test_link_is_removed_from_run_directories_only(own_folder, file, messages):
    (own_folder / file).write_text("")
    Path("my data").symlink_to("/")
    messages(problems_of(check_folder, Path()))
