"""Put points into batches, and find the ones that a store refuses by halving a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from runner.tracking.journal_records import Points, Record
from runner.tracking.mlflow_names import Names
from runner.tracking.mlflow_store import is_refusal

T = TypeVar("T")
MOST_READ = 200_000  # points of the journal between two acknowledgements, however few of them are sent


def send_in_halves(send: Callable[[Sequence[T]], None], items: Sequence[T]) -> list[tuple[T, str]]:
    """Send `items` in one call and, where the store refuses them, in halves.

    Returns:
        The items that the store refuses one by one, and the reason of each.

    Raises:
        Exception: any other error. Some items may be stored then, and sending them again must be harmless.
    """
    reason = _refusal(send, items) if items else None
    if reason is None:
        return []
    if len(items) == 1:
        return [(items[0], reason)]
    middle = len(items) // 2
    return send_in_halves(send, items[:middle]) + send_in_halves(send, items[middle:])


def _refusal(send: Callable[[Sequence[T]], None], items: Sequence[T]) -> str | None:
    try:
        send(items)
    except Exception as error:
        if not is_refusal(error):
            raise
        return str(error)
    return None


def grouped(
    records: Iterable[Record], *, most: int, size: Callable[[Record], int] = lambda record: record.num_points
) -> Iterator[list[Record]]:
    """Group consecutive records of points, up to `most` points to send and MOST_READ points read; yield other records alone.

    size: About how many points of a record are sent.
    """
    group: list[Record] = []
    num_points = num_read = 0
    for record in records:
        is_points = isinstance(record.data, Points)
        if group and (not is_points or num_points + size(record) > most or num_read > MOST_READ):
            yield group
            group, num_points, num_read = [], 0, 0
        if is_points:
            group.append(record)
            num_points += size(record)
            num_read += record.num_points
        else:
            yield [record]
    if group:
        yield group


def as_metrics(chosen: Iterable[tuple[str, int, int, float]], names: Names) -> list[Any]:
    """Return points (name, time, step, value) as MLflow's entities. names: of the journal up to there."""
    from mlflow.entities import Metric

    return [Metric(names.key(name), value, time_ms, step) for name, time_ms, step, value in chosen]


def to_metrics(records: Iterable[Record], names: Names) -> list[Any]:
    """Return the points in `records` as MLflow's entities, each with its time. names: of the journal up to there."""
    from mlflow.entities import Metric

    metrics = []
    for record in records:
        if isinstance(record.data, Points):
            rows = record.data
            keys = [names.key(name) for name in rows.names]
            for step, time_ms, values in zip(
                rows.steps.tolist(), rows.times_ms.tolist(), rows.values.tolist(), strict=True
            ):
                metrics += [Metric(key, value, time_ms, step) for key, value in zip(keys, values, strict=True)]
    return metrics
