"""Records what a run was made with: the current directory's commit and changes, installed packages, the user's files.

reporter.py and `export` write it; `reproduce`, `diff` and `try` compare it.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from runner.errors import without_password
from runner.version import __version__

NOTE = "mlflow.note.content"  # the tag that MLflow shows as a run's description, in Markdown
#: the sweeps of `try`: `last` never means one of these
TRIES = Path("multirun/tries")


#: names of files with credentials; credentials by their form; assignments that look like one outside of code
CREDENTIAL_FILES = re.compile(
    r"(?i)(^|/)(\.env|\.netrc|\.pypirc|\.npmrc|id_(rsa|dsa|ecdsa|ed25519)|[^/]*(credential|secret)[^/]*)(\.[^/]*)?$"
    r"|\.(pem|key|p12|pfx|jks|keystore)$"
)
CREDENTIALS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(AKIA[0-9A-Z]{16}|(ghp|gho|glpat|hf|xox[bp])[_-]\w{16,})")
ASSIGNED = re.compile(
    r"(?im)^[ +-].*(api_?key|access_?key|secret(_?key)?|token|passw(or)?d|pwd)[\"']?\s*[:=]\s*[\"']?(?![\d.]+\b|[$<])[^\s\"']{6,}"
)


@dataclass(frozen=True)
class Git:
    commit: str
    dirty: bool
    diff: str  # against the commit; empty when clean
    branch: str | None = None  # None: no branch is checked out


def git_state() -> Git | None:
    """Return the current directory's commit and its uncommitted changes; None outside a repository. Takes 20 ms."""
    commit = run_git("rev-parse", "HEAD")
    if commit is None:
        return None
    head, _, changed = (run_git("status", "--porcelain", "--branch", "--untracked-files=no") or "").partition("\n")
    branch = head.removeprefix("## ").partition("...")[0]
    diff = (run_git("diff", "HEAD") or "") if changed else ""
    return Git(commit.strip(), bool(changed), diff, branch if " " not in branch else None)


def remote() -> str | None:
    """Return the URL of the remote `origin` without credentials, or None."""
    url = (run_git("config", "--get", "remote.origin.url") or "").strip()
    return re.sub(r"://[^/@]*@", "://", url) or None


def diff_without_secrets(diff: str, uri: str = "") -> str:
    """Return a diff without secrets. Files that look like credentials, by name or content, are replaced by a comment."""
    head, *files = re.split(r"(?m)^(?=diff --git )", diff)
    return without_password(head + "".join(map(_without_credentials, files)), uri)


def _without_credentials(diff: str) -> str:
    title, _, body = diff.partition("\n")
    name = title.rpartition(" b/")[2].strip('"')
    is_code = name.endswith(".py")
    if CREDENTIAL_FILES.search(name) or CREDENTIALS.search(body) or (not is_code and ASSIGNED.search(body)):
        return f"# {name} is left out: it looks like credentials\n"
    return diff


def digest(text: bytes) -> str:
    """Return the first 16 hex digits of a SHA-256."""
    return hashlib.sha256(text).hexdigest()[:16]


#: the distributions that affect a run's results
DECIDING = ("torch", "numpy", "hydra-core", "omegaconf", "mlflow", "scikit-learn")


def versions() -> dict[str, str]:
    """Return the versions of Python, this program and the packages that affect results."""
    installed = {name: _version(name) for name in DECIDING}
    return {"python": platform.python_version(), "runner": __version__, **installed}


@functools.cache
def environment() -> str:
    """Return the text of environment.txt: Python, the platform and every installed distribution. Takes 20 ms."""
    installed = {f"{name}=={version}" for name, version in map(_named, metadata.distributions())}
    head = [f"python=={platform.python_version()}", f"# {platform.platform()}"]
    return "\n".join([*head, *sorted(installed, key=str.lower)]) + "\n"


def _named(item: metadata.Distribution) -> tuple[str, str]:
    head = (item.read_text("METADATA") or item.read_text("PKG-INFO") or "").partition("\n\n")[0].splitlines()
    fields = dict(line.split(": ", 1) for line in reversed(head) if line.startswith(("Name: ", "Version: ")))
    if len(fields) == 2:
        return fields["Name"].strip(), fields["Version"].strip()
    return str(item.metadata["Name"]), item.version


#: the note with the number of jobs of a sweep that were trained together
TOGETHER = "together"


def noted(notes: Mapping[str, str]) -> str:
    """Format notes for the end of environment.txt: the machine, the threads, the digests of the user's files."""
    return "".join(f"# {name}: {value}\n" for name, value in notes.items())


def packages(environment: str) -> dict[str, str]:
    """Return the versions in an environment.txt by distribution; names are in lower case with dashes."""
    pairs = [line.partition("==") for line in environment.splitlines() if "==" in line and not line.startswith("#")]
    return {name.strip().lower().replace("_", "-"): version.strip() for name, _, version in pairs}


def notes(environment: str) -> dict[str, str]:
    """Return the notes in an environment.txt by name; the first one is the `platform`."""
    lines = [line.removeprefix("#").strip() for line in environment.splitlines() if line.startswith("#")]
    pairs = (line.partition(": ") for line in lines[1:])
    return {**({"platform": lines[0]} if lines else {}), **{name: value for name, colon, value in pairs if colon}}


def fingerprints(files: Iterable[str]) -> dict[str, str]:
    """Return the digests of files in the current directory by path; unreadable files are left out."""
    digests = {}
    for name in files:
        try:
            digests[name] = digest(Path(name).read_bytes())
        except OSError:
            continue
    return digests


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def run_git(*arguments: str) -> str | None:
    """Return what git prints; None without git, or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def user_tags(cfg: DictConfig) -> dict[str, str]:
    """Return the tags of `tracking.tags` by name; those of a list have the value `true`."""
    tags = OmegaConf.to_container(cfg.tracking.tags, resolve=True) if cfg.tracking.tags else {}
    named = tags if isinstance(tags, dict) else dict.fromkeys(tags or (), True)
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in named.items()}
    return {str(name): without_password(text) for name, text in texts.items()}


def described(cfg: DictConfig, note: str) -> str:
    """Return the user's description, followed by the note of the run or the sweep."""
    return "\n\n".join(filter(None, (without_password(cfg.tracking.description or ""), note)))
