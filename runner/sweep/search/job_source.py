"""Make jobs from a study's trials, one whenever there is a free slot, and report to the study how each ended.

scheduler.py requests the jobs, in the sweep's process.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.config.identity import key_of
from runner.errors import RunnerError
from runner.experiment.summary import Summary
from runner.sweep.jobs.ledger import Job, kept
from runner.sweep.jobs.prepare import OF_THE_STORE, PreparedJob, without
from runner.sweep.scheduler import settle
from runner.sweep.search.objectives import Goals, values_of
from runner.sweep.search.space import Space
from runner.sweep.search.study import FILE, Pruning

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from runner.config.schema import SearchKeys
    from runner.sweep.sweep import SweepContext
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import Problem, refuse
from runner.sweep.search.space import distribution, listed
from runner.sweep.search.study import make_pruner, make_sampler, make_study, open_storage, patiently

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial, TrialState

    from runner.config.schema import SearchKeys

MOST_REPEATS = 10  # repeated suggestions in a row
RETRY = "retry_of"  # attribute of a trial with a failed trial's values


class Asking:
    """A study of trials with these dimensions. `ask()` and `tell()` are on disk when they return, about 10 ms each."""

    def __init__(self, study: Any, space: Space, settings: SearchKeys) -> None:
        self._study, self._space = study, space
        self._is_grid = settings.sampler == "grid"
        self._distributions = {key: distribution(dimension) for key, dimension in space.dimensions.items()}
        self._values = [listed(dimension) for dimension in space.dimensions.values()]
        self._study.sampler = make_sampler(settings, num_trials=len(self.trials()))

    def ask(self, jobs: Sequence[Job]) -> Trial | None:
        """Return a new trial, or None if every combination was tried. jobs: The jobs so far.

        A job with the same values would be bitwise identical, and is not run again, although samplers repeat values if
        there are few choices.
        """
        return patiently(lambda: self._ask({self._combination(job.trial or {}) for job in jobs}))

    def tell(self, number: int, state: TrialState, values: list[float] | None = None) -> None:
        """Report how a trial ended, unless that was done before a kill of the sweep."""
        patiently(lambda: self._study.tell(number, values, state=state, skip_if_finished=True))

    def trials(self) -> list[FrozenTrial]:
        """Return all trials by number."""
        found: list[FrozenTrial] = patiently(lambda: self._study.get_trials(deepcopy=False))
        return found

    def retry(self, job: Job) -> None:
        """Queue a trial with a failed trial's values, once."""
        values = job.trial
        if values and job.number not in {trial.user_attrs.get(RETRY) for trial in self.trials()}:
            patiently(lambda: self._study.enqueue_trial(values, user_attrs={RETRY: job.number}))

    def _ask(self, seen: set[tuple[Any, ...]]) -> Trial | None:
        from optuna.trial import TrialState

        trial: Trial
        for _ in range(MOST_REPEATS):
            if self._is_grid and not self._is_queued() and not self._queue_unseen(seen):
                return None
            trial = self._study.ask(self._distributions)
            if RETRY in trial.user_attrs or self._combination(trial.params) not in seen:
                return trial
            self.tell(trial.number, TrialState.FAIL)
        if None not in self._values and not self._queue_unseen(seen):
            return None
        trial = self._study.ask(self._distributions)
        return trial

    def _is_queued(self) -> bool:
        from optuna.trial import TrialState

        return any(trial.state == TrialState.WAITING for trial in self.trials())

    def _queue_unseen(self, seen: set[tuple[Any, ...]]) -> bool:
        found = next((each for each in product(*(values or [] for values in self._values)) if each not in seen), None)
        if found is not None:
            self._study.enqueue_trial(dict(zip(self._space.dimensions, found, strict=True)))
        return found is not None

    def _combination(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(values.get(key) for key in self._space.dimensions)


def open_study(
    folder: Path, jobs: Sequence[Job], space: Space, goals: Goals, pruning: Pruning | None, *, is_here: bool
) -> Any:
    """Open the study in a sweep directory, or create it if `jobs` is empty. is_here: Whether jobs run on this machine.

    Raises: RunnerError if it is missing, or its trials don't fit this space.
    """
    path = folder / FILE
    if not jobs:  # a kill may have left an incomplete one
        for half_made in folder.glob(f"{FILE}*"):
            half_made.unlink()
    elif not path.exists():
        problem = f"`{FILE}`, the study of the sweep's {len(jobs)} trials, is missing"
        raise RunnerError.of(f"sweep.resume={folder}", problem, "remove `sweep.resume`")
    storage = patiently(lambda: open_storage(path, is_new=not jobs, may_share_memory=is_here))
    study = patiently(lambda: make_study(storage, [goal["direction"] for goal in goals], pruning))
    if pruning is not None:
        study.pruner = make_pruner(pruning)  # the sampler reads hyperband's brackets
    trials = patiently(lambda: study.get_trials(deepcopy=False))
    if max((job.number for job in jobs), default=-1) >= len(trials):
        problem = f"`{FILE}` has {len(trials)} trials, and the ledger has more: the file is an older copy"
        raise RunnerError.of(f"sweep.resume={folder}", problem, "remove `sweep.resume`")
    _refuse_other_choices(folder, space, trials)
    return study


def _refuse_other_choices(folder: Path, space: Space, trials: Sequence[FrozenTrial]) -> None:
    from optuna.distributions import CategoricalDistribution, check_distribution_compatibility

    now = {key: distribution(dimension) for key, dimension in space.dimensions.items()}
    problems = {}
    for key, before in ((key, before) for trial in trials for key, before in trial.distributions.items()):
        try:
            check_distribution_compatibility(before, now.get(key, before))
        except ValueError:
            had = ", ".join(map(str, before.choices)) if isinstance(before, CategoricalDistribution) else "numbers"
            problem = f"the study has `{key}` as {had}, which can't change while it continues"
            fix = f"use `{key}` as before, or start a new sweep without `sweep.resume`"
            problems[key] = Problem(f"sweep.resume={folder}, {key}: {space.dimensions[key]}", problem, fix)
    refuse(problems.values())


#: failed trials in a row that end a search: at its start, and later
FAILURES_AT_START, FAILURES_IN_A_ROW = 5, 10


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
        self._study = Asking(study, space, settings)
        self._again: deque[Job] = deque()
        self._running: set[int] = set()
        for trial in self._study.trials():
            self._take_up(trial)
        self._say_changes()
        self._num_good = sum(job.state in ("finished", "pruned") for job in self._jobs.values())
        self._num_failed_in_a_row = 0
        self._is_over = False
        if context.config.sweep.retry:
            for job in jobs:
                if job.state in ("failed", "killed"):
                    self._study.retry(job)

    def next(self, num_waiting: int) -> PreparedJob | None:
        """Return the next trial. It is made when a slot is free, so that it depends on all ended trials."""
        most = self._context.num_slots or self._settings.batch
        if self._is_over or num_waiting or len(self._running) >= most:
            return None
        if self._again:
            return self._prepared(self._again.popleft())
        while not self._is_over and self._num_good + len(self._running) < self._settings.n_trials:
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
        self._running.discard(job.number)
        if job.state == "interrupted":
            return  # it is resumed later, as the same trial
        was_finished = job.state == "finished"
        self._conclude(job, summary)
        if job.state in ("finished", "pruned"):
            self._num_good, self._num_failed_in_a_row = self._num_good + 1, 0
            return
        self._num_failed_in_a_row += 1
        most = FAILURES_IN_A_ROW if self._num_good else FAILURES_AT_START
        has_no_such_metric = was_finished and not self._num_good
        if not self._is_over and (self._num_failed_in_a_row >= most or has_no_such_metric):
            self._is_over = True
            count = self._num_failed_in_a_row
            which = "the first trial" if count == 1 else f"{count} trials in a row"
            self._context.say(f"search: given up, {which} failed; job {job.number}: {job.error}")

    def _new_job(self) -> Job | None:
        trial = self._study.ask(list(self._jobs.values()))
        if trial is None:
            self._is_over = True
            if self._settings.sampler != "grid":
                self._context.say("search: every combination has been tried")
            return None
        values = trial.params
        return self._context.add(
            self._space.overrides(values), self._space.name(values), number=trial.number, trial=values
        )

    def _prepared(self, job: Job) -> PreparedJob:
        prepared = self._context.prepare(job)
        if self._metric is not None:
            study = str(self._context.sweep.folder / FILE)
            prepared.assigned = {"study": study, "trial": job.number, "metric": self._metric}
        self._running.add(job.number)
        return prepared

    def _conclude(self, job: Job, summary: Summary) -> None:
        from optuna.trial import TrialState

        values: list[float] | None = None
        if job.state == "finished":
            values, reason = values_of(summary, self._goals)
            if values is None:
                job.state, job.error = "failed", reason
        state = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(job.state, TrialState.FAIL)
        self._study.tell(job.number, state, values)

    def _take_up(self, trial: FrozenTrial) -> None:
        from optuna.trial import TrialState

        job = self._jobs.get(trial.number)
        if job is None:
            if trial.state == TrialState.RUNNING:  # a kill came before its job was in the ledger
                self._study.tell(trial.number, TrialState.FAIL)
            return
        if job.is_done:
            return
        folder = self._context.sweep.folder_of(job)
        summary = Summary.read(folder)
        if trial.state == TrialState.RUNNING and not summary.has_ended:
            given = dict(zip(kept(self._space.fixed), self._space.fixed, strict=True))  # the ledger has no passwords
            store = {key_of(word): word for word in self._space.fixed if key_of(word) in OF_THE_STORE}
            job.overrides = tuple(store.get(key_of(word), given.get(word, word)) for word in job.overrides)
            self._again.append(job)
            return
        settle(job, folder, None, is_stopped=False)
        self._conclude(job, summary)
        self._context.ledger.note(job)

    def _say_changes(self) -> None:
        words = {dimension.word for dimension in self._space.dimensions.values()}
        if not self._jobs:
            return
        fixed = without(OF_THE_STORE, kept(self._space.fixed))
        before = without(OF_THE_STORE, kept(self._jobs[max(self._jobs)].overrides))
        last = {text for text in before if text.partition("=")[0] not in words}
        gone, come = sorted(last - {*fixed}), sorted({*fixed} - last)
        if gone or come:
            had, have = " ".join(gone) or "nothing of the kind", " ".join(come) or "nothing of the kind"
            self._context.say(f"note:   trials had {had}, and have {have} from here on: their values may not compare")
