"""Values and one call to a store go in; what the store takes lies there, and what it refuses for good comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from runner.tracking.records import Points, Record
from runner.tracking.spelling import spell
from runner.tracking.store import is_refusal

T = TypeVar("T")


def send_in_halves(send: Callable[[Sequence[T]], None], items: Sequence[T]) -> list[tuple[T, str]]:
    """Sends `items` in one call; where the store refuses, in halves, down to what it refuses. Returns that and why.

    Raises: what is no refusal; then some items may be stored, and sending them again must be harmless.
    """
    try:
        send(items)
    except Exception as error:
        if not is_refusal(error):
            raise
        if len(items) == 1:
            return [(items[0], str(error))]
        middle = len(items) // 2
        return send_in_halves(send, items[:middle]) + send_in_halves(send, items[middle:])
    return []


def grouped(records: Iterable[Record], *, most: int) -> Iterator[list[Record]]:
    """Neighbouring records of points together, up to `most` points; every other record by itself."""
    group: list[Record] = []
    num_points = 0
    for record in records:
        is_points = isinstance(record.data, Points)
        if group and (not is_points or num_points + record.num_points > most):
            yield group
            group, num_points = [], 0
        if is_points:
            group.append(record)
            num_points += record.num_points
        else:
            yield [record]
    if group:
        yield group


def to_metrics(records: Iterable[Record]) -> list[Any]:
    """The points in `records` as MLflow's entities, each with its own time: the same records give the same bytes."""
    from mlflow.entities import Metric

    metrics = []
    for record in records:
        if isinstance(record.data, Points):
            rows = record.data
            keys = [spell(name) for name in rows.names]
            for step, time_ms, values in zip(
                rows.steps.tolist(), rows.times_ms.tolist(), rows.values.tolist(), strict=True
            ):
                metrics += [Metric(key, value, time_ms, step) for key, value in zip(keys, values, strict=True)]
    return metrics
