"""An epoch's value goes in; whether the search gives this trial up comes out. In the job's process."""

from __future__ import annotations


class StudyTrial:
    def __init__(self, study: str, number: int, *, metric: str) -> None:
        self.metric = metric

    def gives_up(self, value: float, epoch: int) -> bool:
        return False
