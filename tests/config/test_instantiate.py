import importlib
import sys
from collections import OrderedDict

import pytest
from torch import nn

from runner.config.instantiate import ALLOW_VARIABLE, build, locate, problems
from runner.errors import RunnerError
from runner.version import PACKAGES


def refused(node, **settings):
    with pytest.raises(RunnerError) as caught:
        build(node, key="model", **settings)
    return str(caught.value)


def test_builds_nested_nodes_with_plain_lists():
    node = {
        "_target_": "torch.nn.Sequential",
        "_args_": [{"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}],
    }
    model = build(node)
    assert isinstance(model[0], nn.Linear)
    assert model[0].out_features == 3


def test_partial_waits_for_the_rest():
    make = build({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.5})
    assert make(nn.Linear(1, 1).parameters()).defaults["lr"] == 0.5


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.run",
        "builtins.eval",
        "distutils.spawn.spawn",
        "numpy.testing.measure",
        "torch.load",
        "torch.hub.load",
        "torch.os.system",
        "torch.nn.modules.module.os.system",
        "torch.nn.modules.linear.math.sqrt",
        "torch.optim.optimizer.functools.partial",
        "torch.utils.cpp_extension.load_inline",
        "runner.cli.main",
        "runner.config.instantiate.build",
        "runner.data.array_data.Path",
        "torch.nnx.Linear",
        "hydra.utils.instantiate",
        "",
        "torch.nn.",
        "a b",
    ],
)
def test_a_target_that_executes_is_refused_before_it_runs(target, capfd):
    text = refused({"_target_": target, "_args_": ["echo PWNED"]})
    assert "--> model._target_" in text
    assert any(why in text for why in ("not a part that a configuration may name", " has no ", "is a dotted path"))
    assert "failed" not in text, "it was called"
    assert "PWNED" not in capfd.readouterr().out


def test_a_hostile_target_is_found_at_any_depth():
    node = {"_target_": "torch.nn.Sequential", "_args_": [{"x": [{"_target_": "os.system", "command": "echo PWNED"}]}]}
    assert "model._args_[0].x[0]._target_=os.system" in refused(node)


def test_a_class_of_the_current_folder_is_the_persons_own(own_folder):
    (own_folder / "my_models.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    node = {"_target_": "my_models.Net", "in_features": 2, "out_features": 1}
    assert type(build(node)).__name__ == "Net"
    assert "not a part that a configuration may name" in refused(node, own_code=False)


def test_what_the_persons_module_merely_imports_is_not_theirs(own_folder):
    (own_folder / "my_models.py").write_text("import os\nfrom subprocess import run\n")
    assert "posix.system" in refused({"_target_": "my_models.os.system"})
    assert "subprocess.run" in refused({"_target_": "my_models.run"})


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("Net", None),  # from another module of the current directory
        ("MLP", "_target_=runner.models.MLP"),
        ("save", "your own class in a file of the current directory (_target_=my_models.Net)"),
    ],
)
def test_imported_class_is_taken_or_named(name, fix, own_folder):
    (own_folder / "siam.py").write_text("class Net:\n    pass\n")
    (own_folder / "imports.py").write_text(
        "from numpy import save\nfrom siam import Net\nfrom runner.models import MLP\n"
    )
    if fix is None:
        assert locate(f"imports.{name}").__module__ == "siam"
        return
    with pytest.raises(RunnerError) as raised:
        locate(f"imports.{name}")
    assert raised.value.problems[0].help == fix


def test_more_prefixes_come_from_the_command_line_alone(monkeypatch):
    node = {"_target_": "collections.OrderedDict"}
    assert "--allow collections" in refused(node)
    monkeypatch.setenv(ALLOW_VARIABLE, "collections")
    assert build(node) == OrderedDict()
    assert "not a part" in refused(node, own_code=False)


def test_arguments_without_a_name_are_not_missed():
    built = build({"_target_": "torch.nn.Linear", "_args_": [2, 3]})
    assert (built.in_features, built.out_features) == (2, 3)


@pytest.mark.parametrize("target", ["torch.hub.load", "torch.load", "torch.nn.modules.linear.torch.os.system"])
def test_what_of_torch_is_no_part_is_not_offered_to_be_allowed(target):
    assert "--allow" not in refused({"_target_": target})


def test_a_typo_in_the_name_offers_the_nearest():
    assert "_target_=torch.nn.Linear" in refused({"_target_": "torch.nn.Linaer", "in_features": 1, "out_features": 1})


