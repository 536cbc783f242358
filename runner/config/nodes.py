"""Prepares parts of the configuration for `build()`: fills in the data's facts, and splits off our own settings."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from runner.config import validate
from runner.config.instantiate import argument_names
from runner.config.schema import Model, Optimizer
from runner.errors import Problem, RunnerError

#: what every model and every optimizer has beside its target's arguments, as conf/base.yaml has it: a target with an
#: argument of the same name gets that argument instead, when it is not as it is here
SHARED: dict[str, tuple[type, dict[str, Any]]] = {
    "model": (Model, {"weights": None, "strict": True, "freeze": []}),
    "optimizer": (Optimizer, {"groups": [], "no_decay": None, "turns": None}),
}


def resolved(cfg: DictConfig, key: str) -> dict[str, Any]:
    """The node with its ${...} filled in. Raises: RunnerError for a fact that this data does not tell."""
    try:
        return validate.target_node(cfg, key, resolve=True)
    except OmegaConfBaseException as error:
        told = {str(name): cfg.facts[name] for name in cfg.facts if not OmegaConf.is_missing(cfg.facts, name)}
        facts = {name: value for name, value in told.items() if value is not None}
        wanted = re.search(r"facts\.(\w+)", str(error))
        name = wanted[1] if wanted else "such fact"
        problem = (
            f"this data tells no {name}; it tells {', '.join(f'{known}={value}' for known, value in facts.items())}"
        )
        asking = [word for word, said in validate.target_node(cfg, key).items() if said == f"${{facts.{name}}}"]
        fix = f"{key}.{asking[0]}=..." if asking else f"the value itself instead of ${{facts.{name}}} in {key}"
        if key == "model" and facts.get("vocab_size"):
            fix = f"model=gpt, model=transformer, model=gru or model=lstm, which take tokens, or {fix}"
        raise RunnerError(Problem(f"{key}={cfg[key].get('_target_')}", problem, fix)) from None


def split_settings(node: dict[str, Any], key: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A node as its target takes it, and our settings beside it."""
    usual = SHARED[key][1] if key in SHARED else {}
    taken = set(usual) & argument_names(node) if usual else set()
    own = {name: value for name, value in node.items() if name not in usual or (name in taken and value != usual[name])}
    return own, {name: node.get(name, value) for name, value in usual.items() if name not in taken}


def fill_facts(cfg: DictConfig, facts: dict[str, Any]) -> None:
    """What the person set stays; the rest comes from the data."""
    for key in cfg.facts:
        if OmegaConf.is_missing(cfg.facts, key) and key in facts:
            cfg.facts[key] = facts[key]


def leave_out_unknown_facts(cfg: DictConfig, key: str) -> None:
    """Takes out the arguments that say ${facts....} of what this data does not tell: a task has defaults for them."""
    for name in list(cfg[key]):
        try:
            cfg[key][name]
        except InterpolationToMissingValueError:
            with open_dict(cfg[key]):
                del cfg[key][name]  # pop() would fill it in first
