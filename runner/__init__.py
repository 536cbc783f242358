"""PyTorch experiments from YAML, on the device you name, tracked: `python -m runner`, or `run([...])` in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from runner.version import __version__

if TYPE_CHECKING:
    import pandas

    from runner.cli.notebook import RunResult

__all__ = ["__version__", "history", "run"]


def run(
    overrides: str | Sequence[str] = (), *, config_name: str = "config", folder: Path | str | None = None
) -> RunResult:
    """Run what `overrides` describe, as `python -m runner OVERRIDES` would.

    Args:
        overrides: KEY=VALUE and --allow PACKAGE, in a list or as one line; `model._target_=__main__.Net` is a class
            that a cell defines.
        config_name: The main configuration, as -cn has it.
        folder: The directory of the run (None: outputs/DATE/TIME, as on the command line).

    Returns:
        A dict with the contents of summary.json, the run's `folder` and its `history`, a DataFrame of all points. As a
        cell's last line it shows the plot of the loss. A training that fails reports it in the summary's `status`.

    Raises:
        RunnerError: The configuration has an error.
        KeyboardInterrupt: The run was interrupted, and has saved a checkpoint.
    """
    from runner.cli import notebook  # heavy packages are loaded only when something runs

    path = None if folder is None else Path(folder)
    return notebook.run(overrides, config_name=config_name, folder=path)


def history(run: Path | str, *, uri: str | None = None) -> pandas.DataFrame:
    """Return all points of a run, which may be running: a row per step, a column per metric, NaN without a value.

    Args:
        run: A directory, `last`, or an MLflow run id.
        uri: The store of a run that is not here.

    Raises:
        RunnerError: An unknown run.
    """
    from runner.runs import history as reading
    from runner.tracking import stores

    return reading.table(reading.history(str(run), uri=uri or stores.named([]) or stores.USUAL))
