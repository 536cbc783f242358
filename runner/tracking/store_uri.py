"""A tracking URI: where its store lies, and how it may be shown. No password leaves this module."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from runner.errors import without_password

_SQLITE = re.compile(r"^(sqlite(?:\+\w+)?:///)([^?]+)(\?.*)?$")


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of a sqlite store's file; None for every other store, and for one in memory."""
    match = _SQLITE.match(uri)
    return Path(match[2]).absolute() if match and match[2] != ":memory:" else None


def absolute(uri: str) -> str:
    """The URI with a relative sqlite path made absolute: MLflow keeps a store by its URI, and a relative one is another
    file once the process has changed its folder."""
    path = sqlite_path(uri)
    return _SQLITE.sub(lambda match: f"{match[1]}{path}{match[3] or ''}", uri) if path else uri


def shown(uri: str) -> str:
    """The URI as it is shown and stored: without credentials, a relative sqlite path made absolute."""
    return without_password(absolute(uri), uri)


def masker(uri: str) -> Callable[[str], str]:
    """A function that hides the secrets of this URI, and all others, in a text."""
    return functools.partial(without_password, uri=uri)


def artifact_root(uri: str) -> str | None:
    """Where a sqlite store's artifacts go: mlartifacts/ beside the database. None: the server decides."""
    path = sqlite_path(uri)
    return (path.parent / "mlartifacts").as_uri() if path else None


def creation_lock(path: Path) -> Path:
    """The file to lock while a sqlite store is created; each account has its own, as they can't open each other's."""
    account = os.getuid() if hasattr(os, "getuid") else "all"
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"runner-store-{account}-{digest}.lock"
