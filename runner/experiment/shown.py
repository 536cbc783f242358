"""What hooks show goes in; files in the run's folder come out, by the names under which MLflow's pages show them.

Called by the session in the background thread. What a run that goes on shows again takes the place of what was there.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.run_files import write_whole
from runner.tracking.journal import Journal
from runner.training.hook_values import Shown

if TYPE_CHECKING:
    from PIL import Image

IMAGES, TABLES = "images", "tables"
SMALL = 256  # pixels, of the picture that MLflow's charts show


def show(shown: Shown, folder: Path, journal: Journal, *, step: int, time_ms: int) -> None:
    """Writes each image and table, and has them sent. Raises: OSError."""
    for name, image in shown.images.items():
        for file in _write_image(folder / IMAGES, name, image, step=step, time_ms=time_ms):
            journal.event("artifact", path=f"{IMAGES}/{file.name}", to=IMAGES)
    tags = {"mlflow.loggedImages": "True"} if shown.images else {}
    for name, rows in shown.tables.items():
        file = _add_rows(folder / TABLES / f"{name.replace('/', '~')}.json", rows, step=step)
        journal.event("artifact", path=f"{TABLES}/{file.name}", to=TABLES)
    if shown.tables:
        there = [f"{TABLES}/{file.name}" for file in sorted((folder / TABLES).glob("*.json"))]
        tags["mlflow.loggedArtifacts"] = json.dumps([{"path": path, "type": "table"} for path in there])
    if tags:
        journal.event("tags", tags=tags)


def _write_image(folder: Path, name: str, image: Image.Image, *, step: int, time_ms: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    begin = f"{name.replace('/', '~')}+step+{step}+"
    before = next((file for file in sorted(folder.glob("*.png")) if file.name.startswith(begin)), None)
    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{folder.absolute()}/{begin}")
    path = before or folder / f"{begin}timestamp+{time_ms}+{unique}.png"
    small = image.copy()
    small.thumbnail((SMALL, SMALL))
    beside = path.with_name(f"{path.stem}+compressed.webp")
    image.save(path)
    small.save(beside)
    return [path, beside]


def _add_rows(path: Path, rows: list[dict[str, Any]], *, step: int) -> Path:
    """Each row with its step, as pandas' orient="split" has them; those of this step or a later one are written anew."""
    before: list[dict[str, Any]] = []
    if path.is_file():
        held = json.loads(path.read_text())
        before = [dict(zip(held["columns"], row, strict=True)) for row in held["data"]]
        before = [row for row in before if row["step"] < step]
    every = before + [{"step": step, **row} for row in rows]
    columns = list(dict.fromkeys(name for row in every for name in row))
    content = {"columns": columns, "data": [[row.get(name) for name in columns] for row in every]}
    write_whole(path, json.dumps(content))
    return path
