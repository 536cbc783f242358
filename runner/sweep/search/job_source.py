"""Make jobs from a study's trials, one whenever there is a free slot, and report to the study how each ended.

scheduler.py requests the jobs, in the sweep's process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.identity import key_of
from runner.errors import Problem, RunnerError, refuse
from runner.experiment.summary import Summary
from runner.sweep.jobs.ledger import Job, kept
from runner.sweep.jobs.prepare import STORE_KEYS, PreparedJob
from runner.sweep.scheduler import settle
from runner.sweep.search.space import Space
from runner.sweep.search.study import FILE, Pruning, StudyTrial, Trials, make_study, open_storage, patiently

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from runner.config.schema import SearchKeys
    from runner.sweep.sweep import SweepContext

Goals = tuple[dict[str, str], ...]  # as the ledger has them: {"metric": ..., "direction": ...}
GOOD, BAD = ("finished", "pruned"), ("failed", "killed", "skipped")
#: failed trials in a row that end a search: at its start, and later
FAILURES_AT_START, FAILURES_IN_A_ROW = 5, 10


def open_study(
    folder: Path, jobs: Sequence[Job], space: Space, goals: Goals, pruning: Pruning | None, *, is_here: bool
) -> Study:
    """Open the study in a sweep directory, or create it if `jobs` is empty. is_here: Whether jobs run on this machine.

    Raises: RunnerError if it is missing, or its trials don't fit this space.
    """
    path, source, fix = folder / FILE, f"sweep.resume={folder}", "remove `sweep.resume`"
    if not jobs:  # a kill may have left an incomplete one
        for incomplete in folder.glob(f"{FILE}*"):
            incomplete.unlink()
    elif not path.exists():
        problem = f"`{FILE}`, the study of the sweep's {len(jobs)} trials, is missing"
        raise RunnerError.of(source, problem, fix)
    storage = patiently(lambda: open_storage(path, is_new=not jobs, may_share_memory=is_here))
    study = patiently(lambda: make_study(storage, [goal["direction"] for goal in goals], pruning))
    trials = patiently(lambda: study.get_trials(deepcopy=False))
    if max((job.number for job in jobs), default=-1) >= len(trials):
        problem = f"`{FILE}` has {len(trials)} trials, and the ledger has more: the file is an older copy"
        raise RunnerError.of(source, problem, fix)
    refuse(_changed_choices(source, space, trials))
    return study


def _changed_choices(source: str, space: Space, trials: Sequence[FrozenTrial]) -> list[Problem]:
    from optuna.distributions import CategoricalDistribution, check_distribution_compatibility

    now = {key: dimension.distribution for key, dimension in space.dimensions.items()}
    problems = {}
    for key, before in ((key, before) for trial in trials for key, before in trial.distributions.items()):
        try:
            check_distribution_compatibility(before, now.get(key, before))
        except ValueError:
            had = ", ".join(map(str, before.choices)) if isinstance(before, CategoricalDistribution) else "numbers"
            problem = f"the study has `{key}` as {had}, which can't change while it continues"
            fix = f"use `{key}` as before, or start a new sweep without `sweep.resume`"
            problems[key] = Problem(f"{source}, {key}: {space.dimensions[key]}", problem, fix)
    return list(problems.values())


class Suggestions:
    """The trials of a study, each a job with the same number.

    The study is written before the ledger, both at the start and the end of a trial: after a kill between the two,
    _take_up() completes the ledger.
    """

    def __init__(
        self, context: SweepContext, space: Space, goals: Goals, settings: SearchKeys, pruning: Pruning | None
    ) -> None:
        """Create or continue the study. Raises: RunnerError if it can't be continued."""
        self._context, self._space, self._goals, self._settings = context, space, goals, settings
        self._metric = goals[0]["metric"] if pruning is not None else None  # None: the jobs report nothing
        self._jobs = context.sweep.jobs
        jobs = list(self._jobs.values())
        study = open_study(context.sweep.folder, jobs, space, goals, pruning, is_here=context.is_here)
        self._trials = Trials(study, space, settings)
        self._resumed: deque[Job] = deque()
        self._interrupted: set[int] = set()  # jobs that ended here and are resumed later
        for trial in self._trials.all():
            self._take_up(trial)
        self._num_failed_in_a_row = 0
        self._is_over = False
        if context.config.sweep.retry:
            for job in jobs:
                if job.state in ("failed", "killed"):
                    self._trials.retry(job)

    def next(self, num_waiting: int) -> PreparedJob | None:
        """Return the next trial. It is made when a slot is free, so that it depends on all ended trials."""
        most = self._context.capacity.num_slots or self._settings.batch
        jobs = [job for job in self._jobs.values() if job.number not in self._interrupted]
        num_running = sum(not job.is_done for job in jobs) - len(self._resumed)
        if self._is_over or num_waiting or num_running >= most:
            return None
        if self._resumed:
            return self._prepared(self._resumed.popleft())
        num_good = sum(job.state not in BAD for job in jobs)
        while not self._is_over and num_good < self._settings.n_trials:
            job = self._new_job()
            if job is None:
                break
            try:
                return self._prepared(job)
            except (HydraException, OmegaConfBaseException, RunnerError) as error:
                # two choices that exclude each other; each one was checked before
                job.state, job.error = "failed", " ".join(str(error).split()) or type(error).__name__
                self.ended(job, Summary())
                self._context.ledger.note(job)
        return None

    def ended(self, job: Job, summary: Summary) -> None:
        """Report to the study. A finished job without the metric counts as failed."""
        if job.state == "interrupted":  # it is resumed later, as the same trial
            self._interrupted.add(job.number)
            return
        was_finished = job.state == "finished"
        self._conclude(job, summary)
        if job.state in GOOD:
            self._num_failed_in_a_row = 0
            return
        self._num_failed_in_a_row += 1
        has_good = any(job.state in GOOD for job in self._jobs.values())
        most = FAILURES_IN_A_ROW if has_good else FAILURES_AT_START
        has_no_such_metric = was_finished and not has_good
        if not self._is_over and (self._num_failed_in_a_row >= most or has_no_such_metric):
            self._is_over = True
            count = self._num_failed_in_a_row
            which = "the first trial" if count == 1 else f"{count} trials in a row"
            self._context.say(f"search: given up, {which} failed; job {job.number}: {job.error}")

    def _new_job(self) -> Job | None:
        trial = self._trials.ask(list(self._jobs.values()))
        if trial is None:
            self._is_over = True
            if self._settings.sampler != "grid":
                self._context.say("search: every combination has been tried")
            return None
        values, number = trial.params, trial.number
        job = Job(
            number, self._space.overrides(values), self._space.name(values), folder_name=str(number), trial=values
        )
        self._jobs[number] = job
        self._context.ledger.plan(job)
        return job

    def _prepared(self, job: Job) -> PreparedJob:
        prepared = self._context.prepare(job)
        if self._metric is not None:
            path = str(self._context.sweep.folder / FILE)
            prepared.trial = StudyTrial(path, job.number, metric=self._metric)
        return prepared

    def _conclude(self, job: Job, summary: Summary) -> None:
        from optuna.trial import TrialState

        values: list[float] | None = None
        if job.state == "finished":
            values, reason = values_of(summary, self._goals)
            if values is None:
                job.state, job.error = "failed", reason
        state = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(job.state, TrialState.FAIL)
        self._trials.tell(job.number, state, values)

    def _take_up(self, trial: FrozenTrial) -> None:
        from optuna.trial import TrialState

        job = self._jobs.get(trial.number)
        if job is None:
            if trial.state == TrialState.RUNNING:  # a kill came before its job was in the ledger
                self._trials.tell(trial.number, TrialState.FAIL)
            return
        if job.is_done:
            return
        folder = self._context.sweep.folder_of(job)
        summary = Summary.read(folder)
        if trial.state == TrialState.RUNNING and not summary.has_ended:
            typed = dict(zip(kept(self._space.fixed), self._space.fixed, strict=True))  # the ledger has no passwords
            store = {key_of(text): text for text in self._space.fixed if key_of(text) in STORE_KEYS}
            job.overrides = tuple(store.get(key_of(text), typed.get(text, text)) for text in job.overrides)
            self._resumed.append(job)
            return
        settle(job, folder, None, is_stopped=False)
        self._conclude(job, summary)
        self._context.ledger.note(job)


def values_of(summary: Summary, goals: Goals) -> tuple[list[float] | None, str]:
    """Return the value of a finished job: of its best epoch if that was chosen by this metric, else the last value.

    Returns None and the reason if it can't be compared.
    """
    best, metrics = summary.best, summary.metrics
    values = []
    for name in (goal["metric"] for goal in goals):
        kept = best.get("value") if best.get("metric") == name else None
        value = metrics.get(name) if kept is None else kept
        if value is None:
            return None, f"it has no metric {name}; it has {', '.join(sorted(metrics)) or 'none'}"
        if math.isnan(value):
            return None, f"its {name} is nan"
        values.append(float(value))
    return values, ""
