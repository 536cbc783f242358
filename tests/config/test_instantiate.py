import importlib
import sys
from collections import OrderedDict

import pytest
from refused import problems_of
from torch import nn

from runner.config.instantiate import ALLOW_VARIABLE, build, locate, problems
from runner.errors import RunnerError
from runner.version import PACKAGES


def refused(target, **settings):
    return problems_of(build, {"_target_": target}, key="model", **settings)


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
        "runner.data.array_files.Path",
        "torch.nnx.Linear",
        "hydra.utils.instantiate",
        "",
        "torch.nn.",
        "a b",
    ],
)
def test_executing_target_is_refused_before_it_runs(target, capfd):
    (problem,) = problems_of(build, {"_target_": target, "_args_": ["echo PWNED"]}, key="model")
    assert (problem.source, problem.code) == (f"model._target_={target}", "bad-target")
    assert "failed" not in problem.message and "PWNED" not in capfd.readouterr().out


def test_hostile_target_is_refused_at_any_depth():
    node = {"_target_": "torch.nn.Sequential", "_args_": [{"x": [{"_target_": "os.system", "command": "echo PWNED"}]}]}
    assert problems_of(build, node, key="model")[0].source == "model._args_[0].x[0]._target_=os.system"


def test_class_in_current_folder_is_custom(own_folder):
    (own_folder / "my_models.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    node = {"_target_": "my_models.Net", "in_features": 2, "out_features": 1}
    assert type(build(node)).__name__ == "Net"
    assert refused("my_models.Net", own_code=False)[0].code == "bad-target"


OWN = {
    "siam.py": "class Net:\n    pass\n",
    "imports.py": "import os\nfrom numpy import save\nfrom siam import Net\nfrom runner.models import MLP\n",
    "our_networks.py": "",
    "lacks.py": "x = 1\nimport nothing_of_the_kind\n",
    "ends.py": "import sys\n\nsys.exit()\n",
    "old.py": "from runner.models.nothing import Net\n",
    "unread.py": "class Net(:\n    pass\n",
}


@pytest.mark.parametrize(
    "target",
    [
        *("imports.MLP", "imports.save", "imports.os.system", "our_network.Net", "lacks.Net", "ends.Net", "old.Net"),
        *("unread.Net", "torch.nn.Linaer", "runner.model.MPL", "runner.models.mlp.MLP", "os.system", "torch.nn._x"),
    ],
)
def test_refused_target_gets_help(target, own_folder, messages):
    for name, text in OWN.items():
        (own_folder / name).write_text(text)
    messages(refused(target))


def test_class_of_another_own_module_is_taken(own_folder):
    for name, text in OWN.items():
        (own_folder / name).write_text(text)
    assert locate("imports.Net").__module__ == "siam"
    assert refused("our_network.Net", own_code=False)[0].suggestions == ()


def test_class_from_elsewhere_gets_its_package(own_folder, monkeypatch):
    for path, text in (("lib/siamese.py", OWN["siam.py"]), ("parts.py", "from siamese import Net\n")):
        (own_folder / path).parent.mkdir(exist_ok=True)
        (own_folder / path).write_text(text)
    monkeypatch.syspath_prepend(own_folder / "lib")
    problem = refused("parts.Net")[0]
    assert "--allow siamese" in problem.help and "parts.Net" not in problem.help
    monkeypatch.setenv(ALLOW_VARIABLE, "siamese")
    assert locate("parts.Net").__module__ == "siamese"


def test_additional_prefixes_are_command_line_only(monkeypatch):
    assert "--allow collections" in refused("collections.OrderedDict")[0].help
    monkeypatch.setenv(ALLOW_VARIABLE, "collections")
    assert build({"_target_": "collections.OrderedDict"}) == OrderedDict()
    assert refused("collections.OrderedDict", own_code=False)[0].code == "bad-target"


def test_arguments_without_a_name_are_not_missed():
    built = build({"_target_": "torch.nn.Linear", "_args_": [2, 3]})
    assert (built.in_features, built.out_features) == (2, 3)


@pytest.mark.parametrize("target", ["torch.hub.load", "torch.nn.modules.linear.torch.os.system", "runner.models.MPL"])
def test_refused_part_of_torch_is_not_allowed(target):
    assert "--allow" not in refused(target)[0].help


@pytest.mark.parametrize("target", ["runner.models.mlp.MLP", "runner.model.mlp.MLP", "runner.MLP"])
@pytest.mark.parametrize("own_code", [False, True])
def test_own_part_has_one_name(target, own_code, monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "runner")
    assert refused(target, own_code=own_code)[0].suggestions == ("model._target_=runner.models.MLP",)


def test_part_with_failing_import_gives_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "runner.models.mlp", None)
    assert "runner.models.mlp" in refused("runner.models.MLP")[0].message


def test_missing_allowed_package_suggests_nearest_file(own_folder, monkeypatch):
    (own_folder / "our_networks.py").write_text("")
    monkeypatch.setenv(ALLOW_VARIABLE, "our_network")
    assert refused("our_network.Net")[0].suggestions == ("model._target_=our_networks.Net",)


def test_importing_line_is_not_shown_as_users(tmp_path, monkeypatch):
    (tmp_path / "their_broken_package.py").write_text("import nothing_of_the_kind\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(ALLOW_VARIABLE, "their_broken_package")
    monkeypatch.chdir(PACKAGES)
    (problem,) = refused("their_broken_package.Net")
    assert "nothing_of_the_kind" in problem.message and "instantiate.py" not in str(problem)


def test_wrong_arguments_are_reported_at_once(messages):
    messages(problems({"_target_": "torch.nn.Linear", "in_featurs": 1, "bais": True}, key="model"))


def test_failing_constructor_is_named_with_its_line(own_folder, messages):
    text = "class Net:\n    def __init__(self, size):\n        raise ValueError('too small')\n"
    (own_folder / "my_models.py").write_text(text)
    messages(problems_of(build, {"_target_": "my_models.Net", "size": 3}, key="model"))


def test_target_that_is_a_value_is_refused():
    with pytest.raises(RunnerError, match="may name"):
        locate("torch.nn.functional")


def test_hydra_plugin_is_available_again(own_folder):
    """Hydra's search leaves the module in sys.modules, and its package without the name."""
    plugin = own_folder / "theirs" / "launcher"
    plugin.mkdir(parents=True)
    (own_folder / "theirs" / "__init__.py").touch()
    (plugin / "__init__.py").write_text("class Launcher: ...\n")
    found = importlib.import_module("theirs.launcher")
    del sys.modules["theirs"].launcher
    assert locate("theirs.launcher.Launcher", more=("theirs",)) is found.Launcher
