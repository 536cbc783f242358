"""A study and the sweep's hands go in; jobs come out, one whenever there is a place for it, and the study hears of each end."""

from __future__ import annotations

from collections import deque
from itertools import product
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from runner.errors import Fault, RunnerError
from runner.sweep.engine import read_summary, settle
from runner.sweep.goals import Goals, values_of
from runner.sweep.jobs import Prepared
from runner.sweep.ledger import Job
from runner.sweep.space import Space, distribution, listed
from runner.sweep.study import FILE, Pruning, make_pruner, make_sampler, make_study, open_storage, patiently

if TYPE_CHECKING:
    from optuna.trial import Trial

    from runner.schema import Search as Settings
    from runner.sweep.sweep import Hands

#: trials that fail one after the other before a search is given up: at its start, and later
FAILURES_AT_START, FAILURES_IN_A_ROW = 5, 10
RETRY = "retry_of"  # the attribute of a trial that has a failed one's values


class Suggestions:
    """The trials of a study, each of them a job of the same number.

    The study comes first and the ledger second, both when a trial is asked for and when it ends: a kill between the two
    leaves the study ahead, and _take_up() brings the ledger there.
    """

    def __init__(self, hands: Hands, space: Space, goals: Goals, settings: Settings, pruning: Pruning | None) -> None:
        """Makes the study, or goes on with it. Raises: RunnerError when this study can't be gone on with."""
        from optuna.trial import TrialState

        self._hands, self._space, self._goals, self._settings = hands, space, goals, settings
        self._metric = goals[0]["metric"] if pruning is not None else None  # None: the jobs report nothing
        self._distributions = {key: distribution(dimension) for key, dimension in space.dimensions.items()}
        self._path = hands.sweep.folder / FILE
        self._study = self._open(pruning)
        self._again: deque[Job] = deque()
        self._running: set[int] = set()
        self._failures = 0
        self._is_over = False
        self._take_up()
        trials = self._trials()
        self._num_good = sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)
        self._study.sampler = make_sampler(settings, num_trials=len(trials))

    def next(self, num_waiting: int) -> Prepared | None:
        """The next trial, made only when there is a place free for it, so that it knows of all that have ended."""
        most = self._hands.num_places or self._settings.batch
        if self._is_over or num_waiting or len(self._running) >= most:
            return None
        if self._again:
            return self._prepared(self._again.popleft())
        while self._num_good + len(self._running) < self._settings.n_trials and not self._is_over:
            trial = patiently(self._ask)
            if trial is None:
                self._is_over = True
                break
            job = self._hands.add(
                self._space.overrides(trial.params),
                self._space.name(trial.params),
                number=trial.number,
                trial=trial.params,
            )
            try:
                return self._prepared(job)
            except (HydraException, OmegaConfBaseException, RunnerError) as error:
                # two choices that don't go together: each alone was checked before
                job.state, job.error = "failed", str(error).strip().splitlines()[0]
                self.ended(job, {})
                self._hands.ledger.note(job)
        return None

    def ended(self, job: Job, summary: dict[str, Any]) -> None:
        """Tells the study. A job that finished without the metric is a failed one from here on."""
        self._running.discard(job.number)
        if job.state == "interrupted":
            return  # it goes on another time, as the same trial
        was_finished = job.state == "finished"
        self._conclude(job, summary)
        if job.state in ("finished", "pruned"):
            self._num_good, self._failures = self._num_good + 1, 0
            return
        self._failures += 1
        most = FAILURES_IN_A_ROW if self._num_good else FAILURES_AT_START
        is_mistaken = was_finished and not self._num_good  # no trial has such a metric
        if not self._is_over and (self._failures >= most or is_mistaken):
            self._is_over = True
            which = "the first trial" if self._failures == 1 else f"{self._failures} trials in a row"
            self._hands.say(f"search: given up, {which} failed; job {job.number}: {job.error}")

    def _conclude(self, job: Job, summary: dict[str, Any]) -> None:
        from optuna.trial import TrialState

        values: list[float] | None = None
        if job.state == "finished":
            values, reason = values_of(summary, self._goals)
            if values is None:
                job.state, job.error = "failed", reason
        state = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(job.state, TrialState.FAIL)
        self._tell(job.number, state, values)

    def _ask(self) -> Trial | None:
        """A new trial; None when a grid has no more."""
        if self._settings.sampler == "grid" and not self._is_queued():
            values = self._next_of_grid()
            if values is None:
                return None
            self._study.enqueue_trial(values)
        trial: Trial = self._study.ask(self._distributions)
        return trial

    def _is_queued(self) -> bool:
        from optuna.trial import TrialState

        return any(trial.state == TrialState.WAITING for trial in self._trials())

    def _next_of_grid(self) -> dict[str, Any] | None:
        """The first combination, in the order of the words, that no job has had."""
        keys = list(self._space.dimensions)
        taken = {tuple((job.trial or {}).get(key) for key in keys) for job in self._hands.sweep.jobs.values()}
        values = [listed(dimension) or [] for dimension in self._space.dimensions.values()]
        found = next((combination for combination in product(*values) if combination not in taken), None)
        return None if found is None else dict(zip(keys, found, strict=True))

    def _prepared(self, job: Job) -> Prepared:
        prepared = self._hands.prepare(job)
        if self._metric is not None:
            prepared.assigned = {"study": str(self._path), "trial": job.number, "metric": self._metric}
        self._running.add(job.number)
        return prepared

    def _tell(self, number: int, state: Any, values: list[float] | None) -> None:
        # a trial that the study has told already stays as it is: the sweep was killed before the ledger had it
        patiently(lambda: self._study.tell(number, values, state=state, skip_if_finished=True))

    def _trials(self) -> list[Any]:
        return patiently(lambda: self._study.get_trials(deepcopy=False))

    def _open(self, pruning: Pruning | None) -> Any:
        jobs = self._hands.sweep.jobs
        if not jobs:  # one that a kill left half made holds nothing
            for path in self._path.parent.glob(f"{FILE}*"):
                path.unlink()
        elif not self._path.exists():
            so = f"{FILE}, the study of its {len(jobs)} trials, is not there any more"
            raise RunnerError(Fault(f"sweep.resume={self._path.parent}", so, "the same line without sweep.resume"))
        storage = open_storage(self._path, is_new=not jobs, may_share_memory=self._hands.is_here)
        directions = [goal["direction"] for goal in self._goals]
        study = patiently(lambda: make_study(storage, directions, pruning))
        if pruning is not None:
            study.pruner = make_pruner(pruning)  # hyperband's brackets are the sampler's business, too
        self._refuse_other_choices(study.get_trials(deepcopy=False))
        return study

    def _refuse_other_choices(self, trials: list[Any]) -> None:
        """Ends of an interval may move when a study goes on; a dimension's kind and its choices may not."""
        from optuna.distributions import CategoricalDistribution, check_distribution_compatibility

        faults = {}
        for trial in trials:
            for key, before in trial.distributions.items():
                try:
                    check_distribution_compatibility(before, self._distributions.get(key, before))
                except ValueError:
                    is_choice = isinstance(before, CategoricalDistribution)
                    had = ", ".join(map(str, before.choices)) if is_choice else f"{before.low:g} to {before.high:g}"
                    so = f"its study has {key} as {had}, and that can't change while it goes on"
                    asked = f"sweep.resume={self._path.parent}, {key}: {self._space.dimensions[key]}"
                    faults[key] = Fault(asked, so, f"{key} as before, or a new sweep without sweep.resume")
        if faults:
            raise RunnerError(*faults.values())

    def _take_up(self) -> None:
        """Brings study and ledger together after a stop or a kill, and finds what is to go on."""
        from optuna.trial import TrialState

        jobs, ledger = self._hands.sweep.jobs, self._hands.ledger
        states = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
        trials = self._trials()
        for trial in trials:
            job = jobs.get(trial.number)
            if job is None:
                if trial.state == TrialState.RUNNING:  # asked for, and nobody heard the answer
                    self._tell(trial.number, TrialState.FAIL, None)
                continue
            if job.is_done:
                continue
            folder = self._hands.sweep.folder_of(job)
            summary = read_summary(folder)
            if trial.state.is_finished():
                job.state, job.error = states[trial.state], summary.get("error")
            elif summary.get("status") in ("finished", "pruned", "failed"):
                settle(job, folder, None, is_stopped=False)
                self._conclude(job, summary)
            else:
                self._again.append(job)
                continue
            ledger.note(job)
        if self._hands.config.sweep.retry:
            retried = {trial.user_attrs.get(RETRY) for trial in trials}
            for job in jobs.values():
                if job.state in ("failed", "killed") and job.number not in retried and job.trial:
                    self._study.enqueue_trial(job.trial, user_attrs={RETRY: job.number})
