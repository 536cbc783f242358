"""Signs a run's folder, and tells whether this person made it, as it is, and to which store it was tracked.

What a run is run again from (rerun.yaml, model.json) and its store are signed with a key that lies among the person's own
settings. Who has the folder and not the key can't sign what he puts there. The folder may be moved and copied; it stays its
maker's wherever that key is: in a home that machines share, or where XDG_STATE_HOME leads. Elsewhere it is a stranger's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from runner.config import run_files

FILE = "journal/origin.json"  # in the folder of a run or of a sweep
SIGNED = ("rerun.yaml", "model.json")
KEY_BYTES = 32


def sign(folder: Path, store: str) -> None:
    """Says in the folder that this person made it. store: as it may be shown; "" where nothing is tracked.

    Never raises: without a place for a key, or on a full disk, it counts as a stranger's folder afterwards.
    """
    with suppress(OSError, RuntimeError, ValueError):
        signed = {"store": store, "signature": _signature(folder, store, _key())}
        run_files.write_whole(folder / FILE, json.dumps(signed) + "\n")


def store_of(folder: Path) -> str | None:
    """The store that the run was tracked to, as it may be shown; "" for none. None: the folder is not this person's."""
    try:
        found = run_files.read_json(folder / FILE)
        store, signature = str(found["store"]), str(found["signature"])
        return store if hmac.compare_digest(signature, _signature(folder, store, _key())) else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def is_own(folder: Path) -> bool:
    """Whether this person made it, and nobody else has changed it since."""
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
    """The person's key, made when it is first asked for. Raises: OSError, RuntimeError without a home, ValueError."""
    file = _place() / "key"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=file.parent)  # for this account alone
        with os.fdopen(handle, "wb") as stream:
            stream.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(name, file)  # of several that make one at a time the first one counts
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            Path(name).replace(file)
        Path(name).unlink(missing_ok=True)
    key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise ValueError(f"{file} is no key")
    return key


def _place() -> Path:
    """Where this person's programs keep what is theirs, by the system's custom. Raises: RuntimeError without a home."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData/Local") / "runner"
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".local/state") / "runner"  # XDG ignores relative paths
