"""Signs a run directory, and checks whether this user made it, unchanged, and to which store it was tracked.

A key in the user's home (or XDG_STATE_HOME) signs rerun.yaml, model.json and the store. A directory that is moved or copied
stays the user's wherever the key is; without the key it is untrusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from runner.config import run_files

FILE = "journal/origin.json"  # in the folder of a run or of a sweep
SIGNED = ("rerun.yaml", "model.json")
KEY_BYTES = 32


def sign(folder: Path, store: str) -> None:
    """Sign a directory. Never raises: without a key, or on a full disk, it is untrusted afterwards.

    store: Without credentials; "" where nothing is tracked.
    """
    with suppress(OSError, RuntimeError, ValueError):
        signed = {"store": store, "signature": _signature(folder, store, _key())}
        run_files.write_whole(folder / FILE, json.dumps(signed) + "\n")


def store_of(folder: Path) -> str | None:
    """Return the store of a run without credentials, "" for none, or None if the directory is not this user's."""
    try:
        signed = run_files.read_json(folder / FILE)
        store, signature = str(signed["store"]), str(signed["signature"])
        return store if hmac.compare_digest(signature, _signature(folder, store, _key())) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def is_own(folder: Path) -> bool:
    """Return whether this user made a directory, and it is unchanged."""
    return store_of(folder) is not None


def _signature(folder: Path, store: str, key: bytes) -> str:
    parts = [store]
    for name in SIGNED:
        try:
            parts.append(hashlib.sha256(run_files.read(folder / name).encode()).hexdigest())
        except FileNotFoundError:
            parts.append("")
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()


def _key() -> bytes:
    file = _folder() / "key"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=file.parent)  # readable by this account only
        with os.fdopen(handle, "wb") as stream:
            stream.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(name, file)  # the first of several processes wins
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            Path(name).replace(file)
        Path(name).unlink(missing_ok=True)
    key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{file} has no key")
    return key


def _folder() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "runner"  # XDG ignores relative paths
