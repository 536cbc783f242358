"""Run a sweep: check all its jobs, run them, write the report, and end its run in MLflow. For grid.py and the search.

sweep.resume continues a sweep from its ledger. A source of jobs works with a SweepContext.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import origin
from runner.config.identity import key_of
from runner.config.secrets import for_disk
from runner.device import Hardware, parse
from runner.errors import Problem, RunnerError, is_full_disk, refuse
from runner.experiment.summary import Summary
from runner.experiment.terminal import short
from runner.sweep import messages
from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.sweep.jobs.prepare import (
    OF_THE_STORE,
    SEED,
    Composer,
    PreparedJob,
    Words,
    configurations,
    examine,
    folder_problems,
    store_problems,
    used_problems,
    without,
)
from runner.sweep.jobs.slots import DevicesFor
from runner.sweep.jobs.together import in_groups, in_words
from runner.sweep.launchers.process_pool import call
from runner.sweep.launchers.slurm import open_launcher
from runner.sweep.mlflow_parent import Parent
from runner.sweep.progress_table import Table
from runner.sweep.report import build, text
from runner.sweep.scheduler import JobSource, SweepState, run_jobs
from runner.tracking import recipes
from runner.tracking.journal import is_being_written
from runner.training.signals import Stop, listening

MANY = 50  # jobs from which composing is announced


@dataclass(frozen=True)
class Plan:
    """The jobs of a sweeper."""

    words: tuple[str, ...]
    jobs: Sequence[tuple[tuple[str, ...], str]]  # overrides and name; of a search: examples, to be checked
    source: Callable[[SweepContext], JobSource]
    objectives: tuple[dict[str, str], ...] = ()  # of a search
    says: Sequence[tuple[str, str]] = ()  # of a search: lines to print before it starts
    adds_seeds: bool = False  # of a grid: whether its source adds jobs
    imports: tuple[str, ...] = ()  # modules that all jobs share, in addition to the launcher's


@dataclass
class SweepContext:
    """What a source of jobs needs: the sweep, its ledger, and the functions that make a job."""

    sweep: Sweep
    ledger: Ledger
    config: DictConfig
    composer: Composer
    hardware: Hardware
    is_here: bool
    devices_for: DevicesFor
    say: Callable[[str], None]
    num_slots: int | None = None  # None: the launcher takes all jobs at once
    # the number of groups of jobs trained together; None: the launcher does not support groups
    num_groups: Callable[[Sequence[str], int], int] | None = None
    prepared: list[PreparedJob] = field(default_factory=list)  # the plan's jobs to run

    def add(self, overrides: tuple[str, ...], name: str, *, number: int, trial: dict[str, Any]) -> Job:
        """Add a job of a search to the ledger; its number is the trial's."""
        job = Job(number, overrides, name, folder_name=str(number), trial=trial)
        self.sweep.jobs[number] = job
        self.ledger.plan(job)
        return job

    def in_groups(self, prepared: Sequence[PreparedJob]) -> list[PreparedJob]:
        """Return the jobs, grouped for training together according to sweep.batch."""
        batch = self.config.sweep.batch
        if self.num_groups is None:
            if batch not in ("auto", "off"):  # the user requested groups
                reason = (
                    "of a search each one's values come of those before, and a launcher of other machines starts each"
                )
                self.say(f"batch    jobs are trained one by one, whatever sweep.batch={batch} says: {reason}")
            return list(prepared)
        found = in_groups(prepared, batch=batch, num_slots=self.num_groups)
        if batch != "off":
            for words in in_words(found):
                self.say(f"batch    {words}")
        return found

    def prepare(self, job: Job) -> PreparedJob:
        """Return the job with its configuration and its possible devices."""
        config = self.composer.compose(job)
        policy = parse(OmegaConf.select(config, "device"))
        return PreparedJob(job, config, policy, self.devices_for(policy, self.hardware))


