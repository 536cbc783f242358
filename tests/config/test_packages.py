import re
import sys
import tomllib
from pathlib import Path

import pytest

from runner.config import packages
from runner.config.packages import install
from runner.version import DISTRIBUTION, PACKAGES

PROJECT = tomllib.loads((PACKAGES / "pyproject.toml").read_text())["project"]
#: all files from which a user may copy a line
PAGES = ("runner", "conf", "tests", "README.md", "pyproject.toml", ".constraints.txt", ".ci", ".github")


@pytest.fixture
def installed(own_folder, monkeypatch):
    """As from a wheel: no pyproject.toml next to it, and metadata like hatchling's."""
    lines = [
        f"{name}; extra == '{extra}'" for extra, names in PROJECT["optional-dependencies"].items() for name in names
    ]
    place = own_folder / f"{DISTRIBUTION.replace('-', '_')}-9.dist-info"
    place.mkdir()
    head = ["Metadata-Version: 2.4", f"Name: {DISTRIBUTION}", "Version: 9", "Requires-Dist: numpy"]
    (place / "METADATA").write_text("\n".join([*head, *(f"Requires-Dist: {line}" for line in lines), ""]))
    monkeypatch.setattr(packages, "PYPROJECT", own_folder / "pyproject.toml")
    monkeypatch.syspath_prepend(own_folder)


def test_in_checkout_install_names_extra(own_folder, monkeypatch):
    assert install("search") == f'pip install -e "{PACKAGES}[search]"'
    monkeypatch.chdir(PACKAGES)
    assert install("search") == 'pip install -e ".[search]"'


def test_install_outside_checkout_quotes_packages(installed):
    assert install("search") == 'pip install "optuna>=4.9" cmaes'
    assert install("slurm") == "pip install hydra-submitit-launcher"
    for extra, names in PROJECT["optional-dependencies"].items():
        assert install(extra).replace('"', "").split()[2:] == names


def test_a_copy_without_metadata_names_no_distribution(own_folder, monkeypatch):
    (own_folder / "pyproject.toml").write_text('[project]\nname = "another-project"\n')
    monkeypatch.setattr(packages, "PYPROJECT", own_folder / "pyproject.toml")
    monkeypatch.setattr(packages, "DISTRIBUTION", "nothing-of-the-kind")
    assert install("search") == "the packages of the extra search in pyproject.toml"
    assert packages.missing(ModuleNotFoundError(name="torch")) is None


def test_required_package_is_installed_by_checkout(monkeypatch, installed):
    """With the pip of this Python, as another one may be first on the path."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "numpy", None)
    (problem,) = packages.missing(ModuleNotFoundError(name="numpy")).problems
    assert problem.help == f"run `{sys.executable} -m pip install numpy`"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(PACKAGES)
    (problem,) = packages.missing(ModuleNotFoundError(name="torch.nn")).problems
    assert problem.message == "this Python has no torch, which the runner imports"
    assert problem.help == f"run `{sys.executable} -m pip install -e .`"
    assert packages.missing(ModuleNotFoundError(name="my_module")) is None
    assert packages.missing(ModuleNotFoundError(name="numpy.no_such_part")) is None


def test_extras_named_in_messages_exist():
    code = "\n".join(path.read_text() for path in (PACKAGES / "runner").rglob("*.py"))
    named = set(re.findall(r"""\b(?:install|not_installed)\((?:.*, )?["'](\w+)["']\)""", code)) | {
        "timm",
        "transformers",
        "onnx",
    }
    assert len(named) > 6 and named <= PROJECT["optional-dependencies"].keys()


def strangers(text):
    """Yield the names in lines with `pip install` that are similar to the runner's."""
    for line in re.findall(r"pip3? install ([^\n`&|]*)", text.replace("\\", "")):
        for word in re.findall(r"[\w.-]+", line):
            if "runner" in re.sub(r"[\W_]", "", word.lower()) or word == "DISTRIBUTION":
                yield word


def test_messages_and_pages_install_known_packages():
    assert PROJECT["name"] == DISTRIBUTION != "runner"
    found = [path for page in PAGES for path in (PACKAGES / page, *(PACKAGES / page).rglob("*")) if path.is_file()]
    texts = {
        path: path.read_text(errors="ignore")
        for path in found
        if path.suffix not in (".png", ".pyc") and path != Path(__file__)
    }
    assert len(texts) > 600
    said = "runner" + "["  # also as a pattern
    assert not [path for path, text in texts.items() if said in text.replace("\\", "")]
    assert not {path: words for path, text in texts.items() if (words := [*strangers(text)])}


@pytest.mark.parametrize(
    "words",
    ["runner", '"runner[search]"', "-U torch_experiment.runner", "'Runner>=1'", "numpy runner", "{DISTRIBUTION}"],
)
def test_a_line_that_would_is_seen(words):
    assert [*strangers(f"say `pip install {words}` and no more")]
