"""Train jobs that differ only in numbers together in one process: each has its session, directory and result.

Called by run_job.py in the process of a group. What can't be trained together is found before any of them begins.
"""

from __future__ import annotations

import gc
import resource
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from runner.config import validate
from runner.config.instantiate import targets
from runner.config.nodes import resolved
from runner.config.settings import Settings
from runner.data.loading.batches import Resident, sent
from runner.data.loading.loaders import MAX_OF_FREE_MEMORY
from runner.data.source import GIVEN, Source
from runner.data.split import Chosen, indices, split
from runner.device import Hardware, backends, host_memory
from runner.device.placement import map_tensors, move, num_bytes, num_rows, tensors
from runner.distributed.group import Alone
from runner.errors import CODE_ERRORS, RunnerError, on_a_line
from runner.experiment.build import prepare
from runner.experiment.build_data import PreparedData
from runner.experiment.check import check_here
from runner.experiment.console import Screen
from runner.experiment.context import Checked, RunContext
from runner.experiment.directory import Run, RunDirectory
from runner.experiment.session import Session, check_directory
from runner.experiment.summary import Summary
from runner.experiment.terminal import print_failure
from runner.sweep.jobs.ledger import ALONE
from runner.training.observer import Observer
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.signals import listening
from runner.training.stacked.check import check_alike, free_bytes, most_members
from runner.training.stacked.fit import Member, fit_together
from runner.training.stacked.stack import CannotStackError as CannotStackError

#: files that each run has open (journal, two locks, two logs, one more at times), and other files of the process
FILES, OTHER_FILES = 6, 64
#: of a run's data, what it takes while it is read: its rows, and each split's before they are shared
COPIES = 2
#: whose settings members of one lane share, see stacked.fit.Member
MEMBER_KEYS = ("optimizer.", "scheduler.", "train.clip_grad_norm", "train.ema_decay")


@dataclass(frozen=True)
class PlannedRun:
    """A run among others: as for run.run()."""

    cfg: DictConfig
    folder: Path
    context: RunContext


@dataclass
class _Open:
    job: PlannedRun
    session: Session
    member: Member
    closing: ExitStack


def in_turns(jobs: Sequence[PlannedRun]) -> list[Summary]:
    """Train the jobs, as many together as possible; after a stop no others start. Returns their summaries.

    The status is `ALONE` if they can't be trained together.
    """
    summaries: list[Summary] = []
    with listening() as stop:
        while jobs and stop.signal is None:
            try:
                ended = run_together(jobs)
            except CannotStackError as error:
                for job in jobs:
                    Summary(ALONE, str(error)).write(job.folder)
                break
            except CODE_ERRORS as error:
                reason = print_failure(error)
                ended = {number: failed(job, reason) for number, job in enumerate(jobs)}
            summaries += ended.values()
            jobs = [job for number, job in enumerate(jobs) if number not in ended]
    return summaries


def run_together(jobs: Sequence[PlannedRun]) -> dict[int, Summary]:
    """Run as many jobs as the memory has room for and are of one size. Returns their summaries by index.

    A job fails separately if its data, its model or its end (logging the model, plots) fails.
    Raises: CannotStackError, before anything is tracked, where they can't be trained together.
    """
    gc.collect()  # an earlier group may be in reference cycles, with all of its weights
    summaries: dict[int, Summary] = {}
    most = _room_for_files(len(jobs))
    hardware = check_here(jobs[0].cfg, context=jobs[0].context).hardware  # the sweep has checked each of them
    grace_seconds = float(jobs[0].cfg.train.grace_seconds)
    with ExitStack() as all_open, listening(grace_seconds=grace_seconds) as stop:
        members, rows = dict[int, _Open](), CommonRows()
        for number, job in enumerate(jobs):
            if number >= most:
                break
            try:
                members[number] = _prepared(job, hardware, rows)
            except RunnerError as error:
                summaries[number] = failed(job, on_a_line(error))
                continue
            all_open.push(members[number].closing)
            parts = members[number].member.parts
            most = min(most, number + most_members(parts, read_bytes=COPIES * _num_bytes(parts.source)))
        members = _of_one_size(members)
        if not members:
            return summaries
        each = [one.member for one in members.values()]
        size = check_alike(each, is_asked=jobs[0].cfg.sweep.batch != "auto")
        for one in members.values():
            one.session.begin(one.job.cfg, one.member.parts, num_together=size.num_together)
            one.session.say(f"batch    {size.words}")
            one.member.observer = one.session.reporter
        first = next(iter(members.values()))
        results = fit_together(each, size.num_together, stop=stop, say=first.session.say, compiled=size.compiled)
        best = _best(results)
        for one, result in zip(members.values(), results, strict=True):
            shows = result is best or one.member.settings.tracking.log_model == "all"
            one.session.end(result, Alone(), shows=shows)
    return summaries | {number: one.session.summary for number, one in members.items()}


