"""Finds what a run was made with: the commit of the current folder and its changes, what is installed, a person's own files.

For the run's record (run_record.py), `export`, and `reproduce`, `diff` and `try`, which compare.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from runner.version import __version__

#: what a person's code ends with, and where runs leave files that end so
CODE = (".py", ".yaml", ".yml")
OF_RUNS = (("outputs",), ("multirun",))
#: the sweeps that `try` begins by itself: `last` means none of them
TRIES = Path("multirun/tries")


@dataclass(frozen=True)
class Git:
    commit: str
    dirty: bool
    diff: str  # against the commit; empty when clean


def git_state() -> Git | None:
    """The commit that the current folder is at and what differs from it; None outside a repository. About 20 ms."""
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no") or ""
    return Git(commit.strip(), bool(changed.strip()), (_git("diff", "HEAD") or "") if changed.strip() else "")


def code() -> dict[str, str | None]:
    """What tells this folder's code from another state of it: the commit, a digest of what differs from it, and one of the
    person's files that git does not follow. None for what is not there."""
    git = git_state()
    root = Path.cwd()
    listed = _git("ls-files", "--others", "--exclude-standard", "-z") if git is not None else None
    names = (
        listed.split("\0") if listed is not None else [*map(str, root.glob("*.py")), *map(str, root.glob("conf/**/*"))]
    )
    own = [root / name for name in sorted(names) if name.endswith(CODE) and Path(name).parts[:1] not in OF_RUNS]
    texts = [f"{path.relative_to(root)}\0".encode() + path.read_bytes() for path in own if path.is_file()]
    return {
        "git_commit": git.commit if git is not None else None,
        "diff": digest(git.diff.encode()) if git is not None and git.diff else None,
        "files": digest(b"\0".join(texts)) if texts else None,
    }


def digest(text: bytes) -> str:
    """Of a file or a diff; short enough to be read aloud."""
    return hashlib.sha256(text).hexdigest()[:16]


#: the distributions that decide a run's numbers
DECIDING = ("torch", "numpy", "hydra-core", "omegaconf", "mlflow", "scikit-learn")


def versions() -> dict[str, str]:
    """The versions that decide a run's numbers."""
    found = {name: _version(name) for name in DECIDING}
    return {"python": platform.python_version(), "runner": __version__, **found}


@functools.cache
def environment() -> str:
    """Python, the platform and every installed distribution, a line each; about 20 ms."""
    found = {f"{name}=={version}" for name, version in map(_named, metadata.distributions())}
    head = [f"python=={platform.python_version()}", f"# {platform.platform()}"]
    return "\n".join([*head, *sorted(found, key=str.lower)]) + "\n"


def _named(item: metadata.Distribution) -> tuple[str, str]:
    """Its name and version by the first lines of its file: parsing 150 whole files takes 0.1 s before the first step."""
    head = (item.read_text("METADATA") or item.read_text("PKG-INFO") or "").partition("\n\n")[0].splitlines()
    fields = dict(line.split(": ", 1) for line in reversed(head) if line.startswith(("Name: ", "Version: ")))
    if len(fields) == 2:
        return fields["Name"].strip(), fields["Version"].strip()
    return str(item.metadata["Name"]), item.version


#: of such notes, how many jobs of a sweep took each step together; without it the run did by itself
TOGETHER = "together"


def noted(notes: Mapping[str, str]) -> str:
    """Lines behind such a text, for what nobody installs: the machine, the threads, the fingerprints of own files."""
    return "".join(f"# {name}: {value}\n" for name, value in notes.items())


def packages(environment: str) -> dict[str, str]:
    """What such a text says: versions by distribution; names in small letters, with dashes."""
    pairs = [line.partition("==") for line in environment.splitlines() if "==" in line and not line.startswith("#")]
    return {name.strip().lower().replace("_", "-"): version.strip() for name, _, version in pairs}


def notes(environment: str) -> dict[str, str]:
    """The `platform`, which is the first note of such a text, and what noted() has put behind it."""
    lines = [line.removeprefix("#").strip() for line in environment.splitlines() if line.startswith("#")]
    pairs = (line.partition(": ") for line in lines[1:])
    return {**({"platform": lines[0]} if lines else {}), **{name: value for name, found, value in pairs if found}}


def fingerprints(files: Iterable[str]) -> dict[str, str]:
    """Of those files of the current folder that can be read, by their paths from there."""
    found = {}
    for name in files:
        try:
            found[name] = digest(Path(name).read_bytes())
        except OSError:
            continue
    return found


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
