"""Finds a sweep's jobs that differ in numbers alone, so that one process may train them together (sweep.batch). Pure.

Called by sweep.py and until.py. What else may be in the way is found out in the job's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from runner.config.identity import flat
from runner.config.validate import of_all_folds
from runner.experiment import rules
from runner.sweep.jobs.prepare import Prepared

#: jobs from which on sweep.batch=auto trains them together: of fewer, most of the time is each job's own
FEWEST = 4
#: in one group at the most: what they have of their own (a journal, files that are open) is not nothing
MOST = 128
#: what may be another number in each of the jobs that are trained together; null or not is no number
NUMBERS = (
    "seed",
    "optimizer.",
    "scheduler.",
    "train.clip_grad_norm",
    "train.ema_decay",
    "task.label_smoothing",
    "task.class_weights",
    "data.augment.",
)
#: keys of a model whose last word has this are a number likewise: dropout, drop_rate, attention_dropout
DROPS = "drop"
#: what they may have of their own, whatever it is
FREE = ("name", "hydra.", "sweep.")


def in_groups(
    prepared: Sequence[Prepared], *, batch: str | int, num_slots: Callable[[Sequence[str], int], int]
) -> list[Prepared]:
    """The jobs in their order, those that are trained together as one: its first, with the others.

    batch: sweep.batch, auto, off, or how many at the most. num_slots: of some devices and a number of jobs, groups of those
    that may run there at a time.
    """
    if batch == "off":
        return list(prepared)
    alike: dict[Hashable, list[Prepared]] = {}
    for job in prepared:
        alike.setdefault(job.job.number if _why_alone(job) else _key(job), []).append(job)
    found = []
    for jobs in alike.values():
        size = _size(len(jobs), batch, num_slots(jobs[0].devices, len(jobs)))
        for at in range(0, len(jobs), size):
            first, *others = jobs[at : at + size]
            found.append(replace(first, others=tuple(others)))
    num_groups = sum(bool(each.others) for each in found)
    return sorted((replace(each, num_groups=num_groups) for each in found), key=lambda each: each.job.number)


def _size(count: int, batch: str | int, num_slots: int) -> int:
    if isinstance(batch, int):
        return batch
    if count < FEWEST:
        return 1
    num_groups = max(-(-count // MOST), min(num_slots, count // FEWEST))
    return -(-count // num_groups)


def _why_alone(job: Prepared) -> str:
    if job.assigned or not job.devices:
        return "their devices are not seen from here"
    return rules.why_not(job.config, {"is_member": True})


def _key(job: Prepared) -> Hashable:
    values = flat(job.config)
    return (job.devices, job.policy, tuple(sorted((key, _kind(key, value)) for key, value in values.items())))


def _kind(key: str, value: Any) -> str:
    if key.startswith(FREE):
        return ""
    if key == "data.fold":
        return of_all_folds(value)
    drops = key.startswith("model.") and DROPS in key.rpartition(".")[2]
    if not drops and not key.startswith(NUMBERS):
        return repr(value)
    if value == 0 and (drops or key.startswith("data.augment.")):
        return repr(value)  # without dropout a model may have another layer less
    if key.startswith("scheduler.") and isinstance(value, list | tuple) and all(map(_is_number, value)):
        return "numbers"  # milestones: each has a schedule of its own
    return _form(value)


def _form(value: Any) -> str:
    if isinstance(value, Mapping):  # optimizer.groups has some
        return f"{{{', '.join(f'{name}: {_form(each)}' for name, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_form, value))}]"
    return "a number" if _is_number(value) else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def in_words(prepared: Sequence[Prepared]) -> list[str]:
    """How many jobs are trained together, and how many might be but for their settings; no line where none are."""
    sizes, said = [len(job.jobs) for job in prepared if job.others], []
    if sizes:
        groups = "one group" if len(sizes) == 1 else f"{len(sizes)} groups"
        said.append(
            f"{sum(sizes)} jobs differ in numbers alone: trained together, in {groups} (sweep.batch=off: one by one)"
        )
    alone = Counter((_why_alone(job), _key(job)) for job in prepared if _why_alone(job))
    for (reason, _), count in alone.items():
        if count >= FEWEST:
            said.append(f"{count} jobs that differ in numbers alone are trained one by one: {reason}")
    return said
