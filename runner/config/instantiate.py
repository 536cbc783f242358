"""Builds the object of a node with a `_target_`, if the target is allowed: the only way from YAML to code.

Allowed are our own parts and torch's (runner.config.allowed) and modules in the current directory, which are the user's code.
More prefixes come from the command line (`--allow timm`), never from a configuration. Hydra's block list is not enough.

Code is what is installed, what is in the current directory, and the command line. Data is every configuration, also one in
conf/, and all of a run's directory: data chooses among allowed parts and their arguments. runner.config.trust checks
Hydra's own settings.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.allowed import LIBRARIES, PARTS, homes, is_part, public_name, under
from runner.config.checks import argument_problems
from runner.config.identity import as_text, leaves
from runner.config.other_names import keys_for, value_for
from runner.config.packages import install
from runner.config.schema import SHARED, keys
from runner.errors import (
    NO_MOVES,
    Problem,
    RunnerError,
    in_words,
    is_out_of_host_memory,
    listed,
    moves_itself,
    nearest,
    own_line,
    refuse,
    use,
)
from runner.version import CONF

#: prefixes that the command line adds, comma-separated; processes of a run inherit them
ALLOW_VARIABLE = "RUNNER_ALLOW"
#: directories of a checkout, which the user's modules can't be named like
NO_OWN_CODE = ("conf", "runner", "tests")
#: wraps a model whose data needs it
PREPARED = "runner.models.Prepared"
#: packages that --allow does not open: their parts are listed
OURS = ("runner", *dict.fromkeys(name.split(".")[0] for name in LIBRARIES))
#: groups whose targets get their first argument from code: the model's parameters, and the optimizer
PARTIAL = ("optimizer", "scheduler")
#: the keys whose nodes are built from their `_target_`
BUILT = ("data", "model", "task", "optimizer", "scheduler")
HYDRA_KEYS = ("_target_", "_partial_", "_args_", "_convert_", "_recursive_")


def build(node: dict[str, Any], *, key: str = "", own_code: bool = True) -> Any:
    """Build the object of a node, nested nodes first (`hydra.utils.instantiate`).

    Args:
        node: Plain values with resolved `${...}`: Hydra would resolve others after the check.
        key: The node's key, for errors.
        own_code: Whether modules of the current directory and of --allow count.

    Raises:
        RunnerError: A target is not allowed, does not exist or refuses its arguments.
    """
    problem, fix = "a text with `${` in it would be resolved a second time", "remove the backslash before `${`, or `${`"
    texts = ((path, each) for path, each in nested(node, key) if isinstance(each, str) and "${" in each)
    left_open = [Problem(f"{path}={text}", problem, fix, code="bad-value") for path, text in texts]
    refuse([*left_open, *problems(node, key=key, own_code=own_code)])
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, RunnerError):
            raise cause from None
        if is_out_of_host_memory(cause):  # no argument is wrong
            raise cause from None
        raise RunnerError(_not_built(node, key, cause)) from cause
    except SystemExit as error:  # Hydra lets it pass
        raise RunnerError(_not_built(node, key, error)) from error


def _not_built(node: dict[str, Any], key: str, cause: BaseException) -> Problem:
    if node["_target_"] == PREPARED:  # the user wrote the model in it
        node = node["model"]
    where = own_line(cause)
    named = ", ".join(f"`{key}.{name}`" for name in node if name not in HYDRA_KEYS)
    fix = f"set {named or 'its arguments'} to other values"
    if "before Module.__init__() call" in str(cause):
        fix = f"call `super().__init__()` before the first line that sets something{where}"
    elif where and not isinstance(cause, TypeError | ValueError):
        fix = f"correct {where.strip(' ()')}"
    if moves_itself(cause):
        fix = NO_MOVES
    problem = f"`{node['_target_']}` failed with {in_words(cause)}{where}"
    return Problem(f"{key}._target_={node['_target_']}", problem, fix, code="bad-argument")


def problems(node: Any, *, key: str, own_code: bool = True) -> list[Problem]:
    """Return every error in the targets of a node and in the names of their arguments. Imports the targets' modules."""
    return [problem for path, inner in targets(node, key) for problem in _target_problems(path, inner, own_code)]


