"""Refuses settings that would call code which the user has not allowed, and run directories that hold more than a run writes.

runner.config.instantiate checks what it builds. Hydra builds launchers, sweepers, callbacks and logs before that:
`hydra_problems()` checks these, wherever they come from.

A run directory that this user has not signed (runner.config.origin), and a configuration from a store, are data. Their targets
are the runner's and torch's. Their values come from themselves: `${oc.env:...}` would track a password. Their store is not
used: it would receive the run and the user's credentials.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import origin, run_files, validate
from runner.config.allowed import homes, public_name
from runner.config.instantiate import locate, nested, otherwise_named
from runner.config.run_files import yaml_refusal
from runner.config.secrets import ENVIRONMENT, NOTIFY
from runner.errors import Problem, RunnerError, refuse, without_password

#: launchers, sweepers and callbacks that conf/ names; importing them takes time
OURS = (
    *(f"runner.sweep.{name}" for name in homes("runner.sweep")),
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
)
PLUGINS = ("hydra_plugins", "hydra.experimental.callbacks", "hydra._internal.core_plugins")
LOGS = re.compile(
    r"logging\.(StreamHandler|FileHandler|NullHandler|Formatter|Filter)"
    r"|logging\.handlers\.(Rotating|TimedRotating|Watched)FileHandler"
    r"|colorlog\.\w+|rich\.logging\.RichHandler"
)
#: resolvers that make a node from a text, and names that are references, too
MADE = re.compile(r"\$\{\s*(oc\.(create|decode)|[\w.]*\$\{)")
NESTED = re.compile(r"\$\{[^}]*\$\{")
#: Hydra's settings that name code, or variables to set
CALLING = tuple(
    f"hydra.{name}"
    for name in ("job_logging", "hydra_logging", "launcher", "sweeper", "callbacks", "verbose", "job.env_set")
)
#: a value that is a single ${...}, and such values that are a text, now and later
SINGLE = re.compile(r"\s*\$\{\s*([^{}]*?)\s*\}\s*")
TEXTS = re.compile(r"hydra[.:](runtime|job|run|sweep)\.[\w.]+|(oc\.env|now):.*")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
#: variables for hydra.job.env_set; others make programs load or start something: LD_PRELOAD, GIT_EXTERNAL_DIFF, CXX
VARIABLES = re.compile(
    r"(OMP|MKL|OPENBLAS|NUMEXPR)_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|NCCL_DEBUG"
    r"|PYTORCH_\w*ALLOC_CONF|TOKENIZERS_PARALLELISM|MLFLOW_TRACKING_\w+"
)
RERUN = "rerun"
#: the defaults of a rerun.yaml
DEFAULTS = ["schema", "base", "_self_"]
#: the resolvers of the built-in conf/
OWN_RESOLVERS = ("${oc.env:MLFLOW_TRACKING_URI,sqlite:///mlflow.db}", "${oc.env:MLFLOW_EXPERIMENT_NAME,null}")
FROM_STORE = "this configuration came from a store"
FROM_FOLDER = "this run was not made here by you, or was changed since"
STORE = "tracking.uri"
AS_WRITTEN = "restore the file as its run wrote it"

_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


def hydra_problems(hydra: DictConfig) -> list[Problem]:
    """Return every setting of Hydra's that names code which is not ours, a plugin's or the user's."""
    return [problem for path, key, value in _values(hydra, "hydra") for problem in _hydra_problems(path, key, value)]


def _hydra_problems(path: str, key: str, value: Any) -> Iterator[Problem]:
    is_log = path.startswith(("hydra.job_logging", "hydra.hydra_logging"))
    source, name = f"{path}.{key}={value}", str(value)
    if path.startswith("hydra.overrides") or key == "override_dirname":
        return  # texts, as they were typed
    if isinstance(value, Unsure):
        problem = "Hydra's settings must be written out, without references to groups or texts"
        yield Problem(source, problem, f"write out the value of `{path}.{key}`", code="untrusted")
    elif key == "_target_" and name not in OURS:
        if (public := public_name(name, OURS)) is not None:
            yield otherwise_named(f"{path}._target_", name, public)
            return
        try:
            locate(name, key=f"{path}._target_", more=PLUGINS)
        except RunnerError as error:
            yield from error.problems
    elif is_log and (key in ("()", "class", ".", "queue", "listener") and not LOGS.fullmatch(name)):
        problem = "a log's classes are those of Python's logging, colorlog and rich"
        yield Problem.suggest(source, problem, [f"{path}.class=logging.StreamHandler"])
    elif is_log and (key == "stream" or name.startswith("ext://")) and name not in STREAMS:
        yield Problem.suggest(source, "a log is written to a file or to a stream", [f"{path}.{key}={STREAMS[0]}"])
    elif path == "hydra.job.env_set" and not VARIABLES.fullmatch(key):
        problem = f"a configuration can't set {key}: some variables make a program start another one"
        yield Problem(source, problem, f"run `export {key}={value}` before the command", code="untrusted")


