"""PyTorch experiments from YAML, on the device you name, tracked: `python -m runner`, or `run([...])` in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.version import __version__

__all__ = ["__version__", "run"]


def run(
    overrides: Sequence[str] = (), *, config_name: str = "config", folder: Path | str | None = None
) -> dict[str, Any]:
    """Runs what `overrides` describe, as `python -m runner OVERRIDES` would, and returns what summary.json holds.

    folder: where the run's files go (None: outputs/DATE/TIME, as on the command line).
    Raises: RunnerError for a mistake in the configuration; a training that fails says so in the summary's `status`.
    """
    from runner import cli  # heavy rooms load only when something runs

    return cli.run(list(overrides), config_name=config_name, folder=None if folder is None else Path(folder))
