"""Finds what in Hydra's settings and in a run's folder would call code, or leads out of the folder.

runner.config.instantiate guards what is built of a configuration. Hydra follows names of its own before that: launchers, sweepers,
callbacks, the classes of its logs, and variables that it sets. All of these are held to a list, wherever they come from.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.allowed import public_name
from runner.config.instantiate import locate, otherwise_named
from runner.config.run_files import yaml_refusal
from runner.errors import Problem, RunnerError, nearest, refuse

#: what conf/ itself names; not imported here, for that takes time
OURS = (
    "runner.sweep.Grid",
    "runner.sweep.Search",
    "runner.sweep.Slots",
    "runner.sweep.RayCluster",
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
)
PLUGINS = ("hydra_plugins", "hydra.experimental.callbacks", "hydra._internal.core_plugins")
LOGS = re.compile(
    r"logging\.(StreamHandler|FileHandler|NullHandler|Formatter|Filter)"
    r"|logging\.handlers\.(Rotating|TimedRotating|Watched)FileHandler"
    r"|colorlog\.\w+|rich\.logging\.RichHandler"
)
#: resolvers that make a node of a text, and names of resolvers that are made of one
MADE = re.compile(r"\$\{\s*(oc\.(create|decode)|[\w.]*\$\{)")
#: Hydra's settings that name what is called, or variables that are set
CALLING = tuple(
    f"hydra.{name}"
    for name in ("job_logging", "hydra_logging", "launcher", "sweeper", "callbacks", "verbose", "job.env_set")
)
#: a value that is one ${...} and nothing else, and what such a one may be to bring a text, now and later
ALONE = re.compile(r"\s*\$\{\s*([^{}]*?)\s*\}\s*")
BRINGS_TEXT = re.compile(r"hydra[.:](runtime|job|run|sweep)\.[\w.]+|(oc\.env|now):.*")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "NOTSET")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
#: what hydra.job.env_set may set. Many another makes some program load or start something: LD_PRELOAD, GIT_EXTERNAL_DIFF, CXX
VARIABLES = re.compile(
    r"(OMP|MKL|OPENBLAS|NUMEXPR)_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|CUBLAS_WORKSPACE_CONFIG|NCCL_DEBUG"
    r"|PYTORCH_\w*ALLOC_CONF|TOKENIZERS_PARALLELISM|MLFLOW_TRACKING_\w+|RUNNER_JOB"
)
#: the head of a rerun.yaml
RERUN = "rerun"
DEFAULTS = ["schema", "base", "_self_"]


def hydra_problems(hydra: DictConfig) -> list[Problem]:
    """What in Hydra's own settings names code that is not ours, a plugin's, the current folder's or of --allow."""
    found = []
    for path, key, value in _values(hydra, "hydra"):
        is_log = path.startswith(("hydra.job_logging", "hydra.hydra_logging"))
        asked, name = f"{path}.{key}={value}", str(value)
        if path.startswith("hydra.overrides") or key == "override_dirname":
            continue  # the words as they were typed: texts, which nobody builds anything of
        if isinstance(value, Unsure) or MADE.search(name):
            problem = "settings of Hydra's are written out, not made of a text"
            found.append(Problem(asked, problem, f"{path}.{key}: {{...}}"))
        elif key == "_target_":
            found += _target_problems(path, name)
        elif is_log and (key in ("()", "class", ".", "queue", "listener") and not LOGS.fullmatch(name)):
            problem = "a log's classes are those of Python's logging, colorlog and rich"
            found.append(Problem(asked, problem, f"{path}.class=logging.StreamHandler"))
        elif is_log and (key == "stream" or name.startswith("ext://")) and name not in STREAMS:
            found.append(Problem(asked, "a log is written to a file or to a stream", f"{path}.{key}={STREAMS[0]}"))
        elif is_log and key == "level" and not _is_level(value):
            problem = f"a log's level is {', '.join(LEVELS)} or a whole number"
            found.append(Problem(asked, problem, f"{path}.level={next(iter(nearest(name, LEVELS)), 'INFO')}"))
        elif path == "hydra.job.env_set" and not VARIABLES.fullmatch(key):
            problem = f"a configuration sets no {key}: some variables make a program start another one"
            found.append(Problem(asked, problem, f"export {key}={value} before the command"))
    return found


class Unsure(str):
    """A ${...} that may bring more than a text, or another thing later than now."""

    __slots__ = ()


def _is_level(value: Any) -> bool:
    return value in logging.getLevelNamesMapping() if isinstance(value, str) else isinstance(value, int)