class Unsure(str):
    """A ${...} that may be more than a text, or another value later."""

    __slots__ = ()


def _values(node: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    is_dict = OmegaConf.is_dict(node)
    for key in list(node) if is_dict else range(len(node)):
        inner, child = f"{path}.{key}" if is_dict else f"{path}[{key}]", node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            text, is_calling = str(child._value()), inner.startswith(CALLING)
            is_made = key in ("_target_", "()", "class") or MADE.search(text)
            if is_made or (is_calling and NESTED.search(text)):
                yield path, str(key), Unsure(text)
                continue
            try:
                child = node[key]
            except OmegaConfBaseException:
                child = None  # known while a job runs: its directory, its number
            is_group = OmegaConf.is_config(child) or isinstance(child, dict | list | tuple)
            if is_calling and (is_group or not _stays_text(node._get_root(), text)):
                yield path, str(key), Unsure(text)
                continue
        if OmegaConf.is_config(child) and not (child._is_none() or child._is_missing()):
            yield from _values(child, inner)
        elif (value := child._value() if hasattr(child, "_value") else child) is not None:
            yield path, str(key), value


def _stays_text(root: Any, text: str) -> bool:
    if (single := SINGLE.fullmatch(text)) is None or TEXTS.fullmatch(single[1]):
        return True
    node = root
    for name in single[1].split("."):
        if not OmegaConf.is_dict(node) or name not in node:
            return False
        node = node._get_node(name)
    return not OmegaConf.is_config(node) and node is not None and not node._is_interpolation()


@contextmanager
def trusting(is_trusted: bool = True) -> Iterator[None]:
    """Treat run directories of others as this user's: `--trust`, or this program wrote them."""
    before = _trusts.set(is_trusted or _trusts.get())
    try:
        yield
    finally:
        _trusts.reset(before)


def is_trusted() -> bool:
    """Return whether run directories of others are trusted."""
    return _trusts.get()


def is_untrusted(folder: Path) -> bool:
    """Return whether a run directory is data: this user has not signed it, and does not trust it."""
    return not _trusts.get() and not origin.is_own(folder)


def rerun_problems(file: Path, *, look: str = "") -> list[Problem]:
    """Return every error of a run's rerun.yaml: content that no run writes, and code where it is only data.

    Imports the modules of allowed targets.

    Args:
        file: In the run's directory, or a copy from a store.
        look: How the user can read the file of a store.
    """
    if why := yaml_refusal(file):
        return [Problem(str(file), why, AS_WRITTEN, code="bad-file")]
    try:
        text = file.read_text()
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        return []  # the composition reports it
    content = content if isinstance(content, dict) else {}
    fix = f"copy the lines that you trust to conf/mine.yaml, and use `-cn mine` instead of `-cn {RERUN}`"
    wrong = {
        key: "a run's configuration has no settings of Hydra's"
        for key in map(str, content)
        if key.partition("/")[0] == "hydra"
    }
    if NOTIFY in content:
        wrong[NOTIFY] = "a run's configuration has no address for notices"
    if content.get("defaults") != DEFAULTS:
        wrong["defaults"] = f"the defaults are {content.get('defaults')}, and a run writes [{', '.join(DEFAULTS)}]"
    if re.search(r"^\s*#\s*@package", text, re.MULTILINE):
        wrong["@package"] = "a run's configuration is not a part of another one"
    problems = [Problem(f"{key} in {file}", problem, fix, code="untrusted") for key, problem in wrong.items()]
    for name in ("schema", "base"):
        if (other := file.with_name(f"{name}.yaml")).exists():
            problem = f"this file would replace the runner's own {name}, which {file.name} builds on"
            problems.append(Problem(str(other), problem, f"move {other.name} out of the directory", code="untrusted"))
    if not problems and is_untrusted(file.parent):
        if look:
            return [*_problems(content, "", FROM_STORE, f"use `--trust` when you have looked at the file: {look}")]
        foreign = _problems(content, "", FROM_FOLDER, _look(file))
        problems = [each for each in foreign if not each.source.startswith(f"{STORE}=")]  # take_no_store() replaces it
    return problems


def take_no_store(cfg: DictConfig, file: Path, overrides: Sequence[str]) -> list[Problem]:
    """Replace the store of an untrusted rerun.yaml by the usual one; return an error where that would be a guess."""
    if not is_untrusted(file.parent) or any(each.lstrip("+").startswith(f"{STORE}=") for each in overrides):
        return []
    node = cfg.get("tracking")
    if not OmegaConf.is_dict(node) or "uri" not in node:
        return []  # reported where the configuration is checked
    uri = validate.written(node, "uri")
    node.uri = OWN_RESOLVERS[0]
    if uri in OWN_RESOLVERS or os.environ.get("MLFLOW_TRACKING_URI") or not validate.value(cfg, "tracking.enabled"):
        return []
    problem = f"{FROM_FOLDER}, and its store is used only if you name it"
    way = f"{STORE}=sqlite:///mlflow.db"
    fix = f"use `{way}` or `{STORE}=URI`, or {_look(file)}"
    return [Problem(f"{STORE}={without_password(uri)}", problem, fix, (way,), code="untrusted")]


def check_card(file: Path) -> None:
    """Raise a RunnerError for everything in an untrusted model.json that is not data."""
    if not is_untrusted(file.parent):
        return
    try:
        node = run_files.read_json(file)
    except (OSError, ValueError):
        return  # its reader reports it
    refuse(_problems(node, "", FROM_FOLDER, _look(file)))


def recipe_problems(node: Any, file: Path) -> list[Problem]:
    """Return everything in a journal's recipe of a model that is not data."""
    return list(_problems(node, "model", FROM_FOLDER, _look(file)))


def _look(file: Path) -> str:
    return f"use `--trust` when you have looked at {file}"


def _problems(node: Any, key: str, reason: str, fix: str) -> Iterator[Problem]:
    for path, each in nested(node, key):
        target = each.get("_target_") if isinstance(each, dict) else None
        if isinstance(each, str) and re.fullmatch(r"train\.hooks\[\d+\]", path):
            target = each
        if target is not None and (public := public_name(str(target))) is not None:  # --trust would not help
            yield otherwise_named(f"{path}._target_", str(target), public)
        elif target is not None and _is_foreign(str(target)):
            problem = f"{reason}, and names code that is neither the runner's nor torch's"
            yield Problem(f"{path}._target_={target}", problem, fix, code="untrusted")
        elif target is not None or not isinstance(each, str):
            continue
        elif path in ("train", "train.hooks"):
            problem, ways = f"{reason}, and a reference to hooks may name any code", f"write out the hooks, or {fix}"
            yield Problem(f"{path}={each}", problem, ways, code="untrusted")
        elif each not in OWN_RESOLVERS and (("${" in each and ":" in each) or f"<{ENVIRONMENT}:" in each):
            yield Problem(f"{path}={each}", f"{reason}, and may not read values from outside it", fix, code="untrusted")


def _is_foreign(target: str) -> bool:
    try:
        locate(target, own_code=False)
    except RunnerError:
        return True
    return False


def check_folder(folder: Path) -> None:
    """Raise a RunnerError for every path in the directory of a run or sweep that may not be there, before it is read."""
    is_runs = any((folder / name).exists() for name in (f"{RERUN}.yaml", "ledger.jsonl"))
    problems = []
    for path, problem in strays(folder):
        fix = f"run `rm -- {shlex.quote(str(path))}`" if is_runs else "use `hydra.run.dir=FOLDER`, an empty directory"
        problems.append(Problem(str(path), problem, fix, code="untrusted"))
    if why := yaml_refusal(rerun := folder / f"{RERUN}.yaml"):
        problems.append(Problem(str(rerun), why, AS_WRITTEN, code="bad-file"))
    refuse(problems)


def strays(folder: Path) -> list[tuple[Path, str]]:
    """Return every link that leads out of a directory, and every pipe or socket in it (a reader would wait), with the reason."""
    link = "this link leads out of the run's folder, where a run would read and write"
    pipe = "this is neither a file nor a folder, and no run writes it"
    paths = _below(folder)
    others = [
        each for each in paths if not each.is_symlink() and each.exists() and not (each.is_file() or each.is_dir())
    ]
    return [(path, link) for path in paths if _leads_out(path, folder)] + [(path, pipe) for path in others]


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of a name in a directory, or None if it is outside, or holds links that lead out."""
    path = folder / name
    is_whole = _is_inside(path, folder) and not any(_leads_out(each, folder) for each in _below(path))
    return path if is_whole else None


def _below(folder: Path) -> list[Path]:
    return sorted(Path(parent) / name for parent, folders, files in os.walk(folder) for name in (*folders, *files))


def _leads_out(path: Path, folder: Path) -> bool:
    return path.is_symlink() and not _is_inside(path, folder)


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        end = path.resolve()
        return not end.is_symlink() and end.is_relative_to(folder.resolve())  # a ring of links resolves to one of them
    except (OSError, RuntimeError, ValueError):  # a ring of links, before Python 3.13; a name with a zero byte
        return False
