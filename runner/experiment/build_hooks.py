"""`train.hooks` goes in; the functions come out, ready to be called; or, before any work, what is wrong with them.

Called by the check of a configuration and by build.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.instantiate import build, locate, problems
from runner.config.schema import MOMENTS, are_hooks
from runner.errors import Problem, RunnerError, nearest
from runner.training.view import Hook

AT = "at"  # ours: when it is called; all else are its arguments
KEY = "train.hooks"


def hooks_of(cfg: DictConfig) -> tuple[Hook, ...]:
    """Functions are called with a View and their arguments; of a class an object is made, which is called with a View.

    Raises: RunnerError for what can't be had, or can't be called so.
    """
    hooks = []
    for number, (node, at) in enumerate(_nodes(cfg)):
        key, name = f"{KEY}[{number}]", str(node["_target_"])
        call = build(node, key=key)
        try:
            inspect.signature(call).bind(object())
        except TypeError as error:
            problem = f"it is called with a view of the training, and that fails: {error}"
            raise RunnerError(Problem(f"{key}={name}", problem, f"def {name.rpartition('.')[2]}(view): ...")) from None
        except ValueError:  # a builtin that tells no signature
            pass
        hooks.append(Hook(name, call, at))
    return tuple(hooks)


def hook_problems(cfg: DictConfig) -> list[Problem]:
    """What can be told without building anything."""
    found = []
    for number, (node, at) in enumerate(_nodes(cfg)):
        key = f"{KEY}[{number}]"
        found += problems(node, key=key)
        for moment in at:
            if moment not in MOMENTS:
                fix = " or ".join(nearest(str(moment), MOMENTS) or MOMENTS)
                found.append(Problem(f"{key}.{AT}={moment}", f"a hook is called at {', '.join(MOMENTS)}", fix))
    return found


def _nodes(cfg: DictConfig) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    try:
        written: Any = OmegaConf.to_container(cfg.train.hooks, resolve=True)
    except (OmegaConfBaseException, AttributeError, ValueError):
        return []
    if not are_hooks(written):  # told by validate
        return []
    found = []
    for one in written:
        node: dict[str, Any] = {"_target_": one} if isinstance(one, str) else dict(one)
        at = node.pop(AT, Hook.at)
        with suppress(RunnerError):  # told by faults()
            node.setdefault("_partial_", not inspect.isclass(locate(str(node["_target_"]))))
        found.append((node, (at,) if isinstance(at, str) else tuple(at)))
    return found