def _room_for_files(wanted: int) -> int:
    needed = OTHER_FILES + FILES * wanted
    most, allowed = (needed if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))  # -1: none
    if most < needed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, allowed), allowed))
            most = min(needed, allowed)
    return max(1, min(wanted, (most - OTHER_FILES) // FILES))


def _prepared(job: PlannedRun, hardware: Hardware, rows: CommonRows) -> _Open:
    choice = job.context.device
    assert choice is not None  # the sweep's slot
    with ExitStack() as own:
        check_directory(job.folder, job.cfg)
        own.enter_context(RunDirectory(job.folder, wait_seconds=10.0))
        context = replace(job.context, screen=own.enter_context(Screen.into(job.folder)))
        machine, device = Checked(hardware, (choice,)), torch.device(choice.here)
        session = own.enter_context(Session.open(job.cfg, job.folder, machine=machine, context=context))
        try:
            is_resumed = Run(job.folder).is_resumable
            parts = prepare(job.cfg, device, is_resumed=is_resumed, read=rows.read(job.cfg))
        except RunnerError as error:
            is_full = any(problem.source == "data.residency=device" for problem in error.problems)
            if is_full and device.type != "cpu" and host_memory.is_shared():
                problem = f"of {choice.device}'s memory each of several groups takes its part"
                raise CannotStackError(f"{problem}; {on_a_line(error)}; or sweep.batch=128, one group") from error
            raise
        parts, settings = rows.shared(parts, job.cfg), session.settings
        generators = backends.generator_states(device)
        member = Member(parts, settings, job.folder, Observer(), lane_of(settings), generators)
        return _Open(job, session, member, own.pop_all())


class CommonRows:
    """The training data of several runs: the same data is on the device once, and each run has its split of it."""

    def __init__(self) -> None:
        self._source: Source | None = None  # of the first of them
        self._was_read_by: Any = None  # what it was read by
        #: on the device: by "train" all that is cut, by the others what came split already
        self._rows: dict[str, Any] = {}

    def read(self, cfg: DictConfig) -> PreparedData | None:
        """Return a run's data if the first run has read it with the same settings, else None."""
        if self._source is None or (reader := _read_by(cfg)) is None or reader != self._was_read_by:
            return None
        return PreparedData(self._source, split(self._source, seed=cfg.seed, **validate.how_to_cut(cfg)), "", {})

    def shared(self, parts: Parts, cfg: DictConfig) -> Parts:
        """Return the parts with the first run's rows instead of a copy, if their data is the same."""
        loaders = {name: batches for name in ("train", *GIVEN) if (batches := getattr(parts, name)) is not None}
        if not all(isinstance(each, Resident) for each in loaders.values()):
            return parts
        chosen = indices(parts.source, seed=cfg.seed, **validate.how_to_cut(cfg))
        chosen = {name: rows for name, rows in chosen.items() if len(rows) < num_rows(parts.source.rows)}
        if self._source is None and _is_worth_it(parts, chosen):
            rows = map_tensors(parts.source.rows, Tensor.contiguous)
            self._source, self._was_read_by = replace(parts.source, rows=rows), _read_by(cfg)
            self._rows = map_tensors({"train": rows, **parts.source.given}, lambda tensor: move(tensor, parts.device))
        first = self._source
        if first is None or not _are_alike(parts.source, first):
            return parts
        splits = {name: first.given.get(name, first.rows) for name in loaders}
        for name, loader in loaders.items():
            if name in chosen:
                splits[name] = Chosen(first.rows, chosen[name])
                loader.share(self._rows["train"], sent(chosen[name], parts.device))
            else:
                loader.share(self._rows[name])
        source = replace(parts.source, rows=first.rows, given=first.given)
        return replace(parts, source=source, splits=replace(parts.splits, **splits))


def _read_by(cfg: DictConfig) -> Any:
    shared, node = validate.shared_data_settings(cfg), resolved(cfg, "data")
    is_ours = all(str(inner["_target_"]).startswith("runner.data.") for _, inner in targets(node, "data"))
    return (shared["name"], node) if is_ours else None


def _is_worth_it(parts: Parts, chosen: Mapping[str, Tensor]) -> bool:
    if parts.device.type == "cpu":
        return True
    free, size = free_bytes(parts.device), _num_bytes(parts.source)
    is_most = not chosen or 2 * sum(map(len, chosen.values())) >= num_rows(parts.source.rows)  # data.limit leaves few
    return is_most and (free is None or size <= MAX_OF_FREE_MEMORY * free)


def _num_bytes(source: Source) -> int:
    return num_bytes((source.rows, dict(source.given)))


def _are_alike(one: Source, other: Source) -> bool:
    mine, theirs = (tensors((each.rows, dict(each.given))) for each in (one, other))
    pairs = zip(mine, theirs, strict=False)
    return len(mine) == len(theirs) and all(a is b or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)


def _of_one_size(members: Mapping[int, _Open]) -> dict[int, _Open]:
    """Those with as many rows to train on as most of them have. The others are closed, and their turn comes.

    Folds are of two sizes, a row apart; of more sizes all stay, and check_alike() refuses them.
    """
    sizes = Counter(one.member.parts.train.num_rows for one in members.values())
    if len(sizes) != 2:
        return dict(members)
    (size, _), _ = sizes.most_common()
    for one in members.values():
        if one.member.parts.train.num_rows != size:
            with suppress(CannotStackError), one.closing:
                raise CannotStackError("now")  # as one that never began: it leaves no summary
    return {number: one for number, one in members.items() if one.member.parts.train.num_rows == size}


def _best(results: Sequence[Result]) -> Result | None:
    finished = [result for result in results if result.status == "finished" and result.best.value is not None]
    mode = min if finished and finished[0].best.mode == "min" else max
    return mode(finished, key=lambda result: result.best.value or 0.0, default=None)


def lane_of(settings: Settings) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted((key, repr(value)) for key, value in settings.experiment.items() if key.startswith(MEMBER_KEYS))
    )


def failed(job: PlannedRun, why: str) -> Summary:
    """Return the summary of a run that never began."""
    summary = Summary("failed", why, exit_code=1)
    summary.write(job.folder)
    return summary
