"""Run a sweep: check all its jobs, run them, write the report, and end its run in MLflow. For grid.py and the search.

sweep.resume continues a sweep from its ledger. A source of jobs works with a SweepContext.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
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
from runner.experiment.notify import notify
from runner.experiment.summary import Summary
from runner.experiment.terminal import row, short
from runner.sweep import terminal
from runner.sweep.hydra_plugins import open_launcher
from runner.sweep.jobs import ledger
from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.sweep.jobs.prepare import (
    SEED,
    STORE_KEYS,
    Composer,
    DevicesFor,
    Overrides,
    PreparedJob,
    configurations,
    examine,
    folder_problems,
    store_problems,
    used_problems,
    without,
)
from runner.sweep.jobs.together import in_groups, in_words
from runner.sweep.launchers.local import Capacity
from runner.sweep.launchers.process_pool import ProcessPool, call
from runner.sweep.mlflow_parent import Parent
from runner.sweep.report import build, tables
from runner.sweep.report.report import Report, words_of
from runner.sweep.scheduler import JobSource, Launcher, Scheduler
from runner.sweep.terminal import Table
from runner.tracking import recipes
from runner.tracking.journal import is_being_written
from runner.training.signals import Stop, listening

MANY = 50  # jobs from which composing is announced


@dataclass(frozen=True)
class Plan:
    """The jobs of a sweeper."""

    overrides: Overrides  # of the command line
    jobs: Sequence[tuple[Overrides, str]]  # overrides and name; of a search: examples, to be checked
    source: Callable[[SweepContext], JobSource]
    objectives: tuple[dict[str, str], ...] = ()  # of a search
    says: Sequence[tuple[str, str]] = ()  # of a search: lines to print before it starts
    adds_seeds: bool = False  # of a grid: whether its source adds jobs
    imports: tuple[str, ...] = ()  # modules that jobs on this machine share, in addition to the launcher's


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
    capacity: Capacity
    say: Callable[[str], None]
    prepared: list[PreparedJob] = field(default_factory=list)  # of a grid: the plan's jobs to run

    def in_groups(self, prepared: Sequence[PreparedJob]) -> list[PreparedJob]:
        """Return the jobs, grouped for training together according to sweep.batch."""
        batch, num_groups = self.config.sweep.batch, self.capacity.num_groups
        if num_groups is None or self.sweep.objectives:
            if batch not in ("auto", "off"):  # the user requested groups
                reason = (
                    "of a search each one's values come of those before, and a launcher of other machines starts each"
                )
                self.say(f"batch    jobs are trained one by one, whatever sweep.batch={batch} says: {reason}")
            return list(prepared)
        grouped = in_groups(prepared, batch=batch, num_slots=num_groups)
        if batch != "off":
            for line in in_words(grouped):
                self.say(f"batch    {line}")
        return grouped

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
    with open_launcher(hydra_context, config) as launcher, listening() as stop, Table() as table:
        imports = plan.imports if launcher.is_here else ()
        # it imports torch while the jobs are composed
        with ProcessPool(launcher.environment, preload=(*launcher.preload, *imports)) as pool:
            before = {job.number: (job.state, ledger.kept(job.overrides)) for job in sweep.jobs.values()}
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
            hardware = _check(prepared, launcher, pool, strict=config.sweep.strict or bool(plan.objectives))
            with Ledger(sweep.folder) as book:
                if is_new:
                    book.begin(sweep)
                    OmegaConf.save(OmegaConf.create(for_disk(config)), sweep.folder / "multirun.yaml")
                known = [(sweep.jobs[number], *then) for number, then in before.items()]
                book.note(*(job for job, state, _ in known if job.is_done and state == "running"))
                book.plan(*(job for job, _, overrides in known if overrides != ledger.kept(job.overrides)))
                if not plan.objectives:
                    _enlist(prepared, sweep, book)
                capacity = launcher.open(pool, hardware, {name for job in prepared for name in job.devices})
                where = (hardware, launcher.is_here, launcher.devices_for, capacity)
                context = SweepContext(sweep, book, config, composer, *where, table.say)
                to_start = [] if plan.objectives else [each for each in prepared if each.missing is None]
                context.prepared = context.in_groups(to_start)
                with _reporting_full_disk(sweep):
                    source = plan.source(context)
                terminal.plan(table, sweep, prepared, slots=capacity.words, search=plan.says)
                with Parent.open(sweep, config, prepared, is_here=launcher.is_here) as parent:
                    publisher = parent.publisher if launcher.is_here else None
                    scheduler = Scheduler(sweep, book, source, launcher, table, parent.context, publisher)
                    limits = {name: config.sweep[name] for name in ("grace_seconds", "max_seconds")}
                    with _reporting_full_disk(sweep):
                        scheduler.run(stop, **limits)
                        _end(sweep, parent, stop, table)
    report = build.write(sweep.folder)  # again: it names the jobs' runs in MLflow
    terminal.what_next(table, sweep, config)
    _notify(config.notify.url, sweep, report, table)
    if stop.signal is not None:
        raise SystemExit(stop.exit_code)
    return sweep


@contextmanager
def _reporting_full_disk(sweep: Sweep) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        folder = short(sweep.folder)
        problem = f"the disk is full ({error}); everything saved before is kept"
        fix = f"free some space, then run the same line with `{terminal.to_resume(folder)}`"
        raise RunnerError.of(f"sweep {folder}", problem, fix) from error


def _sweep_of(plan: Plan, config: DictConfig) -> tuple[Sweep, bool]:
    planned = Path(config.hydra.sweep.dir).absolute()
    resumed = config.sweep.resume
    if resumed is None:
        if (planned / ledger.FILE).exists():
            problem = "the directory has a sweep, which is never overwritten"
            folder = config.hydra.sweep.dir
            raise RunnerError.suggest(f"hydra.sweep.dir={folder}", problem, [terminal.to_resume(folder)])
        config.hydra.sweep.dir = str(planned)
        of_hydra = [text for text in config.hydra.overrides.hydra if not text.startswith("hydra.mode=")]
        overrides = (*of_hydra, *plan.overrides)
        return Sweep(planned, uuid.uuid4().hex, int(time.time() * 1000), overrides, plan.objectives), True
    setting = Path(config.hydra.sweep.dir)
    root = setting.parent if setting.is_absolute() else Path(setting.parts[0])
    # the default hydra.sweep.dir contains the time: an existing directory was set by the user
    last = planned if (planned / ledger.FILE).exists() else ledger.find_last(root)
    folder = last if resumed == "last" else Path(resumed)
    if folder is None:
        raise RunnerError.of(f"sweep.resume={resumed}", f"there is no sweep in `{root}`", "remove `sweep.resume`")
    sweep = ledger.read(folder.absolute())
    if sweep.objectives != plan.objectives:
        before, now = (terminal.kind(objectives) for objectives in (sweep.objectives, plan.objectives))
        fix = f"use its arguments, `{' '.join(sweep.overrides)}`, or start a new sweep without `sweep.resume`"
        raise RunnerError.of(f"sweep.resume={resumed}, {now}", f"the sweep was {before}", fix)
    if config.tracking.enabled and not origin.is_own(sweep.folder):
        for used in (sweep.folder, *map(sweep.folder_of, sweep.jobs.values())):
            recipes.check(used)  # this process sends it; a job may be signed by another machine
    config.hydra.sweep.dir = str(sweep.folder)
    return sweep, False


def _jobs_to_run(plan: Plan, sweep: Sweep, *, retry: bool, grace_seconds: float) -> list[Job]:
    if plan.objectives:
        return [Job(-1, overrides, name) for overrides, name in plan.jobs]
    jobs = []
    for job, overrides in _match(plan, sweep):
        job.overrides = overrides
        folder = sweep.folder_of(job)
        if job.state in ("failed", "killed") and retry:
            if not _lacked_room(Summary.read(folder)):
                job.folder_name = _free_name(sweep, job)
        elif job.state == "running":  # it may have ended after the sweep was killed
            deadline = time.monotonic() + grace_seconds
            while is_being_written(folder) and time.monotonic() < deadline:
                time.sleep(0.1)
            summary = Summary.read(folder)
            if summary.has_ended and not _lacked_room(summary):
                job.state, job.error = summary.status, summary.error
                continue
        elif job.is_done and job.state != "skipped":
            continue
        jobs.append(job)
    return jobs


def _lacked_room(summary: Summary) -> bool:
    return summary.ending == "disk_full"


def _match(plan: Plan, sweep: Sweep) -> list[tuple[Job, Overrides]]:
    """Return the sweep's jobs that the plan names, and new ones for the rest, with the current overrides."""
    known: dict[Overrides, list[Job]] = {}
    for job in sweep.jobs.values():
        known.setdefault(_identity(job.overrides), []).append(job)
    jobs: list[tuple[Job, Overrides]] = []
    current: dict[Overrides, Overrides] = {}
    for overrides, name in [*plan.jobs, *_added_jobs(plan, sweep)]:
        key = _identity(overrides)
        current[key] = overrides
        if same := known.get(key):
            jobs.append((same.pop(0), overrides))
        else:
            number = max(sweep.jobs, default=-1) + 1
            sweep.jobs[number] = Job(number, overrides, name)  # its folder is named when it is composed
            jobs.append((sweep.jobs[number], overrides))
    # the sweep of an earlier version may have equal jobs
    return jobs + [(job, current[key]) for key, left in known.items() if key in current for job in left]


