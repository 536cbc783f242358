"""Tracking URIs: the file of a store, and the URI without its password."""

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
    """Return the absolute path of a sqlite store's file; None for other stores and one in memory."""
    match = _SQLITE.match(uri)
    return Path(match[2]).absolute() if match and match[2] != ":memory:" else None


def absolute(uri: str) -> str:
    """Return the URI with an absolute sqlite path, as the process may change its directory."""
    path = sqlite_path(uri)
    return _SQLITE.sub(lambda match: f"{match[1]}{path}{match[3] or ''}", uri) if path else uri


def shown(uri: str) -> str:
    """Return the URI to show and store: without credentials, and with an absolute sqlite path."""
    return without_password(absolute(uri), uri)


def masker(uri: str) -> Callable[[str], str]:
    """Return a function that hides the secrets of this URI, and all others, in a text."""
    return functools.partial(without_password, uri=uri)


def artifact_root(uri: str) -> str | None:
    """Return the artifact root of a sqlite store, mlartifacts/ next to the database; None: the server decides."""
    path = sqlite_path(uri)
    return (path.parent / "mlartifacts").as_uri() if path else None


def creation_lock(path: Path) -> Path:
    """Return the lock file for creating a sqlite store; one per user, as they can't open each other's files."""
    account = os.getuid() if hasattr(os, "getuid") else "all"
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"runner-store-{account}-{digest}.lock"
