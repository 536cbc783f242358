"""Finds a sweep's jobs that differ in numbers alone, so that one process may train them together (sweep.batch). Pure.

Called by sweep.py and until.py. What else may be in the way is found out in the job's process.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from runner.config.identity import flat
from runner.config.validate import of_all_folds
from runner.sweep.jobs.prepare import Prepared

#: jobs from which on sweep.batch=auto trains them together: of fewer, most of the time is each job's own
FEWEST = 4
#: in one group at the most: what they have of their own (a journal, files that are open) is not nothing
MOST = 128
#: what may be another number in each of the jobs that are trained together; null or not is no number
NUMBERS = ("seed", "optimizer.", "scheduler.", "train.clip_grad_norm", "train.ema_decay")
#: what they may have of their own, whatever it is
FREE = ("name", "hydra.", "sweep.")


def in_groups(
    prepared: Sequence[Prepared], *, batch: str | int, num_slots: Callable[[Sequence[str]], int]
) -> list[Prepared]:
    """The jobs in their order, those that are trained together as one: its first, with the others.

    batch: sweep.batch, auto, off, or how many at the most. num_slots: of some devices, groups that may run there at a time.
    """
    if batch == "off":
        return list(prepared)
    alike: dict[Hashable, list[Prepared]] = {}
    for job in prepared:
        alike.setdefault(_key(job) if _may(job) else job.job.number, []).append(job)
    found = []
    for jobs in alike.values():
        size = _size(len(jobs), batch, num_slots(jobs[0].devices))
        for at in range(0, len(jobs), size):
            first, *others = jobs[at : at + size]
            found.append(replace(first, others=tuple(others)))
    num_groups = sum(bool(each.others) for each in found)
    return sorted((replace(each, num_groups=num_groups) for each in found), key=lambda each: each.job.number)


def _size(count: int, batch: str | int, num_slots: int) -> int:
    """Of the groups of so many jobs."""
    if isinstance(batch, int):
        return batch
    if count < FEWEST:
        return 1
    num_groups = max(-(-count // MOST), min(num_slots, count // FEWEST))
    return -(-count // num_groups)


def _may(job: Prepared) -> bool:
    """Whether a job's settings leave it open that others go with it; the rest is found out where it runs."""
    train, placement = job.config.train, job.config.placement
    alone = job.assigned or placement.map or train.compile or train.cuda_graph or train.precision == "fp16"
    return not alone and train.num_processes in (1, "auto") and len(job.devices) > 0


def _key(job: Prepared) -> Hashable:
    """Equal for jobs that differ in nothing but what each may have of its own."""
    values = flat(job.config)
    return (job.devices, job.policy, tuple(sorted((key, _kind(key, value)) for key, value in values.items())))


def _kind(key: str, value: Any) -> str:
    if key.startswith(FREE):
        return ""
    if key == "data.fold":
        return of_all_folds(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number" if is_number and key.startswith(NUMBERS) else repr(value)


def in_words(prepared: Sequence[Prepared]) -> str:
    """How many jobs are trained together; "" where none are."""
    sizes = [len(job.jobs) for job in prepared if job.others]
    if not sizes:
        return ""
    groups = "one group" if len(sizes) == 1 else f"{len(sizes)} groups"
    return f"{sum(sizes)} jobs differ in numbers alone: trained together, in {groups} (sweep.batch=off: one by one)"
