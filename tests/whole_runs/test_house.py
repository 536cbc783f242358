"""The layout rules of ARCHITECTURE.md: where modules are, what they import, and how many parameters functions have."""

import ast
import importlib.util
import os
from functools import cache

import pytest

from runner.version import HERE, PACKAGES

TESTS = PACKAGES / "tests"
ROOMS = {path.parent.name for path in HERE.glob("*/__init__.py")}
LOOSE = {
    "__init__.py",
    "__main__.py",
    "command.py",
    "CHANGELOG.md",
    "README.md",
    "docs",
    "errors.py",
    "py.typed",
    "version.py",
}
#: packages that do not read YAML
PLAIN = ["training", "tracking", "distributed", "data", "models", "tasks", "inspection", "device"]
HEAVY = {"torch", "mlflow", "optuna", "ray"}
MAX_PARAMETERS = 7
#: packages without which tests are skipped
EXTRAS = """cmaes datasets hydra_plugins.hydra_submitit_launcher hypothesis onnx onnxruntime onnxscript optuna ray safetensors
submitit tokenizers torchmetrics transformers"""


def modules():
    return {".".join(path.relative_to(PACKAGES).with_suffix("").parts).removesuffix(".__init__"): path for path in HERE.rglob("*.py")}  # fmt: skip


MODULES = modules()


@cache
def trees():
    """The trees of all modules; not built at import time, as each test process imports this file."""
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def imported(tree):
    """Yield the full names of the modules, or objects in modules, that a tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                own = f"{node.module}.{alias.name}"
                yield own if own in MODULES else node.module


def at_module_level(tree):
    """Return the names that are imported together with the module: not those in functions or in `if TYPE_CHECKING`."""

    def statements(body):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node
            yield from statements([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)])

    plain = [node for node in statements(tree.body) if isinstance(node, ast.Import | ast.ImportFrom)]
    return set(imported(ast.Module(plain, [])))


def room(name):
    return name.removeprefix("runner").lstrip(".").partition(".")[0]


def circles(graph):
    """Return the groups of names that reach each other, each sorted."""

    def reached(start):
        seen, ahead = set(), [start]
        while ahead:
            for name in graph[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    return {tuple(sorted(each for each in reach[name] if name in reach[each])) for name in graph if name in reach[name]}


def num_parameters(function):
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def handed():
    """Return the number of parameters of each function of the main path."""
    return {
        f"{name}.{node.name}": num_parameters(node)
        for name, tree in trees().items()
        if room(name) in ("cli", "experiment", "training")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if f"{name}.{node.name}" != "runner.training.muon.__init__"  # its settings are keys of conf/
    }


def test_packages_are_those_of_the_plan():
    assert {path.name for path in HERE.iterdir()} - {"__pycache__", "conf"} == ROOMS | LOOSE


def test_each_test_folder_has_a_package():
    folders = {path.relative_to(TESTS) for path in TESTS.rglob("*") if path.is_dir() and any(path.glob("test_*.py"))}
    missing = {str(folder) for folder in folders if not (HERE / folder / "__init__.py").is_file()}
    assert missing == {"bench", "whole_runs"}
    assert {folder.parts[0] for folder in folders} >= ROOMS


@pytest.mark.parametrize("package", PLAIN)
def test_packages_below_experiment_import_no_configuration(package):
    knowing = {
        name
        for name, tree in trees().items()
        if room(name) == package
        and (
            {each.partition(".")[0] for each in imported(tree)} & {"omegaconf", "hydra"}
            or any(getattr(node, "id", getattr(node, "attr", "")) in ("DictConfig", "ListConfig") for node in ast.walk(tree))
        )
    }  # fmt: skip
    assert not knowing


def test_mlflow_module_import_is_only_in_tracking():
    found = {name for name, tree in trees().items() if "mlflow" in {each.partition(".")[0] for each in at_module_level(tree)}}  # fmt: skip
    assert {room(name) for name in found} == {"tracking"}


def test_the_way_to_help_loads_nothing_heavy():
    """A static check of our modules. tests/cli/test_dispatch.py also measures the modules that these load."""
    graph = {name: at_module_level(tree) for name, tree in trees().items()}
    seen, ahead = set(), ["runner", "runner.__main__", "runner.cli.dispatch", "runner.cli.train"]
    while ahead:
        name = ahead.pop()
        parents = {".".join(name.split(".")[:end]) for end in range(1, name.count(".") + 1)}
        for each in (graph.get(name, set()) | (parents & MODULES.keys())) - seen:
            seen.add(each)
            ahead.append(each)
    assert "runner.config.compose" in seen
    assert not {each for each in seen if each.partition(".")[0] in HEAVY}


def test_isinstance_is_not_used_with_protocols():
    """Since Python 3.12, isinstance does not find attributes from a module's __getattr__, such as lazy submodules: its result changed."""
    assert not [name for name, path in MODULES.items() if "runtime_checkable" in path.read_text()]


@pytest.mark.parametrize("package", sorted(ROOMS))
def test_no_circle_within_a_package(package):
    own = {name for name in MODULES if room(name) == package}
    assert not circles({name: set(imported(trees()[name])) & own - {name} for name in own})


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {("b", "c")}


def test_main_path_functions_take_at_most_seven():
    assert not {name: number for name, number in handed().items() if number > MAX_PARAMETERS}


def test_each_of_the_longest_files_is_there():
    source = ast.parse((TESTS / "conftest.py").read_text())
    (value,) = [node.value for node in source.body if ast.unparse(node).startswith("LONGEST_FILES = ")]
    names = ast.literal_eval(value).split()
    assert len(names) == len(set(names))
    assert not [name for name in names if not (TESTS / f"{name}.py").is_file()]


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="a user may leave some out")
def test_ci_has_all_extras():
    assert not [name for name in EXTRAS.split() if importlib.util.find_spec(name) is None], 'pip install -e ".[test]"'