def arguments(target: object) -> Mapping[str, inspect.Parameter] | None:
    """Return the arguments of a target by name; None if it is not allowed or has no signature."""
    try:
        return inspect.signature(locate(str(target))).parameters
    except (RunnerError, TypeError, ValueError):
        return None


def locate(target: str, *, key: str = "_target_", own_code: bool = True, more: tuple[str, ...] = ()) -> Any:
    """Return the class or function of a dotted path.

    Args:
        target: The dotted path.
        key: The key that has it, for errors.
        own_code: Whether modules of the current directory and of --allow count.
        more: Further prefixes that are allowed.

    Raises:
        RunnerError: The path is not allowed, or leads nowhere.
    """
    if target in PARTS:
        return _part(key, target)
    if (public := public_name(target)) is not None:
        raise RunnerError(otherwise_named(key, target, public))
    own = (own_prefixes(target) if own_code else ()) + more
    if not under(target, LIBRARIES + own):
        allowed = f"those of the runner's conf/, {', '.join((*LIBRARIES, *own))} and modules in the current directory"
        problem = f"`{target}` is not a part that a configuration may name here; allowed are {allowed}"
        raise _refused(key, target, problem, own_code)
    if _is_private(target):
        problem = "a configuration may not name anything that begins with an underscore"
        raise _refused(key, target, problem, own_code)
    thing, module = _import(key, target)
    home = str(getattr(thing, "__module__", None) or module)
    own += own_prefixes(home) if own_code else ()  # a custom module may import from another one
    if not callable(thing) or inspect.ismodule(thing) or not (under(home, own) or is_part(thing, home)):
        # torch.nn.modules.linear.torch.os.system starts well and ends in the operating system
        path = f"{home}.{getattr(thing, '__qualname__', thing)}"
        if (name := public_name(path) or path) in PARTS:
            problem = f"the module `{module}` imports it; its name is `{name}`"
            raise RunnerError.suggest(f"{key}={target}", problem, [f"{key}={name}"], code="bad-target")
        problem = f"`{target}` leads to `{name}`, which is not a part that a configuration may name"
        raise _refused(key, target, problem, own_code, leads_to=name)
    return thing


def _refused(key: str, target: str, message: str, own_code: bool, leads_to: str = "") -> RunnerError:
    path = leads_to or target
    if parts := _parts_of_torch(path):
        return RunnerError.suggest(f"{key}={target}", message, [f"{key}={parts[0]}"], code="bad-target")
    near = [*(_in_files_like(path) if own_code else ()), *nearest(path, PARTS)]
    ways = tuple(f"{key}={hit}" for hit in near if hit not in (path, target))[:1]
    fixes = [f"use `{way}`" for way in ways]
    fixes.append(f"add your own class to a file of the current directory (`{key}=my_models.Net`)")
    never = (*OURS, *own_prefixes(path), *(sys.stdlib_module_names if leads_to else ()))
    if (first := path.split(".")[0]) not in never:
        fixes.append(f"use `--allow {first}` if you trust it")
    return RunnerError(Problem(f"{key}={target}", message, ", or ".join(fixes), ways, code="bad-target"))


def otherwise_named(key: str, target: str, public: str) -> Problem:
    """Return the error of a path to one of our modules, which an earlier version may have written."""
    problem = f"`{target}` is not a part that a configuration may name: the runner's own parts have one name each"
    fix = f"use `{key}={public}`; a run of an earlier version with the other name can be trained again with it"
    return Problem(f"{key}={target}", problem, fix, (f"{key}={public}",), code="bad-target")


def own_prefixes(target: str) -> tuple[str, ...]:
    """Return the prefixes of the user's code: those of --allow, and the target's first name if it is a module here.

    In a notebook or a script that calls run(), `__main__` counts, too.
    """
    more = tuple(filter(None, os.environ.get(ALLOW_VARIABLE, "").split(",")))
    first, here = target.split(".")[0], Path.cwd()
    if first == "__main__":
        is_users = getattr(sys.modules[first], "__spec__", None) is None  # `python -m runner` has a spec
        return (*more, first) if is_users else more
    with suppress(OSError):  # a name that is too long for a file
        is_here = (here / f"{first}.py").is_file() or (here / first / "__init__.py").is_file()
        if first.isidentifier() and first not in NO_OWN_CODE and is_here:
            return (*more, first)
    return more


