"""Hides the secrets of a configuration: credentials in URIs, and values of the environment.

`runner.errors.without_password` hides them in a text. A value from `${oc.env:NAME}` is shown as <oc.env:NAME>, also where
another value refers to it. Numbers and booleans from the environment are shown, and the names of the run and its experiment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from omegaconf import DictConfig, OmegaConf, resolvers
from omegaconf.errors import OmegaConfBaseException

from runner.errors import SECRETS, Problem, credentials, without_credentials, without_password

ENVIRONMENT = "oc.env"
OPEN = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME")  # that say where a run is tracked
STORE = "tracking.uri"
NOTIFY = "notify"  # with an address that is a secret as a whole
#: where a stored text had a secret
HIDDEN = re.compile(r"(?<=[:/])\*\*\*(?=@)|(?<==)\*\*\*(?=&|'|$)")
#: the beginnings of the URIs that MLflow has a store for
STORES = "sqlite:///|sqlite://$|https?://|postgresql|mysql|mssql|databricks"
_SHOWN = re.compile(rf"<{re.escape(ENVIRONMENT)}:([^<>]+)>")
#: a store's URI, or what brings its beginning, and what follows its host
_URI = re.compile(
    rf"(?:{_SHOWN.pattern}|(?P<scheme>[^:/?#<]+)://(?P<user>[^/?#]*@)?(?P<host>[^/?#]*))(?P<rest>.*)", re.DOTALL
)


def for_disk(cfg: DictConfig, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the configuration as a run stores it: with its references, without secrets.

    A store with credentials is read from MLFLOW_TRACKING_URI the next time.

    Args:
        cfg: The composed configuration.
        without: Top-level keys to leave out.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    plain.pop(NOTIFY, None)
    hide = {"hydra": without_password}.get  # with the command line in it
    stored = {key: _mapped(node, hide(key, without_credentials)) for key, node in plain.items() if key not in without}
    uri = plain.get("tracking", {}).get("uri")
    if (left := stored.get("tracking", {}).get("uri")) != uri:
        quoted = str(left).replace("\\", "\\\\").replace("'", "\\'")
        stored["tracking"]["uri"] = f"${{oc.env:MLFLOW_TRACKING_URI,'{quoted}'}}"
    return stored


def for_display(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved values without secrets."""
    real = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
    written = OmegaConf.to_container(cfg, resolve=False, throw_on_missing=False)
    with _unread_environment():
        shown: dict[str, Any] = _walk(cfg, written, real)
    shown.pop(NOTIFY, None)
    return shown


def filled_in(node: Any) -> Any:
    """Return the values of for_display() with the present environment. Raises: KeyError for a missing variable."""
    return _mapped(node, lambda text: _SHOWN.sub(lambda match: os.environ[match[1]], text))


def note_secrets(uri: str) -> None:
    """Hide the secrets of a store's URI from now on, in this process and in those that it starts; the caller restores `SECRETS`.

    A password that is a word or a number is hidden only within the URI: it may be in any text.

    Args:
        uri: With <oc.env:NAME> for the parts from the environment.
    """
    match = _URI.fullmatch(uri)
    is_file = match is not None and match["scheme"] and not (match["host"] or match["user"])
    names = set() if match is None or is_file else {*_SHOWN.findall((match["user"] or "") + match["rest"])}
    secret_words = {each for each in credentials(uri) if not re.fullmatch(r"[A-Z]?[a-z]*|[\d.]+", each)}
    _note(names | {f"={quote(secret, safe='')}" for secret in secret_words})


def _note(entries: set[str]) -> None:
    if every := {*filter(None, os.environ.get(SECRETS, "").split(","))} | entries:
        os.environ[SECRETS] = ",".join(sorted(every))


def note_secrets_of(cfg: DictConfig) -> None:
    """Hide the secrets of a configuration, as note_secrets() does."""
    note_secrets(shown_uri(cfg))
    if url := _selected(cfg, f"{NOTIFY}.url"):
        _note({f"={quote(str(url), safe='')}"})


def note_secrets_in(overrides: Iterable[str]) -> None:
    """Hide the secrets that overrides set, before they are parsed, as note_secrets() does."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        value = re.sub(r"""^["'\\]+|["'\\]+$""", "", value)
        if key == STORE:
            note_secrets(value)
        elif key == f"{NOTIFY}.url" and value:
            _note({f"={quote(value, safe='')}"})


def shown_uri(cfg: DictConfig) -> str:
    """The store's URI with <oc.env:NAME> for the parts from the environment; "" where it can't be resolved."""
    with _unread_environment():
        return str(_selected(cfg, STORE) or "")


def mask_folder(folder: Path, cfg: DictConfig) -> None:
    """Hide the secrets of a run from now on, and those that Hydra has written into its .hydra/*.yaml."""
    note_secrets_of(cfg)
    uri = str(_selected(cfg, STORE) or "")
    for file in sorted((folder / ".hydra").glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        if (masked := without_password(text, uri)) != text:
            file.write_text(masked, encoding="utf-8")


def _selected(cfg: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(cfg, key)
    except (OmegaConfBaseException, AttributeError):  # reported where the configuration is checked
        return None


def _mapped(node: Any, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {key: _mapped(child, change) for key, child in node.items()}
    if isinstance(node, list):
        return [_mapped(child, change) for child in node]
    return change(node) if isinstance(node, str) else node


def _walk(node: Any, written: Any, real: Any) -> Any:

    def below(key: Any, child: Any) -> Any:
        text = written[key] if type(written) is type(real) else written  # else a reference to all of it
        if "${" not in repr(text):  # most values: OmegaConf takes 60 us to look one up
            return _mapped(child, without_password)
        return _walk(_child(node, key), text, child)

    if isinstance(real, dict):
        return {key: below(key, child) for key, child in real.items()}
    if isinstance(real, list):
        return [below(index, child) for index, child in enumerate(real)]
    return without_password(str(node)) if isinstance(real, str) else real


def _child(node: Any, key: Any) -> Any:
    if not OmegaConf.is_config(node):
        return node
    try:
        return node[key]
    except OmegaConfBaseException:
        return str(node._get_node(key)._value())


@contextmanager
def _unread_environment() -> Iterator[None]:

    def itself(name: str, *default: Any) -> Any:
        is_open = name not in os.environ or name in OPEN
        return resolvers.oc.env(name, *default) if is_open else f"<{ENVIRONMENT}:{name}>"

    OmegaConf.register_new_resolver(ENVIRONMENT, itself, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver(ENVIRONMENT, resolvers.oc.env, replace=True)


def uri_problems(uri: str) -> list[Problem]:
    """Return the error of a URI that MLflow has no store for."""
    typed = f"tracking.uri={without_password(uri)}"
    if HIDDEN.search(uri):
        fix = f"use `{HIDDEN.sub('PASSWORD', typed)}`, or export MLFLOW_TRACKING_URI with it"
        return [Problem(typed, "a run directory stores no credentials", fix, code="secret")]
    if re.match(STORES, uri):
        return []
    problem = "MLflow has no such store: it keeps runs on a server, or in a database such as sqlite:///PATH"
    return [Problem.suggest(typed, problem, ["tracking.uri=sqlite:///mlflow.db", "tracking.uri=http://127.0.0.1:5000"])]
