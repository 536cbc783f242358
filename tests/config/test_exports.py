"""The public names: those in conf/ and in a run's files, wherever the objects are defined."""

import importlib
import pickle
import pkgutil
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from runner.config.allowed import exported_name, homes, public_name
from runner.config.trust import hydra_problems

LAZY = ("runner.data", "runner.models", "runner.tasks", "runner.training", "runner.sweep")


@pytest.mark.parametrize("package", LAZY)
def test_every_public_name_loads_from_its_module(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        thing = getattr(module, name)
        assert (thing.__module__, thing.__name__) == (homes(package)[name], name)
        assert name in dir(module)
    assert not hasattr(module, "nothing_of_the_kind")


@pytest.mark.parametrize("package", (*LAZY, "runner.cli"))
def test_no_module_has_a_public_name(package):
    module = importlib.import_module(package)
    assert not {item.name for item in pkgutil.iter_modules(module.__path__)} & set(module.__all__)


def test_importing_package_loads_nothing_big():
    code = (
        f"import sys, {', '.join(LAZY)}; print([name for name in ('torch', 'numpy', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n", done.stdout


def test_what_is_pickled_goes_by_its_module():
    import runner.models

    assert b"runner.models.mlp" in pickle.dumps(runner.models.MLP)
    assert pickle.loads(pickle.dumps(runner.models.MLP)) is runner.models.MLP


@pytest.mark.parametrize(
    ("path", "public"),
    [
        ("runner.data.digits.digits", "runner.data.digits"),
        ("runner.optim.warmup_cosine", "runner.training.warmup_cosine"),
        ("runner.data.digits", None),
        ("runner.data.nothing", None),
        ("my_models.MLP", None),
    ],
)
def test_path_to_internal_module_gives_public_name(path, public):
    assert public_name(path) == public


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((path, "runner.models.MLP") for path in ("runner.models.mlp.MLP", "runner.models.MLP")),
        *((path, path) for path in ("runner.models.cnn.MLP", "runner.mlp.MLP", "runner.models.mlp.torch", "nets.MLP")),
    ],
)
def test_path_of_definition_is_exported_name(path, name):
    assert exported_name(path) == name


def test_launcher_given_by_module_suggests_name():
    (problem,) = hydra_problems(OmegaConf.create({"launcher": {"_target_": "runner.sweep.launchers.local.Slots"}}))
    assert problem.source == "hydra.launcher._target_=runner.sweep.launchers.local.Slots"
    assert problem.suggestions == ("hydra.launcher._target_=runner.sweep.Slots",)
