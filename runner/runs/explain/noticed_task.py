"""A run's task, with a word to whoever watches a step: when it begins and ends, and at once where its loss is not finite."""

from __future__ import annotations

from typing import Any

from runner.inspection.not_finite import Record, Watch


class LossNotFiniteError(Exception):
    """Ends a watched step before its backward pass, so that the weights stay what they were."""

    def __init__(self, record: Record, value: float) -> None:
        super().__init__()
        self.record, self.value = record, value


class NoticedTask:
    """In the task's place; `watch` is set for the step that is watched. Keeps the batches that it was given then."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.watch: Watch | None = None
        self.batches: list[Any] = []

    def __call__(self, model: Any, batch: Any, **turn: Any) -> Any:
        """Raises: LossNotFiniteError, in a step that is watched."""
        watch = self.watch
        if watch is None:
            return self.task(model, batch, **turn)
        self.batches.append(batch)
        watch.in_task = True
        try:
            values = self.task(model, batch, **turn)
        finally:
            watch.in_task = False
        loss = next(iter(values.values()))
        if (record := watch.record_of(loss)) is not None:
            raise LossNotFiniteError(record, float(loss.detach()))
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)
