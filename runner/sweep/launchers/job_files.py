"""Pack a job's directory and environment variables for another machine, and unpack the directory that comes back.

Called in the sweep's process by ray.py, and on the job's machine by ray_worker.py.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path


def variables_of(config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the job needs: those in its YAML, the runner's and MLflow's."""
    named = set(re.findall(r"\$\{oc\.env:\s*([A-Za-z_]\w*)", config))
    return {
        name: value for name, value in environment.items() if name in named or name.startswith(("RUNNER_", "MLFLOW_"))
    }


def pack(folder: Path) -> bytes:
    """Return all files below the directory, compressed; b"" if it does not exist. Uses twice its size in memory."""
    if not folder.is_dir():
        return b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def unpack(job_files: bytes, folder: Path) -> None:
    """Write the files to the directory, each atomically; other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if not job_files:
        return
    with tarfile.open(fileobj=io.BytesIO(job_files), mode="r:gz") as archive:
        for member in archive:
            path = folder / member.name
            if not path.parent.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{member.name} would lie outside of the job's folder")
            content = archive.extractfile(member) if member.isfile() else None  # extract() has a filter from 3.11.4 on
            if content is None:
                raise ValueError(f"{member.name} is no file, and a job's folder sends files alone")
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f"{path.name}.arriving")
            with beside.open("wb") as file:
                shutil.copyfileobj(content, file)
            os.utime(beside, (member.mtime, member.mtime))
            beside.replace(path)