def _identity(overrides: Overrides) -> Overrides:
    return without(STORE_KEYS, ledger.kept(overrides))


def _added_jobs(plan: Plan, sweep: Sweep) -> list[tuple[Overrides, str]]:
    """Return the jobs that sweep.until added before the stop, with their seeds and the current overrides.

    The ledger's overrides have no passwords, and the store may have changed.
    """
    if not plan.adds_seeds:
        return []
    typed = {ledger.kept((text,))[0]: text for overrides, _ in plan.jobs for text in overrides}
    current = {without(SEED, _identity(overrides)): without(SEED, overrides) for overrides, _ in plan.jobs}
    planned = {_identity(overrides) for overrides, _ in plan.jobs}
    added = []
    for job in sweep.jobs.values():
        if _identity(job.overrides) not in planned:
            own = tuple(typed.get(text, text) for text in without(SEED, job.overrides))
            overrides = current.get(without(SEED, _identity(job.overrides)), own)
            added.append(((*overrides, *(text for text in job.overrides if key_of(text) in SEED)), job.name))
    return added


def _free_name(sweep: Sweep, job: Job) -> str:
    taken = {other.folder_name for other in sweep.jobs.values()}
    names = (f"{job.number}-{tries}" for tries in itertools.count(1))
    return next(name for name in names if name not in taken and not (sweep.folder / name).exists())


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
    jobs = [Job(next(numbers), (*overrides, seed), "") for overrides in configurations(plan.jobs)]
    for job in jobs:
        composer.compose(job)  # names its folder
    return jobs


