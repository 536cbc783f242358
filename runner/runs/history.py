"""Read all points of a run: from its journal, or from an MLflow store and the Parquet file there.

For `history`, runner.history() and `reproduce`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.errors import RunnerError
from runner.runs import find
from runner.runs.output_files import check_output, write_file
from runner.runs.store import open_stored
from runner.tracking.journal_reader import HISTORY, Series, pieces, read_series
from runner.tracking.mlflow_names import Names

if TYPE_CHECKING:
    import pandas
    from mlflow import MlflowClient
    from mlflow.entities import Run


def history(wanted: str, *, uri: str) -> dict[str, Series]:
    """Return a run's points as {name: (steps (n,), times_ms (n,), values (n,))}, in the order of writing.

    A million points take 0.1 s from a directory. The run may be running.

    Args:
        wanted: A directory, `last`, or an MLflow run id.
        uri: The store for an id without a run here.

    Raises:
        RunnerError: If the run does not exist.
    """
    if (folder := folder_of(wanted)) is not None:
        return read_series(folder)
    with open_stored(f"history {wanted}", wanted, uri) as (client, run):
        return of_store(client, run)


def of_store(client: MlflowClient, run: Run) -> dict[str, Series]:
    """Return the points of a run in a store by MLflow's names; from its Parquet file if the store has only a part of them.

    The file is written at the end of a run. After a resume, newer points come from the store.
    """
    series: dict[str, Series] = {}
    if any(item.path == HISTORY for item in client.list_artifacts(run.info.run_id)):
        with tempfile.TemporaryDirectory() as folder:
            series = _of_file(Path(client.download_artifacts(run.info.run_id, HISTORY, folder)))
    is_whole = run.info.status == "FINISHED"
    for name in run.data.metrics.keys() - (series.keys() if is_whole else ()):
        points = client.get_metric_history(run.info.run_id, name)  # page after page
        points.sort(key=lambda point: (point.step, point.timestamp))
        last_ms = int(series[name][1].max(initial=-1)) if name in series else -1
        columns = [(point.step, point.timestamp, point.value) for point in points if point.timestamp > last_ms]
        steps, times_ms, values = zip(*columns, strict=True) if columns else ((), (), ())
        newer = np.array(steps, np.int64), np.array(times_ms, np.int64), np.array(values, np.float64)
        before = series.get(name)
        series[name] = newer if before is None else tuple(map(np.concatenate, zip(before, newer, strict=True)))  # type: ignore[assignment]
    return series


def write(wanted: str, output: str, *, uri: str) -> dict[str, Any]:
    """Write a row per point, `metric,step,time_ms,value`, in the format of the file's ending.

    Returns:
        The path and the number of points.

    Raises:
        RunnerError: If the run does not exist, or the file can't be written.
    """
    folder = folder_of(wanted)
    file = check_output(output, inputs=(folder or Path(tempfile.gettempdir())) / "journal")
    found = pieces(folder) if folder is not None else _pieces(history(wanted, uri=uri))
    return {"output": str(file), "points": write_file(file, _rows(found))}


def summary(series: Mapping[str, Series]) -> dict[str, dict[str, Any]]:
    """Return the number of points, the first and the last, and the least and the greatest value of each metric."""
    return {
        name: {
            "points": len(steps),
            "first_step": int(steps.min()),
            "last_step": int(steps.max()),
            "first": float(values[0]),
            "last": float(values[-1]),
            "least": float(np.fmin.reduce(values)),
            "greatest": float(np.fmax.reduce(values)),
        }
        for name, (steps, _, values) in sorted(series.items())
        if len(steps)
    }


def table(series: Mapping[str, Series]) -> pandas.DataFrame:
    """Return a row per step and a column per metric, NaN without a value; imports pandas."""
    import pandas

    columns = {
        name: pandas.Series(values, steps).groupby(level=0).last() for name, (steps, _, values) in series.items()
    }
    return pandas.DataFrame(columns).rename_axis("step")


def folder_of(wanted: str) -> Path | None:
    """Return the run directory; None for the id of a run whose points are read from the store."""
    if not find.ID.fullmatch(wanted) or Path(wanted).is_dir():
        return find.locate(wanted, verb="history")
    with suppress(RunnerError):  # none here, several, or one that is refused
        return find.locate(wanted, verb="history")
    return None


def _of_file(path: Path) -> dict[str, Series]:
    from pyarrow import parquet

    frame = parquet.read_table(path)
    names, keys = np.asarray(frame["metric"].to_numpy()), Names()
    columns = [frame[key].to_numpy() for key in ("step", "time_ms", "value")]
    in_order = dict.fromkeys(names.tolist())  # of the journal
    return {keys.key(name): tuple(column[names == name] for column in columns) for name in in_order}


def _pieces(series: Mapping[str, Series]) -> Iterator[dict[str, Any]]:
    for name, columns in series.items():
        metric = np.zeros(len(columns[0]), np.int32)
        yield {"names": [name], "metric": metric, **dict(zip(("step", "time_ms", "value"), columns, strict=True))}


def _rows(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    whole, none = np.array([], np.int64), np.array([], np.float64)
    yield {"metric": np.array([], str), "step": whole, "time_ms": whole, "value": none}  # a table without points
    for columns in found:
        names = np.array(columns.pop("names"))
        yield {**columns, "metric": names[columns["metric"]]}