def test_a_typo_in_the_module_offers_the_nearest_file(own_folder):
    (own_folder / "our_networks.py").write_text("")
    assert "help: use `model._target_=our_networks.Net`, or" in refused({"_target_": "our_network.Net"})
    assert "our_networks" not in refused({"_target_": "our_network.Net"}, own_code=False)


@pytest.mark.parametrize("target", ["runner.models.MPL", "runner.models.mlp.MPL", "runner.model.MPL"])
def test_a_typo_in_one_of_our_own_offers_the_nearest(target):
    text = refused({"_target_": target})
    assert "help: use `model._target_=runner.models.MLP`, or your own class" in text and "--allow" not in text


@pytest.mark.parametrize("target", ["runner.models.mlp.MLP", "runner.model.mlp.MLP", "runner.MLP"])
def test_one_of_our_own_has_one_name(target, monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "runner")
    for settings in ({}, {"own_code": False}):
        text = refused({"_target_": target}, **settings)
        assert "have one name each, and this is runner.models.MLP" in text
        assert (
            "help: use `model._target_=runner.models.MLP`; a run of an earlier version" in text
            and "--allow" not in text
        )


def test_a_part_whose_module_cannot_be_imported_tells_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "runner.models.mlp", None)
    assert "runner.models.mlp" in refused({"_target_": "runner.models.MLP"})


def test_an_allowed_package_that_is_not_there_offers_the_nearest_file(own_folder, monkeypatch):
    (own_folder / "our_networks.py").write_text("")
    monkeypatch.setenv(ALLOW_VARIABLE, "our_network")
    assert "help: use `model._target_=our_networks.Net`" in refused({"_target_": "our_network.Net"})


def test_the_line_that_imports_is_not_shown_as_the_persons_own(tmp_path, monkeypatch):
    (tmp_path / "their_broken_package.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(ALLOW_VARIABLE, "their_broken_package")
    monkeypatch.chdir(PACKAGES)
    text = refused({"_target_": "their_broken_package.Net"})
    assert "nothing_of_the_kind" in text and "instantiate.py" not in text


def test_all_wrong_arguments_are_told_at_once_with_their_keys():
    node = {"_target_": "torch.nn.Linear", "in_featurs": 1, "bais": True}
    text = "\n".join(str(problem) for problem in problems(node, key="model"))
    assert "model.in_features=1" in text
    assert "model.bias=True" in text
    assert "help: use `model.out_features=...`" in text


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1\nimport nothing_of_the_kind\n", ("pip install nothing_of_the_kind", "my_models.py:2")),
        ("import sys\n\nsys.exit()\n", ("ended the program (exit code 0) (my_models.py:3)", "if __name__ == ")),
        ("from runner.models.nothing import Net\n", ("needs the module runner.models.nothing", "my_models.py:1")),
        ("class Net(:\n    pass\n", ("my_models.py:1",)),
    ],
)
def test_module_that_fails_to_import_is_reported(code, told, own_folder):
    (own_folder / "my_models.py").write_text(code)
    text = refused({"_target_": "my_models.Net"})
    assert all(words in text for words in told)
    assert ("pip" in text) == ("nothing_of_the_kind" in code)


def test_a_constructor_that_fails_tells_what_and_where(own_folder):
    (own_folder / "my_models.py").write_text(
        "class Net:\n    def __init__(self, size):\n        raise ValueError('too small')\n"
    )
    text = refused({"_target_": "my_models.Net", "size": 3})
    assert "ValueError: too small (my_models.py:3)" in text
    assert "model.size" in text
    assert "HYDRA_FULL_ERROR" not in text


def test_a_value_is_no_target():
    with pytest.raises(RunnerError, match="may name"):
        locate("torch.nn.functional")


def test_a_plugin_that_hydra_has_found_is_found_again(own_folder):
    """Hydra's search leaves the module in sys.modules, and its package without the name."""
    plugin = own_folder / "theirs" / "launcher"
    plugin.mkdir(parents=True)
    (own_folder / "theirs" / "__init__.py").touch()
    (plugin / "__init__.py").write_text("class Launcher: ...\n")
    found = importlib.import_module("theirs.launcher")
    del sys.modules["theirs"].launcher
    assert locate("theirs.launcher.Launcher", more=("theirs",)) is found.Launcher
