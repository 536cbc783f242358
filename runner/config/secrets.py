"""Hides what of a configuration may not be written down: passwords, and what stood in the environment.

What a URI names before its @ is a password where a colon leads to it. What `${oc.env:NAME}` brought is shown as
<oc.env:NAME>, also in the values that refer to it; numbers and switches from the environment are shown. The names of the
run and of its experiment are used as they are: who makes them of the environment wants to read that. Of the store's URI,
which errors quote in pieces, it is hidden wherever it comes up: but for a scheme, a host and a file's path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from omegaconf import DictConfig, OmegaConf, resolvers
from omegaconf.errors import OmegaConfBaseException

from runner.errors import SECRETS, USER, without_password

ENVIRONMENT = "oc.env"
OPEN = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # that say where a run is tracked
_SHOWN = re.compile(rf"<{re.escape(ENVIRONMENT)}:([^<>]+)>")
#: a store's URI, or what brings its beginning, and what follows its host
_URI = re.compile(
    rf"(?:{_SHOWN.pattern}|(?P<scheme>[^:/?#<]+)://(?P<user>[^/?#]*@)?(?P<host>[^/?#]*))(?P<rest>.*)", re.DOTALL
)
#: a password that is written as ${...}, or shown as <oc.env:...>, is not there
_WRITTEN_AS_REFERENCE = re.compile(rf"{USER}:(\$\{{[^{{}}]*\}}|<{re.escape(ENVIRONMENT)}:[^<>]+>)+@[^@]*$", re.DOTALL)


def for_disk(cfg: DictConfig, *, without: Collection[str] = ()) -> dict[str, Any]:
    """The configuration as a run keeps it to be run again: its ${...} stay, its passwords do not.

    A store with a password is looked for in MLFLOW_TRACKING_URI the next time. without: keys that are left out.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    found = {key: _mapped(child, _without_written_password) for key, child in plain.items() if key not in without}
    uri = plain.get("tracking", {}).get("uri")
    if (left := found.get("tracking", {}).get("uri")) != uri:
        quoted = str(left).replace("\\", "\\\\").replace("'", "\\'")
        found["tracking"]["uri"] = f"${{oc.env:MLFLOW_TRACKING_URI,'{quoted}'}}"
    return found


def for_display(cfg: DictConfig) -> dict[str, Any]:
    """The resolved values as they may be shown to anybody."""
    real = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    written = OmegaConf.to_container(cfg, resolve=False, throw_on_missing=False)
    with _unread_environment():
        found: dict[str, Any] = _walk(cfg, written, real)
    return found


def filled_in(node: Any) -> Any:
    """What shown() gave, with what stands in the environment by now. Raises: KeyError for what does not."""
    return _mapped(node, lambda text: _SHOWN.sub(lambda match: os.environ[match[1]], text))


def note_secrets(uri: str) -> None:
    """Hides what the environment brought into a store's URI, in this process and in those that it starts.

    uri: with <oc.env:NAME> for what was brought. Who calls takes the variable SECRETS back.
    """
    match = _URI.fullmatch(uri)
    if match is None or (match["scheme"] and not (match["host"] or match["user"])):
        return  # a file's path
    known = filter(None, os.environ.get(SECRETS, "").split(","))
    found = {*known, *_SHOWN.findall((match["user"] or "") + match["rest"])}
    if found:
        os.environ[SECRETS] = ",".join(sorted(found))


def shown_uri(cfg: DictConfig) -> str:
    """The store's URI with <oc.env:NAME> for what the environment brings; "" where it has none that can be told."""
    with _unread_environment():
        try:
            return str(OmegaConf.select(cfg, "tracking.uri") or "")
        except (OmegaConfBaseException, AttributeError):  # told where the configuration is checked
            return ""


def mask_folder(folder: Path, uri: str) -> None:
    """Takes passwords out of what Hydra has noted in a run's folder, .hydra/*.yaml."""
    mask = masker(uri)
    for file in sorted((folder / ".hydra").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        masked = "".join(_masked_line(line, mask) for line in text.splitlines(keepends=True))
        if masked != text:
            file.write_text(masked, encoding="utf-8")


def masker(uri: str) -> Callable[[str], str]:
    """A function that takes this URI's password, and that of any other URI, out of a line."""
    match = re.search(r"://[^:/@]*:(.+)@", uri)
    secrets = sorted({match[1], unquote(match[1])} - {"", "***"}, key=len, reverse=True) if match else []

    def mask(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return without_password(text)

    return mask


def _masked_line(line: str, mask: Callable[[str], str]) -> str:
    reference = _WRITTEN_AS_REFERENCE.search(line)
    return mask(line[: reference.start()]) + reference[0] if reference else mask(line)


def _without_written_password(text: str) -> str:
    return _masked_line(text, without_password)


def _mapped(node: Any, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {key: _mapped(child, change) for key, child in node.items()}
    if isinstance(node, list):
        return [_mapped(child, change) for child in node]
    return change(node) if isinstance(node, str) else node


def _walk(node: Any, written: Any, real: Any) -> Any:
    """`real` with its texts as they are while nobody reads the environment. written: the same with its ${...}."""

    def below(key: Any, child: Any) -> Any:
        text = written[key] if type(written) is type(real) else written  # else a reference to all of it
        if "${" not in repr(text):  # most values: OmegaConf takes 60 us to look one up
            return _mapped(child, _without_written_password)
        return _walk(_child(node, key), text, child)

    if isinstance(real, dict):
        return {key: below(key, child) for key, child in real.items()}
    if isinstance(real, list):
        return [below(index, child) for index, child in enumerate(real)]
    return _without_written_password(str(node)) if isinstance(real, str) else real


def _child(node: Any, key: Any) -> Any:
    """A value as it is now; where it comes to nothing, the text of its ${...}, for all that is below it, too."""
    if not OmegaConf.is_config(node):
        return node
    try:
        return node[key]
    except OmegaConfBaseException:
        return str(node._get_node(key)._value())


@contextmanager
def _unread_environment() -> Iterator[None]:
    """${oc.env:NAME} gives its name, where there is one; where the store is has no secret but its password."""

    def itself(name: str, *default: Any) -> Any:
        is_open = name not in os.environ or name in OPEN
        return resolvers.oc.env(name, *default) if is_open else f"<{ENVIRONMENT}:{name}>"

    OmegaConf.register_new_resolver(ENVIRONMENT, itself, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(ENVIRONMENT, resolvers.oc.env, replace=True)
