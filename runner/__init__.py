"""PyTorch experiments from YAML, on the device you name, tracked: `python -m runner`, or `run([...])` in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.version import __version__

if TYPE_CHECKING:
    import pandas

    from runner.cli.notebook import Result

__all__ = ["__version__", "history", "run"]


def run(overrides: Sequence[str] = (), *, config_name: str = "config", folder: Path | str | None = None) -> Result:
    """Runs what `overrides` describe, as `python -m runner OVERRIDES` would.

    overrides: KEY=VALUE, and --allow PACKAGE; `model._target_=__main__.Net` is a class that a cell defines.
    folder: where the run's files go (None: outputs/DATE/TIME, as on the command line).
    Returns: a dict of what summary.json holds, with the run's `folder` and its `history`, a DataFrame of all points; as a
        cell's last line it shows the picture of the loss.
    Raises: RunnerError for a mistake in the configuration, KeyboardInterrupt once an interrupted run has saved where it
        stands; a training that fails says so in the summary's `status`.
    """
    from runner import cli  # heavy packages are loaded only when something runs

    return cli.run(list(overrides), config_name=config_name, folder=None if folder is None else Path(folder))


def history(run: Path | str, *, uri: str | None = None) -> pandas.DataFrame:
    """All points of a run, which may be running: a row a step, a column a metric, NaN where a metric has no value at a step.

    run: a folder, `last`, or an id in MLflow. uri: of the store that has it, where its folder is elsewhere.
    Raises: RunnerError where there is no such run.
    """
    from runner.runs import history as reading
    from runner.tracking import stores

    return reading.table(reading.history(str(run), uri=uri or stores.named([]) or stores.USUAL))