def _check(prepared: list[PreparedJob], launcher: Launcher, pool: ProcessPool, *, strict: bool) -> Hardware:
    configs = [job.config for job in prepared]
    hardware: Hardware
    hardware, *answers = call(pool, examine, configs, launcher.devices_for, launcher.is_here)
    problems: list[Problem] = []
    for job, (errors, *facts) in zip(prepared, answers, strict=True):
        job.policy, job.devices, job.missing = facts
        problems += errors
        if strict and job.missing is not None:
            problems.append(job.missing)
    # an unknown argument is one problem, whatever its values are
    each = {(problem.message if problem.code == "bad-argument" else problem): problem for problem in reversed(problems)}
    refuse(reversed(each.values()))
    return hardware


def _enlist(prepared: Sequence[PreparedJob], sweep: Sweep, book: Ledger) -> None:
    jobs = [each.job for each in prepared]
    for job, missing in ((each.job, each.missing) for each in prepared):
        job.state, job.error = "planned", None
        if missing is not None:
            job.state, job.error = "skipped", missing.message
            Summary("skipped", job.error).write(sweep.folder_of(job))
    book.plan(*jobs)
    book.note(*jobs)


def _end(sweep: Sweep, parent: Parent, stop: Stop, table: Table) -> None:
    parent.note_runs()
    report = build.write(sweep.folder)
    table.close()
    tables.show(report, table.console)
    table.say(row("report", f"{short(sweep.folder)}/report.html"))
    jobs = sweep.jobs.values()
    is_cut_off = bool(stop.signal) or not all(job.is_done for job in jobs)  # e.g., by sweep.max_seconds
    failed = any(job.state in ("failed", "killed") for job in jobs)
    status = "KILLED" if is_cut_off else "FAILED" if failed else "FINISHED"
    parent.end(status, report, stop=stop, say=table.say)
    parent.note_runs()


def _notify(url: str | None, sweep: Sweep, report: Report, table: Table) -> None:
    states = Counter(job.state for job in sweep.jobs.values())
    counts = ", ".join(f"{num} {state}" for state, num in states.items())
    verdicts = [f"{each.a} against {each.b}: {words_of(each)}" for each in report.comparisons]
    facts = {"status": "ended", "jobs": states, "comparisons": verdicts, "directory": str(sweep.folder)}
    notify(url, "; ".join([f"{short(sweep.folder)}: {counts}", *verdicts]), facts, say=table.say)
