"""Group the jobs of a sweep that differ only in numbers, so that one process trains them together (sweep.batch).

Other reasons against a group are found in the job's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner.config.identity import flat
from runner.config.validate import of_all_folds
from runner.experiment import rules
from runner.sweep.jobs.prepare import PreparedJob

#: minimum number of jobs for sweep.batch=auto: with fewer, most of the time is spent per job
FEWEST = 4
#: maximum size of a group, as each member has a journal and open files
MOST = 128
#: keys that may have another number in each member of a group; null is not a number
NUMBERS = (
    "seed",
    "optimizer.",
    "scheduler.",
    "train.clip_grad_norm",
    "train.ema_decay",
    "task.class_weights",
    "data.augment.",
)
#: keys that may differ in any way
FREE = ("name", "hydra.", "sweep.")


def in_groups(
    prepared: Sequence[PreparedJob], *, batch: str | int, num_slots: Callable[[Collection[str]], int]
) -> list[PreparedJob]:
    """Return the jobs in order; each group is its first job with the others.

    Args:
        batch: sweep.batch: auto, off, or the maximum size of a group.
        num_slots: Returns how many groups may compute at a time on some devices.
    """
    if batch == "off":
        return list(prepared)
    alike: dict[Hashable, list[PreparedJob]] = {}
    for job in prepared:
        alike.setdefault(job.job.number if _why_alone(job) else _key(job), []).append(job)
    groups = []
    for jobs in alike.values():
        size = _size(len(jobs), batch, num_slots(jobs[0].devices))
        for at in range(0, len(jobs), size):
            first, *others = jobs[at : at + size]
            groups.append(replace(first, others=tuple(others)))
    num_groups = sum(bool(each.others) for each in groups)
    return sorted((replace(each, num_groups=num_groups) for each in groups), key=lambda each: each.job.number)


def _size(count: int, batch: str | int, num_slots: int) -> int:
    if isinstance(batch, int):
        return batch
    if count < FEWEST:
        return 1
    num_groups = max(-(-count // MOST), min(num_slots, count // FEWEST))
    return -(-count // num_groups)


def _why_alone(job: PreparedJob) -> str:
    if not job.devices:
        return "their devices are not seen from here"
    return rules.why_not(job.config, {"is_member": True})


def _key(job: PreparedJob) -> Hashable:
    values = flat(job.config)
    return (job.devices, job.policy, tuple(sorted((key, _kind(key, value)) for key, value in values.items())))


def _kind(key: str, value: Any) -> str:
    if key.startswith(FREE):
        return ""
    if key == "data.fold":
        return of_all_folds(value)
    if not key.startswith(NUMBERS) or (value == 0 and key.startswith("data.augment.")):
        return repr(value)
    if key.startswith("scheduler.") and isinstance(value, list | tuple) and all(map(_is_number, value)):
        return "numbers"  # milestones: each member has its schedule
    return _form(value)


def _form(value: Any) -> str:
    if isinstance(value, Mapping):  # optimizer.groups has some
        return f"{{{', '.join(f'{name}: {_form(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_form, value))}]"
    return "a number" if _is_number(value) else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_words(prepared: Sequence[PreparedJob]) -> list[str]:
    """Return lines about the number of jobs that are trained together, and those that can't be because of their settings."""
    lines = []
    if sizes := [len(job.jobs) for job in prepared if job.others]:
        groups = "one group" if len(sizes) == 1 else f"{len(sizes)} groups"
        together = f"trained together, in {groups} (sweep.batch=off: one by one)"
        lines.append(f"{sum(sizes)} jobs differ only in numbers: {together}")
    reasons = Counter((reason, _key(job)) for job in prepared if (reason := _why_alone(job)))
    for (reason, _), count in reasons.items():
        if count >= FEWEST:
            lines.append(f"{count} jobs that differ only in numbers are trained one by one: {reason}")
    return lines