def _is_private(target: str) -> bool:
    is_ours = under(target, ("runner", *LIBRARIES))  # some private functions import the module that an argument names
    names = target.removeprefix("__main__.").split(".")
    return any(name.startswith("__") or (name.startswith("_") and is_ours) for name in names)


def nested(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a plain value and every value below it, each with its key."""
    yield path, node
    if isinstance(node, dict):
        for name, child in node.items():
            yield from nested(child, f"{path}.{name}" if path else str(name))
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from nested(child, f"{path}[{index}]")


def targets(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every node with a `_target_`, with its key."""
    return (
        (key, each) for key, each in nested(node, path) if isinstance(each, dict) and each.get("_target_") is not None
    )


def _target_problems(path: str, node: dict[str, Any], own_code: bool) -> list[Problem]:
    target = str(node["_target_"])
    flags = [flag for flag in ("_partial_", "_recursive_") if not isinstance(node.get(flag, False), bool)]
    errors = []
    for key, value in ((f"{path}.{flag}", node[flag]) for flag in flags):
        problem, ways = f"`{key}` must be true or false", [f"{key}=true", f"{key}=false"]
        errors.append(Problem.suggest(f"{key}={value}", problem, ways))
    if errors:
        return errors
    try:
        thing = locate(target, key=f"{path}._target_", own_code=own_code)
        parameters = inspect.signature(thing).parameters
    except RunnerError as error:
        return list(error.problems)
    except (TypeError, ValueError):
        return []  # a builtin without a signature; the call reports its errors
    takes = {name: each for name, each in list(parameters.items())[path in PARTIAL :] if name != "self"}
    if not any(each.kind == each.VAR_KEYWORD for each in takes.values()):
        unknown = [name for name in node if name not in HYDRA_KEYS and name not in takes]
        errors = [each for name in unknown for each in _refused_arguments(path, name, node, thing, list(takes))]
    if path in PARTIAL or not (node.get("_partial_") or node.get("_args_")):
        for name, each in takes.items():
            is_named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
            if each.default is each.empty and is_named and name not in node:
                if path == "task" and inspect.isfunction(thing):
                    problem = f"`{thing.__name__}` is a function of a model and a batch, not what makes a task"
                    ways = [f"task=own task.function._target_={target}"]
                    return [Problem.suggest(f"{path}._target_={target}", problem, ways)]
                problem, fix = f"`{thing.__name__}` needs an argument `{name}`", f"set `{path}.{name}=...`"
                errors.append(Problem(f"{path}._target_={target}", problem, fix, code="missing-value"))
    return errors + (argument_problems(thing, node, path) if target in PARTS else [])


def _refused_arguments(path: str, name: str, node: dict[str, Any], thing: Any, takes: list[str]) -> Iterator[Problem]:
    problem = f"`{thing.__name__}` takes no argument `{name}`; its arguments: {listed(takes, 12) or 'none'}"
    settings = keys(SHARED[path]) if path in SHARED else ()
    hits = [hit for key in keys_for(name) if (hit := key.rpartition(".")[2]) in takes] or nearest(
        name, [*takes, *settings]
    )
    for key, value in leaves(node[name], name):
        ways = []
        for hit in hits:
            usual = node.get(hit, value) if key == name else value
            is_kept = isinstance(value, int | float) == isinstance(usual, int | float)
            ways.append(shlex.quote(f"{path}.{key.replace(name, hit, 1)}={as_text(value if is_kept else usual)}"))
        source = f"{path}.{key}={as_text(value)}"
        ways = ways or [f"{option} {shlex.quote(source)}" for option in options_with(name, path, value)]
        yield Problem.suggest(source, problem, ways, f"leave out `{path}.{name}`", code="bad-argument")


def option_files(group: str) -> dict[str, Path]:
    """Return the files of a group by option; one in the current directory replaces ours."""
    files = {file.stem: file for folder in (CONF, Path("conf")) for file in (folder / group).glob("*.yaml")}
    return dict(sorted(files.items()))


def options_with(name: str, group: str, value: Any = "") -> list[str]:
    """Return overrides that choose an option of a group that takes an argument."""
    options = []
    for option, file in option_files(group).items() if group in BUILT else ():
        with suppress(OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):  # a broken file is not suggested
            node: Any = OmegaConf.load(file)
            takes = list(arguments(node.get("_target_")) or ())[group in PARTIAL :]
            options += [option] if name in (*node, *takes) else []
    likely = value_for(group, Path(str(value)).suffix.lstrip("."))
    if likely in options:
        return [f"{group}={likely}"]
    return [f"{group}={option}" for option in options]


def _part(key: str, target: str) -> Any:
    package, _, name = target.rpartition(".")
    return getattr(_import_module(homes(package)[name], key, target), name)


def _import(key: str, target: str) -> tuple[Any, str]:
    names = target.split(".")
    if not all(name.isidentifier() for name in names):
        fix = f"write a path such as `{key}=package.module.Name`"
        raise RunnerError.of(f"{key}={target}", "a `_target_` is a dotted path", fix, code="bad-target")
    thing: Any = _import_module(names[0], key, target)
    for index, name in enumerate(names[1:], start=1):
        inner = None
        if not hasattr(thing, name) and inspect.ismodule(thing) and hasattr(thing, "__path__"):
            inner = _import_module(".".join(names[: index + 1]), key, target, missing_is_fine=True)
        if not hasattr(thing, name) and inner is None:
            raise RunnerError(_no_such_name(key, target, thing, name))
        thing = getattr(thing, name, inner)  # Hydra's search for plugins does not set the attribute
    return thing, names[0]


def _import_module(name: str, key: str, target: str, *, missing_is_fine: bool = False) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if missing_is_fine and error.name == name:
            return None
        if error.name == name:
            raise RunnerError(_no_module(name, key, target)) from None
        problem = f"importing `{name}` failed: it needs `{error.name}`, which is not installed{own_line(error)}"
        fix = f"run `pip install {error.name}`, or remove that import"
        if under(str(error.name), NO_OWN_CODE):  # not the packages of this name on the public index
            fix = "import it as this version has it, or remove the import"
        raise RunnerError.of(f"{key}={target}", problem, fix, code="missing-package") from error
    except SystemExit as error:
        problem = f"importing `{name}` ended the program (exit code {error.code or 0}){own_line(error)}"
        fix = 'put `if __name__ == "__main__":` before what it does as a script'
        raise RunnerError.of(f"{key}={target}", problem, fix, code="bad-target") from error
    except Exception as error:
        problem = f"importing `{name}` failed with {in_words(error)}{own_line(error)}"
        fix = f"correct {own_line(error).strip(' ()') or name}"
        raise RunnerError.of(f"{key}={target}", problem, fix, code="bad-target") from error


def _no_module(name: str, key: str, target: str) -> Problem:
    if name == "torchmetrics":
        problem, fix = "`torchmetrics` is not installed", use(install("metrics"))
        return Problem(f"{key}={target}", problem, fix, code="missing-package")
    problem, otherwise = f"the module `{name}` was not found", f"add a file {name}.py to the current directory"
    ways = [f"{key}={hit}" for hit in _in_files_like(target)]
    return Problem.suggest(f"{key}={target}", problem, ways, otherwise, code="bad-target")


def _no_such_name(key: str, target: str, thing: Any, unknown: str) -> Problem:
    name = getattr(thing, "__name__", str(thing))
    public = [item for item in dir(thing) if item[0] != "_" and not inspect.ismodule(getattr(thing, item, None))]
    hits = nearest(unknown, public)
    head = target[: target.index(unknown)] if unknown in target else name + "."
    ways = [f"{key}={head}{hit}" for hit in hits]
    return Problem.suggest(
        f"{key}={target}", f"`{name}` has no `{unknown}`", ways, f"use a name that `{name}` has", code="bad-target"
    )


def _in_files_like(target: str) -> list[str]:
    here = Path.cwd()
    names = [path.stem for path in here.glob("*.py")] + [path.parent.name for path in here.glob("*/__init__.py")]
    first, dot, rest = target.partition(".")
    return [f"{hit}{dot}{rest}" for hit in nearest(first, {*names} - {*NO_OWN_CODE})]


def _parts_of_torch(path: str) -> list[str]:
    rooms, name = ("torch.optim.lr_scheduler", "torch.optim", "torch.nn"), path.rpartition(".")[2]
    if not under(path, (name, "nn", "optim", "lr_scheduler")):
        return []
    return [f"{room}.{name}" for room in rooms if inspect.isclass(getattr(importlib.import_module(room), name, None))]