def run_sweep(plan: Plan, hydra_context: Any, config: DictConfig) -> Sweep:
    """Check all jobs, run them, and write the report.

    Raises:
        RunnerError: For user errors, before anything is written.
        SystemExit: With a signal's exit code after a stop.
    """
    sweep, is_new = _sweep_of(plan, config)
    with open_launcher(hydra_context, config, imports=plan.imports) as launcher, listening() as stop, Table() as table:
        launcher.process_pool()  # it imports torch while the jobs are composed
        before = {job.number: job.state for job in sweep.jobs.values()}
        words = {job.number: ledger.kept(job.overrides) for job in sweep.jobs.values()}
        to_run = _jobs_to_run(plan, sweep, retry=config.sweep.retry, grace_seconds=config.sweep.grace_seconds)
        if len(to_run) >= MANY:
            table.say(f"jobs     composing and checking {len(to_run):,}")
        composer = Composer(hydra_context.config_loader, config)
        prepared = [PreparedJob(job, composer.compose(job)) for job in to_run]
        new = [job for job in to_run if job.number not in before]
        if plan.adds_seeds and is_new:
            new += _twins(plan, prepared, composer)
        refuse(_folder_problems(plan, sweep, new) + store_problems(prepared, config))
        # a search would request a missing device again and again
        hardware = _check(prepared, launcher, strict=config.sweep.strict or bool(plan.objectives))
        with Ledger(sweep.folder) as book:
            if is_new:
                book.begin(sweep)
                OmegaConf.save(OmegaConf.create(for_disk(config)), sweep.folder / "multirun.yaml")
            book.note(*(job for job in sweep.jobs.values() if job.is_done and before.get(job.number) == "running"))
            book.plan(
                *(sweep.jobs[number] for number in words if words[number] != ledger.kept(sweep.jobs[number].overrides))
            )
            context = SweepContext(
                sweep, book, config, composer, hardware, launcher.is_here, launcher.devices_for, table.say
            )
            if not plan.objectives:
                context.prepared = _enlist(prepared, context)
            slots = launcher.open(hardware, {name for job in prepared for name in job.devices})
            context.num_slots = getattr(launcher, "num_slots", None)
            context.num_groups = None if plan.objectives else getattr(launcher, "num_groups", None)
            context.prepared = context.in_groups(context.prepared)
            with _full_disk_told(sweep):
                source = plan.source(context)
            messages.plan(table, sweep, prepared, slots=slots, search=plan.says)
            with Parent.open(sweep, config, prepared, follows=launcher.follows) as parent:
                publisher = parent.publisher if launcher.follows else None
                state = SweepState(sweep, book, parent.assigned, publisher, table)
                limits = {name: config.sweep[name] for name in ("grace_seconds", "max_seconds")}
                with _full_disk_told(sweep):
                    run_jobs(source, launcher, state, stop=stop, **limits)
                    _end(sweep, parent, stop, table)
    build.write(sweep.folder)  # again: it names the jobs' runs in MLflow
    messages.what_next(table, sweep, config)
    if stop.signal is not None:
        raise SystemExit(stop.exit_code)
    return sweep


@contextmanager
def _full_disk_told(sweep: Sweep) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        folder = short(sweep.folder)
        problem = f"the disk is full ({error}); everything saved before is kept"
        fix = f"free some space, then run the same line with `{messages.to_resume(folder)}`"
        raise RunnerError.of(f"sweep {folder}", problem, fix) from error