def rerun_problems(file: Path) -> list[Problem]:
    """What a rerun.yaml holds that no run has written: it travels with its folder, and is data."""
    if why := yaml_refusal(file):
        return [Problem(str(file), why, "the file as its run wrote it")]
    try:
        text = file.read_text()
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception:
        return []  # the same reader stops the composition, which tells it
    if not isinstance(content, dict):
        content = {}
    found = []
    mend = f"the lines that you trust in a file of your own, conf/mine.yaml, and -cn mine instead of -cn {RERUN}"
    for key in map(str, content):
        if key.partition("/")[0] == "hydra":
            found.append(Problem(f"{key} in {file}", "a run's configuration holds no settings of Hydra's", mend))
    if content.get("defaults") != DEFAULTS:
        problem = f"its defaults are {content.get('defaults')}, and a run writes [{', '.join(DEFAULTS)}]"
        found.append(Problem(f"defaults in {file}", problem, mend))
    if re.search(r"^\s*#\s*@package", text, re.MULTILINE):
        found.append(Problem(f"@package in {file}", "a run's configuration is no part of another one", mend))
    for name in ("schema", "base"):
        if (beside := file.with_name(f"{name}.yaml")).exists():
            problem = f"it takes the place of the runner's own {name}, which {file.name} builds on"
            found.append(Problem(str(beside), problem, f"the folder without {beside.name}"))
    return found


def check_folder(folder: Path) -> None:
    """Raises: RunnerError for each thing in a run's or a sweep's folder that may not be there, before anything is read."""
    is_a_runs = any((folder / name).exists() for name in (f"{RERUN}.yaml", "ledger.jsonl"))
    own = "hydra.run.dir=FOLDER, one for the run alone"  # what a person keeps in a folder is not to be taken away
    found = [
        Problem(str(path), problem, f"rm -- {shlex.quote(str(path))}" if is_a_runs else own)
        for path, problem in strays(folder)
    ]
    if why := yaml_refusal(rerun := folder / f"{RERUN}.yaml"):
        found.append(Problem(str(rerun), why, "the file as its run wrote it"))
    refuse(found)


def strays(folder: Path) -> list[tuple[Path, str]]:
    """What at or below a folder is no file or folder of it, and why: who reads a pipe waits for ever."""
    problem = "this link leads out of the run's folder, where a run would read and write"
    pipe = "it is neither a file nor a folder, and nothing that a run writes"
    found = [(path, problem) for path in links_out(folder, of=folder)]
    return found + [(path, pipe) for path in _below(folder) if not path.is_symlink() and _is_special(path)]


def links_out(place: Path, *, of: Path) -> list[Path]:
    """The links at or below `place` that lead out of the folder `of`. The folder itself may be one."""
    return [path for path in _below(place) if path.is_symlink() and not _is_inside(path, of)]


def inside(folder: Path, name: str) -> Path | None:
    """What is called so in a folder; None when it is not in the folder, or holds links that lead out of it."""
    path = folder / name
    return path if _is_inside(path, folder) and not links_out(path, of=folder) else None


def _below(place: Path) -> list[Path]:
    return sorted(Path(parent) / name for parent, folders, files in os.walk(place) for name in (*folders, *files))


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        end = path.resolve()
        return not end.is_symlink() and end.is_relative_to(folder.resolve())  # a link: of a ring, from Python 3.13 on
    except (OSError, RuntimeError, ValueError):  # a ring of links; a name with a zero in it
        return False


def _target_problems(path: str, target: str) -> list[Problem]:
    if target in OURS:
        return []
    try:
        if (public := public_name(target, OURS)) is not None:
            raise RunnerError(otherwise_named(target, public))
        locate(target, more=PLUGINS)
    except RunnerError as error:
        return [problem.below(path) for problem in error.problems]
    return []


def _values(node: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    is_dict = OmegaConf.is_dict(node)
    for key in list(node) if is_dict else range(len(node)):
        inner, child = f"{path}.{key}" if is_dict else f"{path}[{key}]", node._get_node(key)
        if OmegaConf.is_interpolation(node, key):
            text = str(child._value())
            if key in ("_target_", "()", "class") or MADE.search(text):
                yield path, str(key), text
                continue
            is_calling = inner.startswith(CALLING)
            try:
                child = node[key]
            except OmegaConfBaseException:
                child = None  # what only a running job has: its folder, its number
            is_group = OmegaConf.is_config(child) or isinstance(child, dict | list | tuple)
            if is_calling and (is_group or not _stays_text(node._get_root(), text)):
                yield path, str(key), Unsure(text)
                continue
            if child is None:
                continue
        if OmegaConf.is_config(child) and not (child._is_none() or child._is_missing()):
            yield from _values(child, inner)
        elif (value := child._value() if hasattr(child, "_value") else child) is not None:
            yield path, str(key), value


def _stays_text(root: Any, text: str) -> bool:
    if re.search(r"\$\{[^}]*\$\{", text):
        return False  # a name that is made of another value may be another one later
    if (found := ALONE.fullmatch(text)) is None:
        return True  # with a text around it, or beside another one
    if BRINGS_TEXT.fullmatch(found[1]):
        return True
    node = root
    for name in found[1].split("."):
        if not OmegaConf.is_dict(node) or name not in node:
            return False
        node = node._get_node(name)
    return not OmegaConf.is_config(node) and node is not None and not node._is_interpolation()
