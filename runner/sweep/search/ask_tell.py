"""Opens a search's study, asks it for trials, and tells it what became of them. For job_source.py, in the sweep's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import Fault, RunnerError, refuse
from runner.sweep.jobs.ledger import Job
from runner.sweep.search.objectives import Goals
from runner.sweep.search.space import Space, distribution, listed
from runner.sweep.search.study import FILE, Pruning, make_pruner, make_sampler, make_study, open_storage, patiently

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial, TrialState

    from runner.config.schema import Search as Settings

MOST_REPEATS = 10  # suggestions in a row that have been tried already
RETRY = "retry_of"  # the attribute of a trial that has a failed one's values


class Asking:
    """A study of trials with these dimensions. `ask()` and `tell()` are on the disk when they return, some 10 ms each."""

    def __init__(self, study: Any, space: Space, settings: Settings) -> None:
        self._study, self._space = study, space
        self._is_grid = settings.sampler == "grid"
        self._distributions = {key: distribution(dimension) for key, dimension in space.dimensions.items()}
        self._values = [listed(dimension) for dimension in space.dimensions.values()]
        self._study.sampler = make_sampler(settings, num_trials=len(self.trials()))

    def ask(self, jobs: Sequence[Job]) -> Trial | None:
        """A new trial; None when every combination has been tried. jobs: those that there are already.

        What a job has had would give the same again, to the bit, and is not run a second time: samplers repeat themselves
        where there are few choices.
        """
        return patiently(lambda: self._ask({self._combination(job.trial or {}) for job in jobs}))

    def tell(self, number: int, state: TrialState, values: list[float] | None = None) -> None:
        """How a trial ended. One that was told before stays as it is: the sweep was killed before the ledger had it."""
        patiently(lambda: self._study.tell(number, values, state=state, skip_if_finished=True))

    def trials(self) -> list[FrozenTrial]:
        """All trials as they are now, by number."""
        found: list[FrozenTrial] = patiently(lambda: self._study.get_trials(deepcopy=False))
        return found

    def retry(self, job: Job) -> None:
        """Queues a trial with the values of one that failed, unless that has been done."""
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
    """The study in a sweep's folder, made if there are no jobs yet. is_here: whether they run on this machine.

    Raises: RunnerError when it is gone, or when its trials and this space don't go together.
    """
    path = folder / FILE
    if not jobs:  # one that a kill left half made holds nothing
        for half_made in folder.glob(f"{FILE}*"):
            half_made.unlink()
    elif not path.exists():
        problem = f"{FILE}, the study of its {len(jobs)} trials, is not there any more"
        raise RunnerError(Fault(f"sweep.resume={folder}", problem, "the same line without sweep.resume"))
    storage = patiently(lambda: open_storage(path, is_new=not jobs, may_share_memory=is_here))
    study = patiently(lambda: make_study(storage, [goal["direction"] for goal in goals], pruning))
    if pruning is not None:
        study.pruner = make_pruner(pruning)  # hyperband's brackets are the sampler's business, too
    trials = patiently(lambda: study.get_trials(deepcopy=False))
    if max((job.number for job in jobs), default=-1) >= len(trials):
        problem = f"{FILE} has {len(trials)} trials, and the ledger has more: it is an older copy"
        raise RunnerError(Fault(f"sweep.resume={folder}", problem, "the same line without sweep.resume"))
    _refuse_other_choices(folder, space, trials)
    return study


def _refuse_other_choices(folder: Path, space: Space, trials: Sequence[FrozenTrial]) -> None:
    from optuna.distributions import CategoricalDistribution, check_distribution_compatibility

    now = {key: distribution(dimension) for key, dimension in space.dimensions.items()}
    faults = {}
    for key, before in ((key, before) for trial in trials for key, before in trial.distributions.items()):
        try:
            check_distribution_compatibility(before, now.get(key, before))
        except ValueError:
            had = ", ".join(map(str, before.choices)) if isinstance(before, CategoricalDistribution) else "numbers"
            problem = f"its study has {key} as {had}, and that can't change while it goes on"
            fix = f"{key} as before, or a new sweep without sweep.resume"
            faults[key] = Fault(f"sweep.resume={folder}, {key}: {space.dimensions[key]}", problem, fix)
    refuse(faults.values())
