"""A configuration that came from a store goes in; what may be run of it comes out: it is data there, and no code.

Whoever can write to a store can write any rerun.yaml there. So its targets are the runner's own and torch's alone, it
draws in no other file and sets nothing of Hydra's, and its values come from itself: `${oc.env:...}` would put a
password into what is tracked, and `${oc.decode:...}` a target where nobody sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from runner.errors import Fault, RunnerError
from runner.targets import locate

DEFAULTS = ["schema", "base", "_self_"]
#: the one resolver of the built-in conf/
OWN_RESOLVERS = ("${oc.env:MLFLOW_TRACKING_URI,sqlite:///mlflow.db}",)


def cleared(text: str, *, asked: str, look: str, trusted: bool) -> str:
    """The configuration, written anew. Imports the modules of allowed targets, and no other.

    look: how a person gets the file to look at it. trusted: it was looked at, and may name what a person's own may.
    Raises: RunnerError for each thing in it that is not allowed.
    """
    try:
        node = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:  # YAML's and OmegaConf's own
        so = f"its rerun.yaml can't be read: {str(error).splitlines()[0]}"
        raise RunnerError(Fault(asked, so, "a run that this runner has tracked")) from None
    if not isinstance(node, dict) or node.get("defaults") != DEFAULTS or "hydra" in node:
        so = "its rerun.yaml is not as the runner writes it: it draws in other files, or sets Hydra's own keys"
        raise RunnerError(Fault(asked, so, f"a run that is as it was written; {look} shows the file"))
    write = f"--trust, when you have looked at the file: {look}"
    if not trusted and (found := list(_faults(node, "", write))):
        raise RunnerError(*found)
    del node["defaults"]
    return f"defaults: [{', '.join(DEFAULTS)}]\n{OmegaConf.to_yaml(OmegaConf.create(node))}"


def _faults(node: Any, key: str, write: str) -> Iterator[Fault]:
    if isinstance(node, dict):
        if (target := node.get("_target_")) is not None and (why := _refusal(str(target))):
            yield Fault(f"{key}._target_={target}", why, write)
        for name, child in node.items():
            yield from _faults(child, f"{key}.{name}" if key else str(name), write)
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _faults(child, f"{key}[{index}]", write)
    elif isinstance(node, str) and "${" in node and ":" in node and node not in OWN_RESOLVERS:
        yield Fault(
            f"{key}={node}", "this configuration came from a store, and may not read what lies outside it", write
        )


def _refusal(target: str) -> str:
    try:
        locate(target, own_code=False)
    except RunnerError:
        return "this configuration came from a store, and names code that is neither the runner's nor torch's"
    return ""