def _sweep_of(plan: Plan, config: DictConfig) -> tuple[Sweep, bool]:
    planned = Path(config.hydra.sweep.dir).absolute()
    wanted = config.sweep.resume
    if wanted is None:
        if (planned / ledger.FILE).exists():
            problem = "the directory has a sweep, which is never overwritten"
            folder = config.hydra.sweep.dir
            raise RunnerError.suggest(f"hydra.sweep.dir={folder}", problem, [messages.to_resume(folder)])
        config.hydra.sweep.dir = str(planned)
        hydras = [word for word in config.hydra.overrides.hydra if not word.startswith("hydra.mode=")]
        words = (*hydras, *plan.words)
        return Sweep(planned, uuid.uuid4().hex, int(time.time() * 1000), words, plan.objectives), True
    given = Path(config.hydra.sweep.dir)
    root = given.parent if given.is_absolute() else Path(given.parts[0])
    # the default hydra.sweep.dir contains the time: an existing directory was set by the user
    last = planned if (planned / ledger.FILE).exists() else ledger.find_last(root)
    folder = last if wanted == "last" else Path(wanted)
    if folder is None:
        problem = f"there is no sweep in `{root}`"
        raise RunnerError.of(f"sweep.resume={wanted}", problem, "remove `sweep.resume`")
    sweep = ledger.read(folder.absolute())
    if sweep.objectives != plan.objectives:
        before, now = (messages.kind(objectives) for objectives in (sweep.objectives, plan.objectives))
        fix = f"use its arguments, `{' '.join(sweep.overrides)}`, or start a new sweep without `sweep.resume`"
        raise RunnerError.of(f"sweep.resume={wanted}, {now}", f"the sweep was {before}", fix)
    if config.tracking.enabled and not origin.is_own(sweep.folder):
        for used in (sweep.folder, *map(sweep.folder_of, sweep.jobs.values())):
            recipes.check(used)  # this process sends it; a job may be signed by another machine
    config.hydra.sweep.dir = str(sweep.folder)
    return sweep, False


def _jobs_to_run(plan: Plan, sweep: Sweep, *, retry: bool, grace_seconds: float) -> list[Job]:
    if plan.objectives:
        return [Job(-1, overrides, name) for overrides, name in plan.jobs]
    jobs = []
    for job, overrides in _listed(plan, sweep):
        job.overrides = overrides
        if job.state in ("failed", "killed") and retry:
            if not _lacked_room(Summary.read(sweep.folder_of(job))):
                job.folder_name = _free_name(sweep, job)
        elif job.state == "running":  # it may have ended after the sweep was killed
            _wait_for_its_end(sweep.folder_of(job), seconds=grace_seconds)
            summary = Summary.read(sweep.folder_of(job))
            if summary.has_ended and not _lacked_room(summary):
                job.state, job.error = summary.status, summary.error
                continue
        elif job.is_done and job.state != "skipped":
            continue
        jobs.append(job)
    return jobs


def _lacked_room(summary: Summary) -> bool:
    return summary.ending == "disk_full"


def _listed(plan: Plan, sweep: Sweep) -> list[tuple[Job, tuple[str, ...]]]:
    known: dict[tuple[str, ...], list[Job]] = {}
    for job in sweep.jobs.values():
        known.setdefault(_known_by(job.overrides), []).append(job)
    wanted = [*plan.jobs, *_added(plan, sweep)]
    found = []
    for overrides, name in wanted:
        same = known.get(_known_by(overrides))
        found.append((same.pop(0) if same else _new_job(sweep, overrides, name), overrides))
    given = {_known_by(overrides): overrides for overrides, _ in wanted}
    # the sweep of an earlier version may have equal jobs
    return found + [(job, given[key]) for key, left in known.items() if key in given for job in left]


def _known_by(overrides: Words) -> Words:
    return without(OF_THE_STORE, ledger.kept(overrides))


def _added(plan: Plan, sweep: Sweep) -> list[tuple[tuple[str, ...], str]]:
    """Return the jobs that sweep.until added before the stop, with their seeds and the current overrides.

    The ledger's overrides have no passwords, and the store may have changed.
    """
    if not plan.adds_seeds:
        return []
    typed = {ledger.kept((word,))[0]: word for overrides, _ in plan.jobs for word in overrides}
    given = {without(SEED, _known_by(overrides)): without(SEED, overrides) for overrides, _ in plan.jobs}
    planned = {_known_by(overrides) for overrides, _ in plan.jobs}
    found = []
    for job in sweep.jobs.values():
        if _known_by(job.overrides) not in planned:
            own = tuple(typed.get(word, word) for word in without(SEED, job.overrides))
            words = given.get(without(SEED, _known_by(job.overrides)), own)
            found.append(((*words, *(word for word in job.overrides if key_of(word) in SEED)), job.name))
    return found


