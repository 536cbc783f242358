"""Checks a configuration that somebody else has written, which is data and no code, before anything of it is run.

Whoever can write to a store can write any rerun.yaml there, and whoever hands on a run's folder any in it. So its targets
are the runner's own and torch's alone, it draws in no other file and sets nothing of Hydra's, its values come from itself:
`${oc.env:...}` would put a password into what is tracked, and `${oc.decode:...}` a target where nobody sees it. And the store
that it names is not taken: it would get the run, and what this person's environment has to log in with.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import instantiate, origin, run_files
from runner.config.allowed import public_name
from runner.config.instantiate import locate, otherwise_named
from runner.config.secrets import ENVIRONMENT
from runner.config.trust import DEFAULTS
from runner.config.validate import value, written
from runner.errors import Problem, RunnerError, first_line, refuse, without_password

#: the resolvers of the built-in conf/
OWN_RESOLVERS = ("${oc.env:MLFLOW_TRACKING_URI,sqlite:///mlflow.db}", "${oc.env:MLFLOW_EXPERIMENT_NAME,null}")
FROM_STORE = "this configuration came from a store"
FROM_FOLDER = "this run was not made here by you, or was changed since"
STORE = "tracking.uri"
CARD = origin.SIGNED[1]

_trusts: ContextVar[bool] = ContextVar("trusts", default=False)


@contextmanager
def trusting(is_looked_at: bool = True) -> Iterator[None]:
    """What others have written counts as the person's own: it was looked at, or written by this program."""
    before = _trusts.set(is_looked_at or _trusts.get())
    try:
        yield
    finally:
        _trusts.reset(before)


def is_trusted() -> bool:
    """Whether what others have written was looked at."""
    return _trusts.get()


def is_held(folder: Path) -> bool:
    """Whether a run's folder is held to these rules: nobody here has made it, and it is not trusted."""
    return not _trusts.get() and not origin.is_own(folder)


def cleared(text: str, *, asked: str, look: str, trusted: bool) -> str:
    """The configuration, written anew. Imports the modules of allowed targets, and no other.

    look: how a person gets the file to look at it. trusted: it was looked at, and may name what a person's own may.
    Raises: RunnerError for each thing in it that is not allowed.
    """
    try:
        node = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:  # YAML's and OmegaConf's own
        problem = f"its rerun.yaml can't be read: {first_line(error)}"
        raise RunnerError(Problem(asked, problem, "a run that this runner has tracked")) from None
    if not isinstance(node, dict) or node.get("defaults") != DEFAULTS or "hydra" in node:
        problem = "its rerun.yaml is not as the runner writes it: it draws in other files, or sets Hydra's own keys"
        raise RunnerError(Problem(asked, problem, f"a run that is as it was written; {look} shows the file"))
    write = f"--trust, when you have looked at the file: {look}"
    if not trusted and (found := list(_problems(node, "", FROM_STORE, write))):
        raise RunnerError(*found)
    del node["defaults"]
    return f"defaults: [{', '.join(DEFAULTS)}]\n{OmegaConf.to_yaml(OmegaConf.create(node))}"


def rerun_problems(file: Path) -> list[Problem]:
    """What in a folder's rerun.yaml is not for a stranger to say; its store is seen to by take_no_store()."""
    if not is_held(file.parent):
        return []
    try:
        node = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except Exception:
        return []  # the same reader stops the composition, which tells it
    return [
        problem
        for problem in _problems(node, "", FROM_FOLDER, _look(file))
        if not problem.source.startswith(f"{STORE}=")
    ]


def take_no_store(cfg: DictConfig, file: Path, words: Sequence[str]) -> list[Problem]:
    """Sets the usual store in place of the one that a folder's rerun.yaml names. words: of the command line.

    Where nothing else names one, the person is asked: the usual one may not be where the run is looked for.
    """
    if not is_held(file.parent) or any(word.lstrip("+").startswith(f"{STORE}=") for word in words):
        return []
    node = cfg.get("tracking")
    if not OmegaConf.is_dict(node) or "uri" not in node:
        return []  # told where the configuration is checked
    uri = written(node, "uri")
    node.uri = OWN_RESOLVERS[0]
    if uri in OWN_RESOLVERS or os.environ.get("MLFLOW_TRACKING_URI") or not value(cfg, "tracking.enabled"):
        return []
    problem = f"{FROM_FOLDER}, and the store that it names is not taken without a word of yours"
    write = f"{STORE}=sqlite:///mlflow.db for the usual one of this folder, {STORE}=URI for another, or {_look(file)}"
    return [Problem(f"{STORE}={without_password(uri)}", problem, write)]


def check_card(file: Path) -> None:
    """Raises: RunnerError for what in a folder's model.json is not for a stranger to say."""
    if not is_held(file.parent):
        return
    try:
        node = run_files.read_json(file)
    except (OSError, ValueError):
        return  # told by its reader
    refuse(list(_problems(node, "", FROM_FOLDER, _look(file))))


def recipe_problems(node: Any, file: Path) -> list[Problem]:
    """What in a journal's recipe of a model is not for a stranger to say."""
    return list(_problems(node, "model", FROM_FOLDER, _look(file)))


def build(node: dict[str, Any]) -> Any:
    """Builds what a stranger's journal describes; nothing of the environment is filled in. Raises: RunnerError."""
    return instantiate.build(node, key="model", own_code=False)


def _look(file: Path) -> str:
    return f"--trust, when you have looked at {file}"


def _problems(node: Any, key: str, whose: str, write: str) -> Iterator[Problem]:
    if isinstance(node, dict):
        target = node.get("_target_")
        if target is not None and (public := public_name(str(target))) is not None:  # trust would not help
            error = otherwise_named(target, public)
            yield error.below(key)
        elif target is not None and _is_foreign(str(target)):
            problem = f"{whose}, and names code that is neither the runner's nor torch's"
            yield Problem(f"{key}._target_={target}", problem, write)
        for name, child in node.items():
            yield from _problems(child, f"{key}.{name}" if key else str(name), whose, write)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _problems(child, f"{key}[{index}]", whose, write)
    elif isinstance(node, str) and re.fullmatch(r"train\.hooks\[\d+\]", key):
        yield from _problems({"_target_": node}, key, whose, write)
    elif isinstance(node, str) and key in ("train", "train.hooks"):
        problem = f"{whose}, and names its hooks by a reference, behind which any code may stand"
        yield Problem(f"{key}={node}", problem, f"the hooks written out, as train.hooks: [NAME], or {write}")
    elif (
        isinstance(node, str)
        and node not in OWN_RESOLVERS
        and (("${" in node and ":" in node) or f"<{ENVIRONMENT}:" in node)
    ):
        yield Problem(f"{key}={node}", f"{whose}, and may not read what lies outside it", write)


def _is_foreign(target: str) -> bool:
    try:
        locate(target, own_code=False)
    except RunnerError:
        return True
    return False
