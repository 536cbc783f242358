"""Packs a job's folder and the variables that it needs for another machine, and unpacks the folder that comes back.

Called in the sweep's process by ray.py, and on the machine of the job by ray_worker.py.
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
    """The variables of this machine's environment that the job needs: those its YAML names, the runner's and MLflow's."""
    named = set(re.findall(r"\$\{oc\.env:\s*([A-Za-z_]\w*)", config))
    return {
        name: value for name, value in environment.items() if name in named or name.startswith(("RUNNER_", "MLFLOW_"))
    }


def pack(folder: Path) -> bytes:
    """Every file below the folder, compressed; b"" for a folder that is not there. Takes its size in memory, twice."""
    if not folder.is_dir():
        return b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                archive.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def unpack(job_files: bytes, folder: Path) -> None:
    """Puts the files into the folder, each whole or not at all, over those that are there; leaves all others alone."""
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