def _free_name(sweep: Sweep, job: Job) -> str:
    taken = {other.folder_name for other in sweep.jobs.values()}
    names = (f"{job.number}-{tries}" for tries in itertools.count(1))
    return next(name for name in names if name not in taken and not (sweep.folder / name).exists())


def _wait_for_its_end(folder: Path, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while is_being_written(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _new_job(sweep: Sweep, overrides: tuple[str, ...], name: str) -> Job:
    number = max(sweep.jobs, default=-1) + 1
    sweep.jobs[number] = Job(number, overrides, name)  # its folder is named when it is composed
    return sweep.jobs[number]


def _folder_problems(plan: Plan, sweep: Sweep, new: Sequence[Job]) -> list[Problem]:
    if plan.objectives:  # jobs of a search come one by one, in numbered directories
        known = {job.folder_name for job in sweep.jobs.values()}
        numbered = (path for path in sweep.folder.glob("*") if path.name.isdecimal())
        return used_problems(sorted(path for path in numbered if path.name not in known))
    every = {**sweep.jobs, **{job.number: job for job in new}}
    return folder_problems(list(every.values())) or used_problems(map(sweep.folder_of, new))


def _twins(plan: Plan, prepared: Sequence[PreparedJob], composer: Composer) -> list[Job]:
    """Return a job of each configuration with a new seed, to check jobs that may be added; it is never run."""
    seeds = [seed for each in prepared if isinstance(seed := OmegaConf.select(each.config, "seed"), int)]
    numbers = itertools.count(1 + max(each.job.number for each in prepared))
    seed = f"seed={1 + max(seeds, default=0)}"
    found = [Job(next(numbers), (*words, seed), "") for words in configurations(plan.jobs)]
    for job in found:
        composer.compose(job)  # names its folder
    return found


def _check(prepared: list[PreparedJob], launcher: Any, *, strict: bool) -> Hardware:
    hardware, *found = call(
        launcher.process_pool(), examine, [job.config for job in prepared], launcher.devices_for, launcher.is_here
    )
    problems: list[Problem] = []
    for job, (wrong, *place) in zip(prepared, found, strict=True):
        job.policy, job.devices, job.missing = place
        problems += wrong
        if strict and job.missing is not None:
            problems.append(job.missing)
    # an unknown argument is one problem, whatever its values are
    of_jobs = {(each.message if each.code == "bad-argument" else each): each for each in reversed(problems)}
    refuse(reversed(of_jobs.values()))
    machine: Hardware = hardware
    return machine


def _enlist(prepared: list[PreparedJob], context: SweepContext) -> list[PreparedJob]:
    for found in prepared:
        job = found.job
        job.state, job.error = "planned", None
        if found.missing is not None:
            job.state, job.error = "skipped", found.missing.message
            Summary("skipped", job.error).write(context.sweep.folder_of(job))
    context.ledger.plan(*(found.job for found in prepared))
    context.ledger.note(*(found.job for found in prepared))
    return [found for found in prepared if found.missing is None]


def _end(sweep: Sweep, parent: Parent, stop: Stop, table: Table) -> None:
    parent.tell_summaries(sweep)
    report = build.write(sweep.folder)
    table.close()
    text.show(report, table.console)
    messages.where(table, sweep)
    jobs = sweep.jobs.values()
    is_cut_off = bool(stop.signal) or not all(job.is_done for job in jobs)  # e.g., by sweep.max_seconds
    failed = any(job.state in ("failed", "killed") for job in jobs)
    status = "KILLED" if is_cut_off else "FAILED" if failed else "FINISHED"
    parent.end(status, report, stop=stop, say=table.say)
    parent.tell_summaries(sweep)
