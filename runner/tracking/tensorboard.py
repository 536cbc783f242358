"""The tracker of tracking.tensorboard=true: TensorBoard's event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.tracking.journal_records import Points

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class TensorBoard:
    """Writes every point, the parameters and the plots; a resumed run gets a further file. See trackers.Tracker."""

    _writer: SummaryWriter
    _last_step = 0

    def begin(self, folder: Path, start: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._writer = folder, SummaryWriter(str(folder / FOLDER))
        lines = [f"    {name}: {value}" for name, value in start["params"].items()]  # a code block of Markdown
        self._writer.add_text("parameters", "\n".join(lines))
        self._writer.flush()

    def points(self, points: Points) -> None:
        for step, time_ms, values in zip(points.steps.tolist(), points.times_ms.tolist(), points.values, strict=True):
            for name, value in zip(points.names, values.tolist(), strict=True):
                self._writer.add_scalar(name, value, step, walltime=time_ms / 1000)
            self._last_step = max(self._last_step, step)
        self._writer.flush()

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind != "artifact":
            return
        import numpy as np
        from PIL import Image

        path = self._folder / fields["path"]
        for file in sorted(path.rglob("*.png")) if path.is_dir() else [path] if path.suffix == ".png" else []:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._writer.add_image(file.stem, pixels, self._last_step, dataformats="HWC")
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.add_text("status", status, self._last_step)
        self._writer.close()
